"""Batches of the producer's spool, and the tables that keep them.

A batch is stored as it will be sent, with its producer id and its sequence: both stay
whatever happens, so that the broker recognises a repetition. One that is `split` is
sent row by row, each row for its own partition, which the table says before. Sent as a
whole again, it would be taken for a repetition of its first row.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Container, Iterator
from hashlib import blake2b
from typing import Any, NamedTuple
from uuid import UUID

from txmq.batch import BatchView, read_header, single_row, with_producer
from txmq.recover.local.database import Form, checksum

COLUMNS = "id, topic, partition, epoch, explicit, doubtful, stored_at, encoded, sum"
_BATCH = """
    id INTEGER PRIMARY KEY,        -- in the order of sending
    topic TEXT NOT NULL,
    partition INTEGER NOT NULL,    -- -1: not routed yet
    epoch INTEGER NOT NULL,
    explicit INTEGER NOT NULL,     -- 1: the sender named the partition
    doubtful INTEGER NOT NULL,     -- 1: it may be at the broker
    stored_at INTEGER NOT NULL,    -- all times are microseconds since the epoch
    encoded BLOB NOT NULL,         -- as it is sent (docs/FORMATS.md 3)
    sum INTEGER NOT NULL,          -- CRC32C of the columns from topic to encoded"""
SPOOL = Form(
    "spool",
    "spool.db",
    f"""
CREATE TABLE batch ({_BATCH}
    split INTEGER NOT NULL         -- 1: it is sent row by row
);
CREATE TABLE refused ({_BATCH}
    error TEXT NOT NULL, text TEXT NOT NULL, at INTEGER NOT NULL, outcome TEXT NOT NULL
);
CREATE TABLE damaged (             -- as they were found
    id INTEGER PRIMARY KEY, {COLUMNS[4:]}, split
);
""",
)
UNROUTED = -1  # the partition of a message whose topic was not known


class Identity(NamedTuple):
    """The service that a spool belongs to, and the log of its broker where it is known.

    `incarnation` is that of the log: None where it is the first one.
    """

    id: str
    service: str | None = None
    log_id: UUID | None = None
    created_at: int = 0
    incarnation: UUID | None = None

    def row(self) -> dict[str, object]:
        """Return the identity as the database has it."""
        fields = self._asdict()
        return fields | {
            name: None if fields[name] is None else str(fields[name])
            for name in ("log_id", "incarnation")
        }


def identity_of(name: str, about: dict[str, Any]) -> Identity:
    """Return the identity of the spool in a directory of this name."""

    def uuid(of: str) -> UUID | None:
        return None if about.get(of) is None else UUID(about[of])

    service, created_at = about.get("service"), int(about.get("created_at") or 0)
    return Identity(name, service, uuid("log_id"), created_at, uuid("incarnation"))


class Refusal(NamedTuple):
    """Why a batch was refused: the error's class, its text, when, and its outcome."""

    error: str
    text: str
    at: int
    outcome: str


class Messages(NamedTuple):
    """The messages of a batch, by their session and sequences."""

    session: bytes
    sequence: int
    count: int  # type: ignore[assignment] # hides a method of tuples that nobody calls


class SpooledBatch(NamedTuple):
    """A batch in the spool.

    `session` is the producer id under which it was stored here, `sequence` that of its
    first message. `explicit`: the sender named the partition. `doubtful`: it may be
    stored, because it was in flight when the connection was lost. `position` is its
    place in the spool, `stored_at` the time at which it was stored there; 0 before.
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
        session, sequence, count = header.producer_id, header.sequence, header.count
        return cls(topic, partition, epoch, encoded, session, sequence, count, explicit, doubtful)

    @property
    def end(self) -> int:
        """The position after it."""
        return self.position + 1

    @property
    def messages(self) -> Messages:
        return Messages(self.session, self.sequence, self.count)

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

    def row(self, position: int | None, stored_at: int) -> tuple[object, ...]:
        """Return the columns of a table, with the checksum."""
        fields = (
            *(self.topic, self.partition, self.epoch, int(self.explicit), int(self.doubtful)),
            *(stored_at, self.encoded),
        )
        return (position, *fields, checksum(*fields))


def batch_of(row: tuple[Any, ...]) -> SpooledBatch:
    """Return the batch in a row. Raises ValueError for a damaged one."""
    position, topic, partition, epoch, explicit, doubtful, stored_at, encoded, found = row
    if checksum(*row[1:8]) != found:
        raise ValueError("checksum mismatch")
    batch = SpooledBatch.of(
        topic, partition, epoch, encoded, explicit=bool(explicit), doubtful=bool(doubtful)
    )
    return batch._replace(position=position, stored_at=stored_at)


def is_sound(row: tuple[Any, ...]) -> bool:
    """Return whether the batch in a row is whole."""
    try:
        batch_of(row)
    except ValueError:
        return False
    return True


def waiting(connection: sqlite3.Connection) -> Iterator[SpooledBatch]:
    """Yield what waits, batch by batch, or row by row where one was split. Damaged
    batches are passed over, refused ones are left out.
    """
    refused = {batch.messages for batch, _ in refused_batches(connection)}
    query = f"SELECT {COLUMNS}, split FROM batch ORDER BY id"  # noqa: S608  # of ours
    for *row, split in connection.execute(query):
        if is_sound(tuple(row)):
            yield from unsettled(batch_of(tuple(row)), refused, split=split)


def unsettled(
    batch: SpooledBatch, refused: Container[Messages], *, split: bool
) -> list[SpooledBatch]:
    """Return what is to be sent of a batch: itself, or its rows where it was split."""
    rows = batch.rows() if split else (batch,)
    return [one for one in rows if one.messages not in refused]


def refused_batches(connection: sqlite3.Connection) -> Iterator[tuple[SpooledBatch, Refusal]]:
    """Yield the refused batches, in their order. Damaged ones are passed over."""
    query = f"SELECT {COLUMNS}, error, text, at, outcome FROM refused ORDER BY id"  # noqa: S608  # of ours
    for row in connection.execute(query):
        if is_sound(row[:9]):
            yield batch_of(row[:9]), Refusal(*row[9:])


def retried(batch: SpooledBatch) -> SpooledBatch:
    """Return a refused batch as it is sent again: in a session of its own, because its
    old one went on without it. The same one in every copy.
    """
    name = b"%s %d 0" % (batch.session, batch.sequence)
    session = blake2b(name, digest_size=16, person=b"txmq.spool").digest()
    encoded = with_producer(batch.encoded, session, 0)
    return SpooledBatch.of(
        batch.topic, batch.partition, batch.epoch, encoded, explicit=batch.explicit, doubtful=True
    )
