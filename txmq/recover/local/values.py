"""Values of the consumer's local store: what goes in, and what comes out.

Times are microseconds since the epoch.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from txmq.model.retry import FailureReport

if TYPE_CHECKING:
    from collections.abc import Mapping


class Place(NamedTuple):
    """The place of a message in its topic."""

    topic_id: int
    partition: int
    offset: int


class State(IntEnum):
    """State of a stored message; numbers of the disk. All but STORED are final.

    All but ACKED hold the key until the message is forgotten: those behind must not
    overtake it.
    """

    STORED = 1  # to be handled here
    ACKED = 2  # handled
    DEAD = 3  # given up: the broker makes a dead letter of its copy
    RETURNED = 4  # given back: the broker delivers its copy again


class StoredMessage(NamedTuple):
    """A message with all that a handler sees of it.

    `attempt` is the attempt that was recorded last. `generation` is the member's when
    the message was delivered to it, 0 = not known.
    """

    place: Place
    key: str | None
    tag: str | None
    headers: Mapping[str, str]
    body: bytes
    message_id: str
    attempt: int
    born_at: int
    stored_at: int
    epoch: int
    generation: int = 0


class Entry(NamedTuple):
    """A stored message without its body.

    `told`: the broker knows this state, attempt and due time.
    """

    place: Place
    key: str | None
    state: State
    attempt: int
    due: int
    failure: FailureReport
    first_at: int
    told: bool
    generation: int = 0
    epoch: int = 0


class Scanned(NamedTuple):
    """A stored message; `message` is None where the body is no longer there, or cannot
    be read.
    """

    entry: Entry
    message: StoredMessage | None


class Change(NamedTuple):
    """An outcome of an attempt: a final state, or STORED with the next due time."""

    place: Place
    state: State
    attempt: int
    due: int
    failure: FailureReport = FailureReport()


class StoreOwner(NamedTuple):
    """The consumer group and topic that a store belongs to, in the log of a broker.

    In an `ordered` group messages of a key are handed out one after another.
    """

    group: str
    topic: str
    topic_id: int
    log_id: UUID
    ordered: bool


class StoreLimits(NamedTuple):
    """The largest size of a store."""

    bytes: int = 1 << 30
    messages: int = 1_000_000


class StoreIdentity(NamedTuple):
    """The id of a store, and its owner."""

    id: UUID
    owner: StoreOwner


class StoreStats(NamedTuple):
    """Figures of an open store.

    `messages` and `bytes` count what is stored and not acked, `settled` what is acked
    and not yet forgotten. `oldest` is the time when the oldest of the messages came, 0
    without any; `attempts` is the sum of theirs. `damaged` counts the bodies that were
    found unreadable since the store was opened; the broker delivers its copies again.
    `full`: a put would be refused; `disk_full`: for lack of disk space.
    """

    messages: int
    bytes: int
    oldest: int
    attempts: int
    full: bool
    settled: int
    disk_bytes: int
    disk_full: bool
    damaged: int


class StoreReport(NamedTuple):
    """Findings of the opening of a store.

    `damage`: why the database was set aside, to `aside`, and made anew of what could be
    read. `returned`: messages that were damaged; the broker delivers its copies again.
    `emptied`: the database was gone.
    """

    id: UUID
    path: str
    created: bool
    damage: str = ""
    aside: str = ""
    returned: tuple[Place, ...] = ()
    emptied: bool = False

    def findings(self) -> list[str]:
        """Return what an operator should know, a line each; empty if all is well."""
        lines = []
        if self.emptied:
            lines.append(
                f"{self.path}: the database is gone, and this store begins empty; what it had is"
                " at the broker: adopt the store that was here, which delivers its copies"
            )
        if self.damage:
            lines.append(
                f"{self.path}: damaged: {self.damage}; the damaged files are in {self.aside}, and"
                " what could be read goes on; messages that nothing names any more are at the"
                " broker: adopt this store, which delivers its copies"
            )
        lines += [
            f"{self.path}: partition {place.partition} offset {place.offset} is given back: it"
            " was damaged, the broker delivers its own copy"
            for place in self.returned
        ]
        return lines


class StoreSummary(NamedTuple):
    """A store below a directory, as it lies on disk.

    `identity` is None where it cannot be read; `problem` says why. `owner_pid` is the
    process that has it open, 0 = none, -1 = one that is not known. `quarantined` counts
    the messages that the broker did not know.
    """

    path: str
    identity: StoreIdentity | None
    problem: str
    owner_pid: int
    disk_bytes: int
    quarantined: int


def entry_json(entry: Entry) -> dict[str, Any]:
    """Return an entry as JSON carries it."""
    failure = entry.failure
    return {
        "partition": entry.place.partition,
        "offset": entry.place.offset,
        "key": entry.key,
        "state": entry.state.name.lower(),
        "attempt": entry.attempt,
        "due": entry.due,
        "first_at": entry.first_at,
        "told": entry.told,
        "generation": entry.generation,
        "epoch": entry.epoch,
        "failure": [failure.type, failure.text, failure.fingerprint, list(failure.bases)],
    }
