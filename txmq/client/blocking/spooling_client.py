"""A client with a spool: all its sends go through one sender, in their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from itertools import pairwise
from time import monotonic
from typing import Unpack

from txmq.client.blocking.client import Client
from txmq.client.blocking.sender.sender import CONNECT_S
from txmq.client.blocking.spool import ClientSpool
from txmq.client.blocking.spooling_core import SpoolingCore
from txmq.client.protocol.sender.batches import StoredBatch
from txmq.client.protocol.sender.rows import Fields, checked_messages, column_messages
from txmq.client.protocol.sender.spool_chain import SpoolChain
from txmq.errors import RequestTimeout, TxmqError
from txmq.model.durations import Duration, seconds_of
from txmq.model.message import Message, Receipt, parse_message_id

STORE_S = 5.0  # for a message that is to be stored on a slow disk


class SpoolingClient(Client):
    """A client of one broker, which keeps messages on local disk while no broker
    answers.

    A send then returns a receipt that is `spooled`. Whatever waits on disk goes before
    anything sent later. Transactions do not use the spool.
    """

    def __init__(self, core: SpoolingCore) -> None:
        super().__init__(core)
        self._spool = ClientSpool(self._own_chain, self)
        self._own_chain()

    @property
    def spool(self) -> ClientSpool:
        """The messages that wait on local disk."""
        return self._spool

    def _own_chain(self) -> SpoolChain:
        core = self._core
        assert isinstance(core, SpoolingCore), "as it was made"
        chain = core.chain
        if not (chain.empty or chain.closed):
            _ = core.sender  # which drains what an earlier process left
        return chain

    def send(
        self,
        topic: str,
        body: bytes,
        *,
        partition: int | None = None,
        timeout: Duration | None = None,
        **fields: Unpack[Fields],
    ) -> Receipt:
        """Send one message and return its receipt once it is stored, or on local
        disk.
        """
        [receipt] = self._send(topic, [Message(body, **fields)], partition, timeout)
        return receipt

    def send_batch(
        self,
        topic: str,
        messages: Iterable[Message],
        *,
        partition: int | None = None,
        timeout: Duration | None = None,
    ) -> list[Receipt]:
        """Send messages and return their receipts, in order, once all are stored or on
        local disk. It is not all or nothing.
        """
        return self._send(topic, checked_messages(messages), partition, timeout)

    def send_many(
        self,
        topic: str,
        bodies: Sequence[bytes],
        keys: Sequence[str | None] | None = None,
        tags: Sequence[str | None] | None = None,
        *,
        partition: int | None = None,
        timeout: Duration | None = None,
    ) -> list[StoredBatch]:
        """Send messages given as columns, once all are stored or on local disk.

        With a spool this costs what `send_async` costs for each message.
        """
        messages = column_messages(bodies, keys, tags)
        return list(stored_batches(self._send(topic, messages, partition, timeout)))

    def send_message(self, topic: str, message: Message, partition: int | None) -> Future[Receipt]:
        """Send a message and return the future of its receipt; see `send_async`."""
        core = self._core
        return core.sender.send(topic, message, partition, core.settings.timeout)

    def _send(
        self,
        topic: str,
        messages: Sequence[Message],
        partition: int | None,
        timeout: Duration | None,
    ) -> list[Receipt]:
        core = self._core
        patience = core.settings.timeout if timeout is None else seconds_of(timeout, "timeout")
        deadline = monotonic() + patience
        futures: list[Future[Receipt]] = []
        try:
            for message in messages:
                left = max(0.0, deadline - monotonic())
                futures.append(core.sender.send(topic, message, partition, left))
            # Until the sender has noticed that no broker answers, and stored them.
            deadline = monotonic() + patience + core.settings.timeout + CONNECT_S + STORE_S
            return [future.result(max(0.0, deadline - monotonic())) for future in futures]
        except FutureTimeout as error:
            raise RequestTimeout("the message was neither stored nor spooled in time") from error
        except TxmqError as error:
            if len(messages) > 1 and futures:
                error.outcome = "unknown"  # others may be stored
            raise


def stored_batches(receipts: Sequence[Receipt]) -> Iterator[StoredBatch]:
    """Yield the receipts of neighbours as batches."""
    start = 0
    for at, (receipt, following) in enumerate(pairwise((*receipts, None)), 1):
        assert receipt is not None, "only the end is None"
        if following is None or not _are_neighbours(receipt, following):
            first = receipts[start]
            yield StoredBatch(
                first.topic,
                first.partition,
                first.offset,
                at - start,
                first.message_id,
                first.duplicate,
            )
            start = at


def _are_neighbours(one: Receipt, other: Receipt) -> bool:
    producer, sequence = parse_message_id(one.message_id)
    offset = None if one.offset is None else one.offset + 1
    return (
        parse_message_id(other.message_id) == (producer, sequence + 1)
        and (other.partition, other.offset) == (one.partition, offset)
        and (other.duplicate, other.spooled) == (one.duplicate, one.spooled)
    )
