"""Sends that are waited for: frames pipelined on one session, sent again while their
outcome is not known.

A frame that is sent again keeps its producer id and sequence, and the broker answers
with the first receipt. Sequences have no gaps: after a refusal the frames behind it are
refused too, and go out again in order under new sequences.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import repeat
from typing import NamedTuple

from txmq.batch import Compression
from txmq.batch.cells import too_large
from txmq.client.blocking.connections.pool import Pool, Session
from txmq.client.protocol.sender.rows import Rows
from txmq.client.protocol.sender.topics import Topics
from txmq.errors import (
    BrokerUnavailable,
    ConnectionLost,
    ProducerFenced,
    RemoteProtocolError,
    RequestRejected,
    RequestTimeout,
    SequenceGap,
    StaleTopic,
    Throttled,
    UnknownProducer,
    UnknownTopic,
)
from txmq.model import limits
from txmq.model.message import Receipt
from txmq.wire.headers import Opcode, SendReceipt, send_header, unpack_send_receipt

FRAMES_AHEAD = 64  # under way at once; the broker remembers the receipts of 256
BYTES_AHEAD = 8 << 20
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.5  # where the broker asks for a pause
Lost = ConnectionLost | RequestTimeout
DEFINITE = (
    StaleTopic | SequenceGap | ProducerFenced
)  # said only of what is not stored; other refusals come before the broker looks


class Piece(NamedTuple):
    """What one frame takes: rows of one topic for one partition. `asked` is the
    partition the caller named.

    `places` are those of the rows among all that the caller sent.
    """

    topic: str
    rows: Rows
    places: Sequence[int]
    asked: int | None
    partition: int
    epoch: int


class Sent(NamedTuple):
    """A piece as it went out. `doubtful`: an earlier attempt may have been stored."""

    piece: Piece
    sequence: int
    batch: bytes
    correlation: int = 0
    doubtful: bool = False


class Stored(NamedTuple):
    """A piece that the broker has, and `prefix` of its message ids."""

    piece: Piece
    prefix: str
    sequence: int
    receipt: SendReceipt


def receipt_of(payload: bytes) -> SendReceipt:
    """The receipt in a reply. RemoteProtocolError where it is none: the send may have
    been carried out.
    """
    try:
        return unpack_send_receipt(payload)
    except RemoteProtocolError as error:
        error.outcome = "unknown"
        raise


def receipts_from(
    prefix: str, sequence: int, topic: str, partition: int, count: int, receipt: SendReceipt
) -> list[Receipt]:
    """The receipts of the `count` messages of one frame."""
    offset, _stored_at, duplicate = receipt
    if count == 1:  # of most, where they go to many partitions
        return [
            Receipt(
                f"{prefix}{sequence}", topic, partition, offset if offset >= 0 else None, duplicate
            )
        ]
    ids = [f"{prefix}{row}" for row in range(sequence, sequence + count)]
    offsets = range(offset, offset + count) if offset >= 0 else repeat(None, count)
    return list(
        map(Receipt._make, zip(ids, repeat(topic), repeat(partition), offsets, repeat(duplicate)))
    )


def encoded(session: Session, rows: Rows, sequence: int, compression: Compression) -> bytes:
    """The batch of these rows. Raises MessageTooLarge where a body is over the broker's
    limit, as `encode` does.
    """
    most = session.connection.limits.message
    if most < limits.MESSAGE and (largest := rows.largest()) > most:
        raise too_large("message", largest, most)
    return rows.encode(session.producer_id, sequence, compression)


def cut(
    topics: Topics, topic: str, rows: Rows, asked: int | None, places: Sequence[int]
) -> Iterator[Piece]:
    """The pieces that rows go out in, each partition's in the order of the rows."""
    shape = topics.shape(topic)
    for partition, chosen in topics.spread(shape, rows, asked).items():
        at = 0
        mine = rows if len(chosen) == len(rows) else rows.pick(chosen)
        for part in mine.pieces():
            own = [places[place] for place in chosen[at : at + len(part)]]
            yield Piece(topic, part, own, asked, partition, shape.epoch)
            at += len(part)


class Delivery:
    """One call's sends on a borrowed session. `timeout` seconds may pass without a
    receipt, attempts included.
    """

    def __init__(self, pool: Pool, topics: Topics, *, timeout: float, retries: int) -> None:
        self._pool, self._topics = pool, topics
        self._timeout, self._retries = timeout, retries
        self._todo: deque[Piece] = deque()
        self._again: deque[Sent] = deque()  # to be sent once more, as they are
        self._sent: deque[Sent] = deque()
        self._progress()

    def run(self, session: Session, pieces: Iterable[Piece]) -> Iterator[Stored]:
        """Sends the pieces in order and gives each once it is stored; `session` is fit
        for use again at the end.

        Raises RequestRejected, BrokerUnavailable, or ConnectionLost and RequestTimeout
        where the outcome is unknown.
        """
        self._todo.extend(pieces)
        return self._run(session)

    def resume(
        self, session: Session, sent: Sent, error: Lost | RequestRejected
    ) -> Iterator[Stored]:
        """Goes on with one piece whose first attempt failed with `error`."""
        self._sent.append(sent)
        return self._run(session, error)

    def _run(
        self, session: Session, error: Lost | RequestRejected | None = None
    ) -> Iterator[Stored]:
        try:
            if isinstance(error, RequestRejected):
                self._refused(session, error)
            elif error is not None:
                self._reconnect(session, error)
            while self._todo or self._again or self._sent:
                try:
                    self._write_ahead(session)
                    stored = self._read_first(session)
                except (ConnectionLost, RequestTimeout) as lost:
                    self._reconnect(session, lost)
                else:
                    if stored is not None:
                        yield stored
        except BaseException:
            if self._sent:  # replies that are still to come are nobody's
                session.connection.close()
            session.retire()
            raise

    def _progress(self) -> None:
        self._deadline = time.monotonic() + self._timeout
        self._left = self._retries
        self._pause = FIRST_PAUSE_S

    def _attempt_ends(self) -> float:
        """Each attempt gets its share of the time that is left, so that a dead
        connection leaves some to the next.
        """
        now = time.monotonic()
        return now + (self._deadline - now) / (self._left + 1)

    def _write_ahead(self, session: Session) -> None:
        ends, under_way = self._attempt_ends(), sum(len(sent.batch) for sent in self._sent)
        while len(self._sent) < FRAMES_AHEAD and (under_way < BYTES_AHEAD or not self._sent):
            if self._again:
                sent = self._again.popleft()
            elif self._todo:
                sent = self._encode(session)
            else:
                return
            self._sent.append(sent)  # first, because a write that fails may have been received
            piece = sent.piece
            header = send_header(piece.topic, piece.partition, piece.epoch)
            correlation = session.connection.write(Opcode.SEND, (header, sent.batch), ends)
            self._sent[-1] = sent._replace(correlation=correlation)
            under_way += len(sent.batch)

    def _encode(self, session: Session) -> Sent:
        sequence = session.sequence
        if self._sent:
            sequence = self._sent[-1].sequence + len(self._sent[-1].piece.rows)
        batch = encoded(session, self._todo[0].rows, sequence, self._topics.compression)
        return Sent(self._todo.popleft(), sequence, batch)

    def _read_first(self, session: Session) -> Stored | None:
        sent = self._sent[0]
        try:
            receipt = receipt_of(session.connection.read(sent.correlation, self._attempt_ends()))
        except RequestRejected as error:
            self._refused(session, error)
            return None
        self._sent.popleft()
        session.sequence = sent.sequence + len(sent.piece.rows)
        self._progress()
        return Stored(sent.piece, session.prefix, sent.sequence, receipt)

    def _reconnect(self, session: Session, lost: Lost) -> None:
        """Makes ready to send again what is under way, or raises `lost`."""
        if not self._left or time.monotonic() >= self._deadline:
            raise lost
        self._left -= 1
        try:
            session.connection = self._pool.dial(self._deadline)
        except BrokerUnavailable as gone:
            raise lost from gone
        self._again.extendleft(sent._replace(doubtful=True) for sent in reversed(self._sent))
        self._sent.clear()

    def _refused(self, session: Session, error: RequestRejected) -> None:
        """The first piece under way was refused, and so is everything behind it: all go
        back, or `error` is raised.
        """
        first = self._sent[0]
        self._drain(session)
        if first.doubtful and not isinstance(error, DEFINITE):
            error.outcome = "unknown"
        if isinstance(error, Throttled):
            self._wait(error)
        elif not self._left or not self._curable(session, error, first):
            raise error
        else:
            self._left -= 1
        self._todo.extendleft(sent.piece for sent in reversed((*self._sent, *self._again)))
        self._sent.clear()
        self._again.clear()
        if isinstance(error, StaleTopic):
            self._reroute(first.piece.topic)

    def _drain(self, session: Session) -> None:
        """Reads the refusals of what was sent behind the first piece."""
        try:
            for sent in list(self._sent)[1:]:
                with suppress(RequestRejected):
                    session.connection.read(sent.correlation, self._attempt_ends())
        except (ConnectionLost, RequestTimeout):  # refused they are all the same
            session.connection = self._pool.dial(self._deadline)

    def _curable(self, session: Session, error: RequestRejected, first: Sent) -> bool:
        """Whether another attempt can do better; what it takes is done."""
        match error:
            case StaleTopic():
                return True
            # an earlier send is missing at the broker, so this one is certainly not
            # stored
            case SequenceGap():
                session.retire()
                return True
            case UnknownProducer() if (
                not first.doubtful
            ):  # idle for so long that the broker forgot the session
                session.retire()
                return True
            case UnknownTopic():
                self._topics.forget(first.piece.topic)
        return False

    def _reroute(self, topic: str) -> None:
        """The topic has grown: keys may belong to other partitions now."""
        self._topics.refresh(topic)
        pieces, self._todo = self._todo, deque()
        for piece in pieces:
            if piece.topic == topic:
                self._todo.extend(cut(self._topics, topic, piece.rows, piece.asked, piece.places))
            else:
                self._todo.append(piece)

    def _wait(self, error: Throttled) -> None:
        if time.monotonic() + self._pause >= self._deadline:
            raise error
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
