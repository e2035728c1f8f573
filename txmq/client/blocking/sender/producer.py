"""Sending messages and waiting for their receipts, on the caller's own thread."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple, TypedDict, Unpack

from txmq.client.blocking.connections.pool import Pool, Session
from txmq.client.blocking.sender.delivery import (
    Delivery,
    Piece,
    Sent,
    Stored,
    cut,
    encoded,
    receipt_of,
    receipts_from,
)
from txmq.client.protocol.sender.rows import Messages, Rows, columns
from txmq.client.protocol.sender.topics import Topics
from txmq.errors import (
    ConnectionLost,
    LocalProtocolError,
    RequestRejected,
    RequestTimeout,
    TxmqError,
)
from txmq.model.message import Message, Receipt
from txmq.wire.headers import Opcode, send_header


class Fields(TypedDict, total=False):
    """What a message may have besides its body: the fields of txmq.Message."""

    key: str | None
    tag: str | None
    headers: Mapping[str, str] | None
    deliver_at: int | datetime | None
    expire_at: int | datetime | None
    delay: float | timedelta | None
    ttl: float | timedelta | None


class StoredBatch(NamedTuple):
    """`count` messages that are stored next to one another.

    Their offsets begin at `offset`, or None while they wait behind an undecided half of
    one of their keys; their ids are `<producer id>-<sequence>` with the sequences from
    that of `first_id` on.
    """

    topic: str
    partition: int
    offset: int | None
    count: int  # type: ignore[assignment] # hides a method of tuples that nobody calls on a batch
    first_id: str
    duplicate: bool


NO_RECEIPT = Receipt("", "", 0, None, duplicate=False)  # stands in until the message's own is there


def micros_now() -> int:
    """This machine's time in microseconds: when a message is born."""
    return time.time_ns() // 1_000


class Producer:
    """The sending half of a client. For any number of threads."""

    def __init__(self, pool: Pool, topics: Topics, *, timeout: float, retries: int) -> None:
        self._pool, self._topics = pool, topics
        self._timeout, self._retries = timeout, retries

    def send(
        self,
        topic: str,
        body: bytes,
        *,
        partition: int | None = None,
        timeout: float | None = None,
        **fields: Unpack[Fields],
    ) -> Receipt:
        """Sends one message and returns once it is stored, within `timeout` seconds,
        attempts included.
        """
        message = Message(body, **fields)
        shape = self._topics.shape(topic)
        chosen = self._topics.choose(shape, message.key, partition)
        patience = self._timeout if timeout is None else timeout
        session = self._pool.take(time.monotonic() + patience)
        try:
            piece = Piece(
                topic, Messages((message,), (micros_now(),)), (0,), partition, chosen, shape.epoch
            )
            return self._send_one(session, piece, patience)
        except (
            BaseException
        ):  # even an interrupt: a sequence must never be used for another message
            session.retire()
            raise
        finally:
            self._pool.give(session)

    def send_batch(
        self,
        topic: str,
        messages: Iterable[Message],
        *,
        partition: int | None = None,
        timeout: float | None = None,
    ) -> list[Receipt]:
        """Sends messages and returns their receipts, in their order, once all are
        stored.

        They go out in one batch for each partition. It is not all or nothing: an error
        says how many are stored. For all or nothing there is `client.transaction()`.
        `timeout` seconds may pass from one stored batch to the next.
        """
        listed = checked_messages(messages)
        receipts = [NO_RECEIPT] * len(listed)
        rows = Messages(listed, (micros_now(),) * len(listed))
        for stored in self._deliver(topic, rows, partition, timeout):
            for place, receipt in zip(stored.piece.places, receipts_of(stored), strict=True):
                receipts[place] = receipt
        return receipts

    def send_many(
        self,
        topic: str,
        bodies: Sequence[bytes],
        keys: Sequence[str | None] | None = None,
        tags: Sequence[str | None] | None = None,
        *,
        partition: int | None = None,
        timeout: float | None = None,
    ) -> list[StoredBatch]:
        """Sends messages given as columns, the fast path for volumes; returns once all
        are stored.

        They go out in batches of about a mebibyte, those without a key partition by
        partition in turn, several batches under way at once. Otherwise as `send_batch`.
        """
        rows = columns(bodies, keys, tags, micros_now())
        return [stored_batch(stored) for stored in self._deliver(topic, rows, partition, timeout)]

    def _send_one(self, session: Session, piece: Piece, patience: float) -> Receipt:
        """The first attempt is made here, in a straight line; whatever does not go well
        is Delivery's.
        """
        sequence = session.sequence
        batch = encoded(session, piece.rows, sequence, self._topics.compression)
        header = send_header(piece.topic, piece.partition, piece.epoch)
        try:
            timeout = patience / (self._retries + 1)
            payload = session.connection.request(Opcode.SEND, (header, batch), timeout=timeout)
            receipt = receipt_of(payload)
        except (ConnectionLost, RequestTimeout, RequestRejected) as error:
            delivery = Delivery(self._pool, self._topics, timeout=patience, retries=self._retries)
            [stored] = delivery.resume(session, Sent(piece, sequence, batch), error)
            return receipts_of(stored)[0]
        session.sequence = sequence + 1
        offset, _stored_at, duplicate = receipt
        found = offset if offset >= 0 else None
        return Receipt(
            f"{session.prefix}{sequence}", piece.topic, piece.partition, found, duplicate
        )

    def _deliver(
        self, topic: str, rows: Rows, partition: int | None, timeout: float | None
    ) -> Iterator[Stored]:
        if not len(rows):
            return
        patience = self._timeout if timeout is None else timeout
        pieces = cut(self._topics, topic, rows, partition, range(len(rows)))
        done = 0
        session = self._pool.take(time.monotonic() + patience)
        try:
            delivery = Delivery(self._pool, self._topics, timeout=patience, retries=self._retries)
            for stored in delivery.run(session, pieces):
                done += len(stored.piece.rows)
                yield stored
        except TxmqError as error:
            error.add_note(f"{done} of {len(rows)} messages are stored")
            if done:  # sent again as a whole, these would be there twice
                error.outcome = "unknown"
            raise
        finally:
            self._pool.give(session)


def checked_messages(messages: Iterable[Message]) -> list[Message]:
    """The messages as a list. Raises LocalProtocolError where one is something else."""
    listed = list(messages)
    if not all(isinstance(message, Message) for message in listed):
        raise LocalProtocolError(
            "not a sequence of messages", hint="make them with txmq.Message(body, ...)"
        )
    return listed


def receipts_of(stored: Stored) -> list[Receipt]:
    """The receipts of the messages of a piece."""
    (topic, rows, _places, _asked, partition, _epoch), prefix, sequence, receipt = stored
    return receipts_from(prefix, sequence, topic, partition, len(rows), receipt)


def stored_batch(stored: Stored) -> StoredBatch:
    """A piece as the caller of `send_many` sees it."""
    (
        (topic, rows, _places, _asked, partition, _epoch),
        prefix,
        sequence,
        (offset, _stored_at, duplicate),
    ) = stored
    found = offset if offset >= 0 else None
    return StoredBatch(topic, partition, found, len(rows), f"{prefix}{sequence}", duplicate)
