"""Sends that a caller waits for: batches in flight on one session, sent again while
their outcome is unknown.

A repeated batch keeps its producer id and sequence, so that the broker answers with the
first receipt. Sequences have no gaps: after a refusal the broker refuses all later
batches, too, and they go out again in order with new sequences.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress

from txmq.client.blocking.connections.pool import ConnectionPool, ProducerSession
from txmq.client.protocol.sender.batches import (
    DEFINITELY_NOT_STORED,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    ConfirmedBatch,
    OutgoingBatch,
    SentBatch,
    parse_receipt,
    split_into_batches,
)
from txmq.client.protocol.sender.topics import TopicCache
from txmq.errors import (
    ConnectionLost,
    RequestRejected,
    RequestTimeout,
    SequenceGap,
    StaleTopic,
    Throttled,
    UnknownProducer,
    UnknownTopic,
)
from txmq.wire.data_requests import Opcode, send_header

MAX_IN_FLIGHT = 64  # batches; the broker remembers the receipts of 256
MAX_BYTES_IN_FLIGHT = 8 << 20
Lost = ConnectionLost | RequestTimeout


class BatchDelivery:
    """The batches of one call on a borrowed session.

    It fails after `timeout` seconds without a receipt, `retries` included.
    """

    def __init__(
        self, pool: ConnectionPool, topics: TopicCache, *, timeout: float, retries: int
    ) -> None:
        self._pool, self._topics = pool, topics
        self._timeout, self._retries = timeout, retries
        self._unsent: deque[OutgoingBatch] = deque()
        self._repeat: deque[SentBatch] = deque()  # to be sent again, unchanged
        self._in_flight: deque[SentBatch] = deque()
        self._reset_deadline()

    def run(
        self, session: ProducerSession, batches: Iterable[OutgoingBatch]
    ) -> Iterator[ConfirmedBatch]:
        """Send batches in order and yield each once it is stored.

        The session is fit for use again at the end. Raises RequestRejected,
        BrokerUnavailable, or ConnectionLost and RequestTimeout with an unknown outcome.
        """
        self._unsent.extend(batches)
        return self._run(session)

    def resume(
        self, session: ProducerSession, sent: SentBatch, error: Lost | RequestRejected
    ) -> Iterator[ConfirmedBatch]:
        """Continue with a batch whose first attempt failed with `error`."""
        self._in_flight.append(sent)
        return self._run(session, error)

    def _run(
        self, session: ProducerSession, error: Lost | RequestRejected | None = None
    ) -> Iterator[ConfirmedBatch]:
        try:
            if isinstance(error, RequestRejected):
                self._handle_refusal(session, error)
            elif error is not None:
                self._reconnect(session, error)
            while self._unsent or self._repeat or self._in_flight:
                try:
                    self._write_ahead(session)
                    confirmed = self._read_first(session)
                except (ConnectionLost, RequestTimeout) as lost:
                    self._reconnect(session, lost)
                else:
                    if confirmed is not None:
                        yield confirmed
        except BaseException:
            if self._in_flight:  # nobody will read their replies
                session.connection.close()
            session.renew()
            raise

    def _reset_deadline(self) -> None:
        self._deadline = time.monotonic() + self._timeout
        self._retries_left = self._retries
        self._pause = FIRST_PAUSE_S

    def _attempt_deadline(self) -> float:
        """Return the end of this attempt, which leaves time for those to come."""
        now = time.monotonic()
        return now + (self._deadline - now) / (self._retries_left + 1)

    def _write_ahead(self, session: ProducerSession) -> None:
        deadline = self._attempt_deadline()
        size = sum(len(sent.encoded) for sent in self._in_flight)
        while len(self._in_flight) < MAX_IN_FLIGHT and (
            size < MAX_BYTES_IN_FLIGHT or not self._in_flight
        ):
            if self._repeat:
                sent = self._repeat.popleft()
            elif self._unsent:
                sent = self._encode(session)
            else:
                return
            self._in_flight.append(sent)  # first: a write that fails may have been received
            batch = sent.outgoing
            header = send_header(batch.topic, batch.partition, batch.epoch)
            payload = (header, sent.encoded)
            correlation = session.connection.write(Opcode.SEND, payload, deadline)
            self._in_flight[-1] = sent._replace(correlation=correlation)
            size += len(sent.encoded)

    def _encode(self, session: ProducerSession) -> SentBatch:
        sequence = session.sequence
        if self._in_flight:
            last = self._in_flight[-1]
            sequence = last.sequence + len(last.outgoing.rows)
        encoded = self._unsent[0].rows.encode(
            session.producer_id,
            sequence,
            self._topics.compression,
            session.connection.limits.message,
        )
        return SentBatch(self._unsent.popleft(), sequence, encoded)

    def _read_first(self, session: ProducerSession) -> ConfirmedBatch | None:
        sent = self._in_flight[0]
        try:
            receipt = parse_receipt(
                session.connection.read(sent.correlation, self._attempt_deadline())
            )
        except RequestRejected as error:
            self._handle_refusal(session, error)
            return None
        self._in_flight.popleft()
        session.sequence = sent.sequence + len(sent.outgoing.rows)
        self._reset_deadline()
        return ConfirmedBatch(sent.outgoing, session.prefix, sent.sequence, receipt)

    def _reconnect(self, session: ProducerSession, lost: Lost) -> None:
        """Prepare to repeat the batches in flight on a new connection, or raise
        `lost`.
        """
        if not self._retries_left or time.monotonic() >= self._deadline:
            raise lost
        self._retries_left -= 1
        self._pool.reconnect(session, self._deadline, lost)
        self._repeat.extendleft(sent._replace(doubtful=True) for sent in reversed(self._in_flight))
        self._in_flight.clear()

    def _handle_refusal(self, session: ProducerSession, error: RequestRejected) -> None:
        """Prepare another attempt of the refused batch and all later ones, or raise
        `error`.
        """
        first = self._in_flight[0]
        self._read_refusals(session)
        if first.doubtful and not isinstance(error, DEFINITELY_NOT_STORED):
            error.outcome = "unknown"
        if isinstance(error, Throttled):
            self._wait(error)
        elif not self._retries_left or not self._prepare_retry(session, error, first):
            raise error
        else:
            self._retries_left -= 1
        self._unsent.extendleft(
            sent.outgoing for sent in reversed((*self._in_flight, *self._repeat))
        )
        self._in_flight.clear()
        self._repeat.clear()
        if isinstance(error, StaleTopic):
            self._reroute(first.outgoing.topic)

    def _read_refusals(self, session: ProducerSession) -> None:
        """Read the refusals of the batches after the first one."""
        try:
            for sent in list(self._in_flight)[1:]:
                with suppress(RequestRejected):
                    session.connection.read(sent.correlation, self._attempt_deadline())
        except (ConnectionLost, RequestTimeout):  # they are refused all the same
            session.connection = self._pool.connect(self._deadline)

    def _prepare_retry(
        self, session: ProducerSession, error: RequestRejected, first: SentBatch
    ) -> bool:
        """Prepare another attempt where it can succeed."""
        match error:
            case StaleTopic():
                return True
            # The broker lacks an earlier batch, so it has certainly not stored this
            # one.
            case SequenceGap():
                session.renew()
                return True
            # The broker forgets sessions that are idle for long.
            case UnknownProducer() if not first.doubtful:
                session.renew()
                return True
            case UnknownTopic():
                self._topics.forget(first.outgoing.topic)
        return False

    def _reroute(self, topic: str) -> None:
        """Split unsent batches by the topic's new partitions: keys may have moved."""
        self._topics.refresh(topic)
        batches, self._unsent = self._unsent, deque()
        for batch in batches:
            if batch.topic == topic:
                self._unsent.extend(
                    split_into_batches(
                        self._topics, topic, batch.rows, batch.requested_partition, batch.places
                    )
                )
            else:
                self._unsent.append(batch)

    def _wait(self, error: Throttled) -> None:
        pause = max(self._pause, error.retry_after_s)
        if time.monotonic() + pause >= self._deadline:
            raise error
        time.sleep(pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
