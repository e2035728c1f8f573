"""Records of a spool's log: batches, and notes about batches that are there already.

A batch is stored as it will be sent, with its producer id and its sequence: both stay
whatever happens, so that the broker recognises a repetition. Where something has to
change, a note says so, and is on disk before anything is sent by it:

- "split": the batch is sent row by row, each row for its own partition. Sent as a whole
  again, it would be taken for a repetition of its first row.
- "renewed": from a sequence on, the batches of a producer session are sent in another
  one, which begins there at 0, because the broker refused to skip what is missing.
  Its id is derived from the old one.
- "drained": everything before a position is at the broker or among the refused.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from enum import IntEnum
from hashlib import blake2b
from struct import Struct, error
from typing import NamedTuple

from txmq.batch import BatchView, read_header, single_row, with_producer
from txmq.store.log.record import Record, split_body

BATCH, NOTE = 1, 2  # kinds of records
UNROUTED = -1  # the partition of a message whose topic was not known
_BATCH = Struct("<BiIB")
_NOTE = Struct("<Bq16sQI")
_EXPLICIT, _DOUBTFUL = 1, 2


class NoteKind(IntEnum):
    """Subject of a note."""

    DRAINED = 1
    SPLIT = 2
    RENEWED = 3


class Note(NamedTuple):
    """A note, by kind: of a position, or of a session from a sequence on.

    `times` counts the renewals at that sequence.
    """

    kind: NoteKind
    position: int = 0
    session: bytes = bytes(16)
    sequence: int = 0
    times: int = 0


class SpooledBatch(NamedTuple):
    """A batch in the spool.

    `session` is the producer id under which it was stored here, `sequence` that of its
    first message. `explicit`: the sender named the partition. `doubtful`: it may be
    stored, because it was in flight when the connection was lost. `position` and `end`
    are those of its record, `stored_at` the time at which it was stored there; 0 before
    that.
    """

    topic: str
    partition: int
    epoch: int
    encoded: bytes
    session: bytes
    sequence: int
    count: int  # type: ignore[assignment] # hides a method of tuples that nobody calls
    explicit: bool = False
    doubtful: bool = False
    position: int = 0
    end: int = 0
    stored_at: int = 0

    @classmethod
    def of(
        cls,
        topic: str,
        partition: int,
        epoch: int,
        encoded: bytes,
        *,
        explicit: bool = False,
        doubtful: bool = False,
    ) -> SpooledBatch:
        """Return an encoded batch as one to be stored."""
        header = read_header(encoded)
        return cls(
            topic,
            partition,
            epoch,
            encoded,
            header.producer_id,
            header.sequence,
            header.count,
            explicit,
            doubtful,
        )

    def rows(self) -> Iterator[SpooledBatch]:
        """Yield each row as a batch of its own, not routed unless the sender did."""
        view = BatchView(self.encoded)
        partition = self.partition if self.explicit else UNROUTED
        for row in range(self.count):
            yield self._replace(
                encoded=single_row(self.encoded, row, view),
                partition=partition,
                epoch=0,
                sequence=self.sequence + row,
                count=1,
            )

    def key(self) -> str | None:
        """Return the key of its first row."""
        return BatchView(self.encoded).keys[0]


class Renewals:
    """The sessions that were renewed, by the sequences from which on."""

    def __init__(self) -> None:
        self._starts: dict[bytes, list[tuple[int, int]]] = {}

    def add(self, session: bytes, sequence: int) -> Note:
        """Renew a session from a sequence on, once more if it was renewed there."""
        starts = self._starts.setdefault(session, [])
        times = 1 + max((at for start, at in starts if start == sequence), default=0)
        note = Note(NoteKind.RENEWED, 0, session, sequence, times)
        self.apply(note)
        return note

    def apply(self, note: Note) -> None:
        """Take note of a renewal."""
        insort(self._starts.setdefault(note.session, []), (note.sequence, note.times))

    def resolve(self, session: bytes, sequence: int) -> tuple[bytes, int]:
        """Return the session and the sequence under which a message is sent now."""
        starts = self._starts.get(session)
        at = bisect_right(starts, (sequence, 1 << 32)) if starts else 0
        if not starts or not at:
            return session, sequence
        start, times = starts[at - 1]
        return _derived(session, start, times), sequence - start

    def stamp(self, encoded: bytes) -> bytes:
        """Return a batch as it is sent now."""
        if not self._starts:
            return encoded
        header = read_header(encoded)
        session, sequence = self.resolve(header.producer_id, header.sequence)
        if session == header.producer_id:
            return encoded
        return with_producer(encoded, session, sequence)


def retried_session(batch: SpooledBatch) -> bytes:
    """Return the session in which a refused batch is sent again."""
    return _derived(batch.session, batch.sequence, 0)


def _derived(session: bytes, sequence: int, times: int) -> bytes:
    text = b"%s %d %d" % (session, sequence, times)
    return blake2b(text, digest_size=16, person=b"txmq.spool").digest()


def encode_batch(batch: SpooledBatch) -> bytes:
    """Return the head of a batch's record; the encoded batch is the attachment."""
    name = batch.topic.encode()
    flags = _EXPLICIT * batch.explicit | _DOUBTFUL * batch.doubtful
    return _BATCH.pack(flags, batch.partition, batch.epoch, len(name)) + name


def encode_note(note: Note) -> bytes:
    """Return the head of a note's record."""
    return _NOTE.pack(*note)


def decode_record(record: Record) -> SpooledBatch | Note | None:
    """Return what a record says; None for one of an unknown kind.

    Raises ValueError where it cannot be read, though its checksum is right.
    """
    head, attachment, _position = split_body(record)
    try:
        if record.kind == NOTE:
            kind, *fields = _NOTE.unpack_from(head)
            return Note(NoteKind(kind), *fields)
        if record.kind != BATCH:
            return None
        flags, partition, epoch, length = _BATCH.unpack_from(head)
    except error as unreadable:
        raise ValueError(f"an unreadable record at {record.position}") from unreadable
    topic = bytes(head[_BATCH.size : _BATCH.size + length]).decode()
    batch = SpooledBatch.of(
        topic,
        partition,
        epoch,
        bytes(attachment),
        explicit=bool(flags & _EXPLICIT),
        doubtful=bool(flags & _DOUBTFUL),
    )
    return batch._replace(position=record.position, end=record.end, stored_at=record.stored_at)
