"""Tables of the consumer's local store, and their rows.

A message has a narrow row with its indexes, and a row with its content. Each has a
checksum of what it must not lose. Within a partition a key's messages are in the order
of offsets. A message that arrives when its key has none, or the last one in another
partition, begins a new run.
"""

from __future__ import annotations

import json
import sqlite3
from typing import Any, NamedTuple
from uuid import UUID

from txmq.errors import ForeignStore
from txmq.model.retry import FailureReport
from txmq.recover.local.database import Form, checksum
from txmq.recover.local.values import Entry, Place, State, StoredMessage, StoreIdentity, StoreOwner

STORE = Form(
    "consumer store",
    "store.db",
    """
CREATE TABLE message (
    id INTEGER PRIMARY KEY,        -- in the order of arrival
    partition INTEGER NOT NULL,
    offset INTEGER NOT NULL,
    key TEXT,
    run INTEGER NOT NULL,          -- with the place: the order of a key
    state INTEGER NOT NULL,        -- 1 stored, 2 acked, 3 dead, 4 returned
    attempt INTEGER NOT NULL,
    due INTEGER NOT NULL,          -- all times are microseconds since the epoch
    first_at INTEGER NOT NULL,     -- when it came
    changed_at INTEGER NOT NULL,
    failure TEXT,                  -- [type, text, fingerprint, base, ...] in JSON
    generation INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    size INTEGER NOT NULL,
    told INTEGER NOT NULL,         -- 1: the broker knows this state
    head INTEGER NOT NULL,         -- 1: no earlier message of its key is here
    sum INTEGER NOT NULL           -- CRC32C of the columns from partition to size
);
CREATE UNIQUE INDEX by_place ON message (partition, offset);
CREATE INDEX by_due ON message (due, partition, offset) WHERE head = 1 AND state = 1;
CREATE INDEX by_key ON message (key, run, partition, offset) WHERE state <> 2;
CREATE INDEX by_untold ON message (run, partition, offset) WHERE told = 0;
CREATE TABLE content (
    id INTEGER PRIMARY KEY,        -- of the message
    message_id TEXT NOT NULL,
    tag TEXT,
    headers TEXT NOT NULL,         -- a JSON object
    born_at INTEGER NOT NULL,
    stored_at INTEGER NOT NULL,
    body BLOB NOT NULL,
    sum INTEGER NOT NULL           -- CRC32C of the columns from id to body
);
CREATE TABLE quarantined (
    id INTEGER PRIMARY KEY,
    at INTEGER NOT NULL,
    reason TEXT NOT NULL,
    line TEXT NOT NULL             -- as an export has it
);
""",
)
COLUMNS = (
    "id, partition, offset, key, run, state, attempt, due, first_at, changed_at, failure,"
    " generation, epoch, size, told, head, sum"
)
LARGEST = (1 << 63) - 1
_FAILURE_CHARACTERS = 1_000  # of an error's text: the broker cuts it, too
_BASES = 32
_NOTHING = FailureReport()


class Row(NamedTuple):
    """A narrow row. `size` counts the body, and something for the rest."""

    id: int
    partition: int
    offset: int
    key: str | None
    run: int
    state: int
    attempt: int
    due: int
    first_at: int
    changed_at: int
    failure: str | None
    generation: int
    epoch: int
    size: int
    told: int
    head: int
    sum: int = 0

    @property
    def holds(self) -> bool:
        """True while messages of the key behind it must wait."""
        return self.state != State.ACKED

    @property
    def sound(self) -> bool:
        """True if the checksum is right, and the state is one."""
        return self.sum == checksum(*self[1:14]) and self.state in _STATES

    def summed(self) -> Row:
        """Return the row with its checksum."""
        return self._replace(sum=checksum(*self[1:14]))

    def entry(self, topic_id: int) -> Entry:
        """Return the row as users see it."""
        sound = self.sound
        return Entry(
            Place(topic_id, self.partition, self.offset),
            self.key,
            State(self.state) if sound else State.RETURNED,
            self.attempt,
            self.due,
            failure_of(self.failure if sound else None),
            self.first_at,
            bool(self.told),
            self.generation,
            self.epoch,
        )


_STATES = frozenset(State)


def failure_text(failure: FailureReport) -> str | None:
    """Return a failure as the table has it, its texts cut."""
    if failure == _NOTHING:
        return None
    names = (failure.type, failure.text, failure.fingerprint, *failure.bases[:_BASES])
    return json.dumps([text[:_FAILURE_CHARACTERS] for text in names])


def failure_of(text: str | None) -> FailureReport:
    if text is None:
        return _NOTHING
    error_type, error_text, fingerprint, *bases = json.loads(text)
    return FailureReport(error_type, error_text, fingerprint, tuple(bases))


def content_row(number: int, message: StoredMessage) -> tuple[Any, ...]:
    """Return the row of a message's content."""
    fields = (
        number,
        message.message_id,
        message.tag,
        json.dumps(dict(message.headers)),
        message.born_at,
        message.stored_at,
        message.body,
    )
    return (*fields, checksum(*fields))


def message_of(connection: sqlite3.Connection, topic_id: int, row: Row) -> StoredMessage | None:
    """Return the message of a row, None where it is damaged, or its content gone."""
    found = connection.execute("SELECT * FROM content WHERE id = ?", (row.id,)).fetchone()
    if not row.sound or found is None or found[-1] != checksum(*found[:-1]):
        return None
    _, message_id, tag, headers, born_at, stored_at, body, _ = found
    return StoredMessage(
        Place(topic_id, row.partition, row.offset),
        row.key,
        tag,
        json.loads(headers),
        body,
        message_id,
        row.attempt,
        born_at,
        stored_at,
        row.epoch,
        row.generation,
    )


def identity_of(about: dict[str, Any]) -> StoreIdentity:
    """Return the identity of a store. Raises ForeignStore where it makes no sense."""
    try:
        log_id, ordered = UUID(about["log_id"]), bool(about["ordered"])
        owner = StoreOwner(about["group"], about["topic"], about["topic_id"], log_id, ordered)
        return StoreIdentity(UUID(hex=about["id"]), owner)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ForeignStore(f"no store's identity: {error!r}", hint="move it away") from error


def identity_json(identity: StoreIdentity) -> dict[str, Any]:
    """Return an identity as the database and exports have it."""
    owner = identity.owner
    return {
        "id": identity.id.hex,
        "group": owner.group,
        "topic": owner.topic,
        "topic_id": owner.topic_id,
        "log_id": str(owner.log_id),
        "ordered": owner.ordered,
    }
