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

    from txmq.store.log.decoder import Damage
    from txmq.store.log.recovery import TornTail


class Place(NamedTuple):
    """The place of a message in its topic."""

    topic_id: int
    partition: int
    offset: int


class State(IntEnum):
    """State of a stored message; numbers of the log. All but STORED are final.

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
    """The id of a store, and its owner. `begun`: its log was made."""

    id: UUID
    owner: StoreOwner
    begun: bool = False


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

    `rebuilt`: why the index was made anew, empty if it was not. `torn`: an unfinished
    write that was cut; nothing of it was acknowledged. `damages`: unreadable spans of
    the log, whose bytes are kept beside it. `returned`: messages whose bodies these
    spans had; the broker delivers its copies again. `unnamed`: spans that may have had
    messages which nothing else names; the broker's copies are theirs. `emptied`: the
    log was gone.
    """

    id: UUID
    path: str
    created: bool
    replayed: int = 0
    rebuilt: str = ""
    torn: TornTail | None = None
    damages: tuple[Damage, ...] = ()
    returned: tuple[Place, ...] = ()
    unnamed: tuple[Damage, ...] = ()
    emptied: bool = False

    def findings(self) -> list[str]:
        """Return what an operator should know, a line each; empty if all is well."""
        lines = []
        if self.emptied:
            lines.append(
                f"{self.path}: the log is gone, and this store begins empty; what it had is at"
                " the broker: order txmq recover retry for its messages, or adopt the store"
            )
        if self.rebuilt:
            lines.append(f"{self.path}: the index was made anew from the log: {self.rebuilt}")
        if self.torn:
            lines.append(
                f"{self.path}: an unfinished write of {self.torn.length} bytes was cut; nothing"
                f" of it was acknowledged; its bytes are in {self.torn.copy}"
            )
        lines += [
            f"{damage.path}: unreadable from {damage.position} to {damage.end}: {damage.reason}"
            for damage in self.damages
        ]
        lines += [
            f"{self.path}: partition {place.partition} offset {place.offset} is given back: its"
            " body is damaged, the broker delivers its own copy"
            for place in self.returned
        ]
        lines += [
            f"{damage.path}: messages between {damage.position} and {damage.end} are not known"
            " any more; adopt this store at the broker, which delivers its own copies"
            for damage in self.unnamed
        ]
        return lines


class StoreSummary(NamedTuple):
    """A store below a directory, as it lies on disk.

    `identity` is None where it cannot be read; `problem` says why. `owner_pid` is the
    process that has it open, 0 = none, -1 = one that is not known. `quarantined` counts
    the files of messages that the broker did not know.
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
