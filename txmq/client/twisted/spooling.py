"""A Twisted client with a spool. Its sends are made by the blocking sender, in a
thread: a disk needs threads anyway, and so there is one queue for all.

The messages of one turn of the reactor go to the thread together, and receipts come
back together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Lock
from typing import NamedTuple, Unpack

from twisted.internet.defer import Deferred, DeferredList, succeed
from twisted.python.failure import Failure

from txmq.client.blocking.spooling_client import SpoolingClient as BlockingClient
from txmq.client.blocking.spooling_client import stored_batches
from txmq.client.blocking.spooling_core import SpoolingCore
from txmq.client.protocol.conversation import client_closed
from txmq.client.protocol.sender.batches import StoredBatch
from txmq.client.protocol.sender.rows import Fields, checked_messages, column_messages
from txmq.client.protocol.settings import EXIT_S, ClientSettings
from txmq.client.twisted.client import Client, log_dropped, receipts_of
from txmq.client.twisted.core import TwistedCore
from txmq.client.twisted.protocols import Reactor
from txmq.client.twisted.spool import TwistedSpool
from txmq.client.twisted.threads import Threads
from txmq.model.message import Message, Receipt


class _Unsent(NamedTuple):
    """A message on its way to the thread."""

    topic: str
    message: Message
    partition: int | None
    receipt: Deferred[Receipt]


class SpoolingClient(Client):
    """A client of one broker, which keeps messages on local disk while no broker
    answers.

    A send then has a receipt that is `spooled`. Whatever waits on disk goes before
    anything sent later. Transactions do not use the spool.
    """

    def __init__(self, reactor: Reactor, url: str, settings: ClientSettings) -> None:
        """Raises StoreError where the spool cannot be opened."""
        core = TwistedCore(reactor, url, settings, blocking_client=_blocking_client)
        super().__init__(core)
        self._reactor = reactor
        assert isinstance(core.blocking, BlockingClient), "as it was made"
        self._blocking = core.blocking
        self._in_order = Threads(reactor, 1)
        self._spool = TwistedSpool(self._blocking.spool, core.threads)
        self._unsent: list[_Unsent] = []
        self._lock = Lock()
        self._answered: list[tuple[Deferred[Receipt], Future[Receipt] | Exception]] = []
        self._scheduled = self._closed = False
        self._at_shutdown: object = reactor.addSystemEventTrigger(
            "before", "shutdown", self._close_at_shutdown
        )

    @property
    def spool(self) -> TwistedSpool:
        """The messages that wait on local disk."""
        return self._spool

    def send(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> Deferred[Receipt]:
        """Send a message, for its receipt, once it is stored or on local disk."""
        return self._submit(topic, Message(body, **fields), partition)

    def send_batch(
        self, topic: str, messages: Iterable[Message], *, partition: int | None = None
    ) -> Deferred[list[Receipt]]:
        """Send messages together, for their receipts in order. It is not all or
        nothing.
        """
        return self._submit_all(topic, checked_messages(messages), partition)

    def send_many(
        self,
        topic: str,
        bodies: Sequence[bytes],
        keys: Sequence[str | None] | None = None,
        tags: Sequence[str | None] | None = None,
        *,
        partition: int | None = None,
    ) -> Deferred[list[StoredBatch]]:
        """Send messages that are given as columns. With a spool this costs what `send`
        costs for each of them.
        """
        messages = column_messages(bodies, keys, tags)
        sent = self._submit_all(topic, messages, partition)
        return sent.addCallback(lambda receipts: list(stored_batches(receipts)))

    def send_one_way(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> None:
        if self._closed:
            raise client_closed("txmq.twisted.connect")
        self._submit(topic, Message(body, **fields), partition).addErrback(log_dropped, topic)

    def flush(self, timeout: float | None = None) -> Deferred[None]:
        """Wait until each message has its receipt or has failed."""
        return self._in_order.run(self._blocking.flush, timeout)

    def close(self) -> Deferred[None]:
        """Close the client: its consumers leave their groups.

        What waits on disk stays there for the next client with this directory.
        """
        if self._closed:
            return succeed(None)
        self._send_unsent()
        self._closed = True
        if self._at_shutdown is not None:
            self._reactor.removeSystemEventTrigger(self._at_shutdown)
        return Deferred.fromCoroutine(self._close_all())

    def _close_at_shutdown(self) -> Deferred[None]:
        self._at_shutdown = None
        return self.close().addTimeout(2 * EXIT_S, self._reactor)

    async def _close_all(self) -> None:
        await self._in_order.run(lambda: None)  # after everything sent so far
        await self._close()
        await self._in_order.stop()

    def _submit_all(
        self, topic: str, messages: Sequence[Message], partition: int | None
    ) -> Deferred[list[Receipt]]:
        sent = [self._submit(topic, message, partition) for message in messages]
        return DeferredList(sent, consumeErrors=True).addCallback(receipts_of)

    def _submit(self, topic: str, message: Message, partition: int | None) -> Deferred[Receipt]:
        receipt: Deferred[Receipt] = Deferred(lambda _cancelled: None)
        if self._closed:
            receipt.errback(client_closed("txmq.twisted.connect"))
            return receipt
        self._unsent.append(_Unsent(topic, message, partition, receipt))
        if not self._scheduled:
            self._scheduled = True
            self._reactor.callLater(0, self._send_unsent)
        return receipt

    def _send_unsent(self) -> None:
        """Give the messages of this turn to the thread, in their order."""
        self._scheduled = False
        unsent, self._unsent = self._unsent, []
        if unsent:
            self._in_order.run(self._send_in_thread, unsent).addErrback(_fail_all, unsent)

    def _send_in_thread(self, unsent: Sequence[_Unsent]) -> None:
        for topic, message, partition, receipt in unsent:
            try:
                sent = self._blocking.send_message(topic, message, partition)
            except Exception as error:  # noqa: BLE001  # of the user's partitioner, too
                self._answer(receipt, error)
            else:
                sent.add_done_callback(partial(self._answer, receipt))

    def _answer(self, receipt: Deferred[Receipt], answer: Future[Receipt] | Exception) -> None:
        """Bring an answer back to the reactor, from any thread."""
        with self._lock:
            first = not self._answered
            self._answered.append((receipt, answer))
        if first:
            self._reactor.callFromThread(self._give_answers)

    def _give_answers(self) -> None:
        with self._lock:
            answered, self._answered = self._answered, []
        for receipt, answer in answered:
            error = answer if isinstance(answer, Exception) else answer.exception()
            if receipt.called:  # cancelled
                continue
            if error is None:
                assert isinstance(answer, Future), "an error otherwise"
                receipt.callback(answer.result())
            else:
                receipt.errback(error)


def _blocking_client(core: TwistedCore) -> BlockingClient:
    return BlockingClient(SpoolingCore(*core.identity))


def _fail_all(failure: Failure, unsent: Sequence[_Unsent]) -> None:
    for message in unsent:
        if not message.receipt.called:
            message.receipt.errback(failure)
