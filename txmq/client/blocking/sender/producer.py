"""Sends that wait for their receipts, on the caller's own thread."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Unpack

from txmq.client.blocking.connections.pool import ConnectionPool, ProducerSession
from txmq.client.blocking.sender.delivery import BatchDelivery
from txmq.client.protocol.sender.batches import (
    NO_RECEIPT,
    ConfirmedBatch,
    OutgoingBatch,
    SentBatch,
    StoredBatch,
    split_into_batches,
)
from txmq.client.protocol.sender.rows import (
    Fields,
    MessageRows,
    Rows,
    checked_messages,
    column_rows,
    micros_now,
)
from txmq.client.protocol.sender.topics import TopicCache
from txmq.errors import (
    ConnectionLost,
    RemoteProtocolError,
    RequestRejected,
    RequestTimeout,
    TxmqError,
)
from txmq.model.causation import current_cause, with_cause
from txmq.model.durations import Duration, seconds_of
from txmq.model.measures import counted
from txmq.model.message import Message, Receipt
from txmq.wire.data_requests import Opcode, send_header, unpack_send_receipt


class BlockingProducer:
    """The part of a blocking client that sends and waits. For any number of threads."""

    def __init__(
        self, pool: ConnectionPool, topics: TopicCache, *, timeout: float, retries: int
    ) -> None:
        self._pool, self._topics = pool, topics
        self._timeout, self._retries = timeout, retries

    def send(
        self,
        topic: str,
        body: bytes,
        *,
        partition: int | None = None,
        timeout: Duration | None = None,
        **fields: Unpack[Fields],
    ) -> Receipt:
        """Send one message and return its receipt once it is stored.

        Gives up after `timeout` seconds, retries included.
        """
        message = Message(body, **fields)
        if current_cause.get() is not None:
            message = with_cause(message)
        chosen, epoch = self._topics.locate(topic, message.key, partition)
        patience = self._timeout if timeout is None else seconds_of(timeout, "timeout")
        session = self._pool.acquire(time.monotonic() + patience)
        try:
            rows = MessageRows((message,), (time.time_ns() // 1_000,))
            batch = OutgoingBatch(topic, rows, (0,), partition, chosen, epoch)
            return self._send_one(session, batch, patience)
        except BaseException:
            # Even after an interrupt: no other message must ever have this sequence.
            session.renew()
            raise
        finally:
            self._pool.release(session)

    def send_batch(
        self,
        topic: str,
        messages: Iterable[Message],
        *,
        partition: int | None = None,
        timeout: Duration | None = None,
    ) -> list[Receipt]:
        """Send messages and return their receipts, in order, once all are stored.

        They go out in one batch for each partition. It is not all or nothing: an error
        says how many are stored. For all or nothing use `client.transaction()`. Gives
        up after `timeout` seconds without a receipt.
        """
        listed = list(map(with_cause, checked_messages(messages)))
        receipts = [NO_RECEIPT] * len(listed)
        rows = MessageRows(listed, (micros_now(),) * len(listed))
        for batch in self._deliver(topic, rows, partition, timeout):
            for place, receipt in zip(batch.outgoing.places, batch.receipts(), strict=True):
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
        timeout: Duration | None = None,
    ) -> list[StoredBatch]:
        """Send messages given as columns, fast for volumes, once all are stored.

        They go out in batches of about a mebibyte, several of them in flight. Those
        without a key go to the partitions in turn. Otherwise this is `send_batch`.
        """
        rows = column_rows(bodies, keys, tags, micros_now())
        return [batch.stored() for batch in self._deliver(topic, rows, partition, timeout)]

    def _send_one(self, session: ProducerSession, batch: OutgoingBatch, patience: float) -> Receipt:
        """Make the first attempt here, without loops; BatchDelivery makes others."""
        sequence, connection = session.sequence, session.connection
        encoded = batch.rows.encode(
            session.producer_id, sequence, self._topics.compression, connection.limits.message
        )
        header = send_header(batch.topic, batch.partition, batch.epoch)
        timeout = patience / (self._retries + 1)
        try:
            payload = connection.request(Opcode.SEND, (header, encoded), timeout=timeout)
        except (ConnectionLost, RequestTimeout, RequestRejected) as error:
            delivery = BatchDelivery(
                self._pool, self._topics, timeout=patience, retries=self._retries
            )
            [confirmed] = delivery.resume(session, SentBatch(batch, sequence, encoded), error)
            return confirmed.receipts()[0]
        try:
            offset, _stored_at, duplicate = unpack_send_receipt(payload)
        except RemoteProtocolError as error:
            error.outcome = "unknown"  # the message may be stored
            raise
        session.sequence = sequence + 1
        return Receipt(
            f"{session.prefix}{sequence}",
            batch.topic,
            batch.partition,
            offset if offset >= 0 else None,
            duplicate,
        )

    def _deliver(
        self, topic: str, rows: Rows, partition: int | None, timeout: Duration | None
    ) -> Iterator[ConfirmedBatch]:
        if not len(rows):
            return
        patience = self._timeout if timeout is None else seconds_of(timeout, "timeout")
        batches = split_into_batches(self._topics, topic, rows, partition, range(len(rows)))
        count = 0
        session = self._pool.acquire(time.monotonic() + patience)
        try:
            delivery = BatchDelivery(
                self._pool, self._topics, timeout=patience, retries=self._retries
            )
            for confirmed in delivery.run(session, batches):
                count += len(confirmed.outgoing.rows)
                yield confirmed
        except TxmqError as error:
            error.add_note(f"stored: {count} of {counted(len(rows), 'message')}")
            if count:  # a repetition of the whole call would store these twice
                error.outcome = "unknown"
            raise
        finally:
            self._pool.release(session)
