"""Commands of consumers: requests of members and operators, and of the engine's timers.

Topics are named. Ranges are (topic, partition, start, end), messages are (topic,
partition, offset). `generation` is the last one that the member received.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from txmq.core.consumers.candidates import Candidate
from txmq.model.retry import FailureReport, RetryPolicy
from txmq.store import tables as t

TopicRange = tuple[str, int, int, int]
TopicOffset = tuple[str, int, int]


class RequestedSettings(NamedTuple):
    """Settings that a member or an operator names; None = unchanged.

    Times are in microseconds.
    """

    on_exhausted: str | None = None
    retry: RetryPolicy | None = None
    lease_us: int | None = None
    session_us: int | None = None
    start: str | int | None = None
    strategy: str | None = None
    max_parked: int | None = None
    flood_keys: int | None = None
    span: int | None = None
    consume_timeout_us: int | None = None
    keep_until_exported: bool | None = None
    messages_per_s: int | None = None
    cold_bytes_per_s: int | None = None
    alarm_severity: str | None = None


class JoinGroup(NamedTuple):
    """Become a member, or change or confirm the topics of a member.

    - `instance` distinguishes two processes with the same member name: the newer wins.
    - `held`: the ranges that the same instance still holds after a lost connection. All
      other messages leased to it are redelivered. None = it holds everything.
    - `named` = False: a broadcast member whose position is not kept.
    - `static`: the member keeps its partitions for as long as its session lasts, even
      if its connection, its process or the broker restarts.
    - `continued`: the member goes on with a join that has begun (`JoinBegun`).
    """

    group: str
    member: str
    instance: str
    mode: str
    topics: tuple[str, ...]
    wanted: RequestedSettings = RequestedSettings()
    held: tuple[TopicRange, ...] | None = None
    named: bool = True
    static: bool = False
    continued: bool = False


class LeaveGroup(NamedTuple):
    """Remove a member from its group.

    `lost`: the engine reports that the session or the connection was lost.
    """

    group: str
    member: str
    instance: str
    lost: bool = False


class Rebalance(NamedTuple):
    """Assign partitions again, because a topic of the group has more of them."""

    group: str


class AlterGroup(NamedTuple):
    """Change settings of a group; the mode cannot change."""

    group: str
    wanted: RequestedSettings
    by: str = ""


class PauseGroup(NamedTuple):
    """Stop or resume deliveries of a group: of one `topic`, or of all.

    Leased messages stay leased.
    """

    group: str
    paused: bool
    by: str = ""
    topic: str = ""


class CloneGroup(NamedTuple):
    """Create a group that continues where this one is.

    Messages that are not acked here are delivered there, except dead letters.
    """

    group: str
    to: str
    by: str = ""


class AdvanceGroupWork(NamedTuple):
    """Do the next step of background work; the reply tells if more is left.

    A timer repeats it for resets, clones and deletions of many failed messages.
    """


class DeleteGroup(NamedTuple):
    """Delete a group with its dead letters. Refused while it has members."""

    group: str
    by: str = ""


class ResetPosition(NamedTuple):
    """Continue from other offsets of a topic.

    `to` is "first" or "last"; otherwise `offsets` has (partition, offset), which the
    engine found for a time. Failed messages at or above the new offset return to their
    places. `reprocess` raises the group's epoch, so that inboxes accept the messages
    again.
    """

    group: str
    topic: str
    to: str = ""
    offsets: tuple[tuple[int, int], ...] = ()
    reprocess: bool = False
    dry_run: bool = False
    by: str = ""


class CandidateRead(NamedTuple):
    """A candidate whose batches were read.

    `keys` are the key hashes of its rows, if it `needs_keys`. `expired` are offsets of
    messages whose time to live is over. An `unwanted` candidate is not read: no row has
    a tag that the member wants.
    """

    candidate: Candidate
    keys: tuple[int | None, ...] | None = None
    expired: frozenset[int] = frozenset()
    unwanted: bool = False


class Deliver(NamedTuple):
    """Lease these candidates to the member.

    Candidates that are no longer deliverable are left out. The log was `durable` up to
    there when they were chosen.
    """

    group: str
    member: str
    generation: int
    reads: tuple[CandidateRead, ...]
    durable: int = 0


class AckMessages(NamedTuple):
    """Report messages as processed. The `filtered` ones are not wanted by the member's
    tags or selector.
    """

    group: str
    member: str
    generation: int
    ranges: tuple[TopicRange, ...]
    filtered: tuple[TopicRange, ...] = ()


class ReturnMessages(NamedTuple):
    """Return messages that were not started; their attempt does not count."""

    group: str
    member: str
    generation: int
    ranges: tuple[TopicRange, ...]


class KeySource(NamedTuple):
    """Location of a message's key: a row of a published batch."""

    entry: t.BatchEntry
    row: int


class NackMessage(NamedTuple):
    """Report a message as failed.

    - `delay` (µs) overrides the delay of the retry policy.
    - `dead` makes it a dead letter at once.
    - `postpone`: it has not failed, but shall be delivered later. The attempt does not
      count.
    - `key_hash` and `source`: the engine reads the key at `failures.key_source`.
    - `chance` (0 to 1) places the jitter.
    """

    group: str
    member: str
    generation: int
    topic: str
    partition: int
    offset: int
    key_hash: int | None = None
    delay: int | None = None
    failure: FailureReport = FailureReport()
    dead: bool = False
    chance: float = 0.5
    postpone: bool = False
    source: KeySource | None = None


class ExtendLeases(NamedTuple):
    """Extend leases to `lease_us` from now: those named, or all of the member."""

    group: str
    member: str
    generation: int
    leases: tuple[int, ...] = ()
    lease_us: int | None = None


class ExpireLeases(NamedTuple):
    """End a bounded number of leases that were overdue at the time `at`; the reply
    tells if there are more.

    A timer repeats it.
    """

    at: int


class ReplayLetters(NamedTuple):
    """Deliver dead letters again, in the order of their keys."""

    group: str
    letters: tuple[TopicOffset, ...]
    by: str = ""


class AbandonLetters(NamedTuple):
    """Close dead letters for ever. The `reason` is stored with them."""

    group: str
    letters: tuple[TopicOffset, ...]
    reason: str
    by: str = ""


class StoredEntry(NamedTuple):
    """State of one message in a consumer's store.

    - `state` is "stored", "acked", "dead" or "returned".
    - `attempt` is the number of failed attempts that count, `due` (µs) when the store
      tries again. `failure` None = as it was.
    - `generation`: the member's when the message was delivered to it; `epoch`: its
      inbox's for the message. 0 = not known.
    - `behind`: the entry before it of the same key that was not acked, in one report.
    - `key_hash` and `source`: the engine reads the key at `store_reports.key_source`.
      `damaged`: it cannot be read.
    """

    topic: str
    topic_id: int
    partition: int
    offset: int
    state: str
    attempt: int = 0
    due: int = 0
    failure: FailureReport | None = None
    generation: int = 0
    epoch: int = 0
    key_hash: int | None = None
    source: KeySource | None = None
    damaged: bool = False
    behind: tuple[int, int, int] | None = None


class ReportStored(NamedTuple):
    """Tell what a consumer's store knows. Without entries, claim the store and ask for
    orders.

    Entries share neither a message nor, in an ordered group, a key: the engine makes
    several commands of a report that has such entries (`store_reports.units`).

    `member` "" = an operator who has a copy of the store; with `force` also of one
    whose owner is a member.
    """

    group: str
    member: str
    generation: int
    store: bytes
    host: str
    entries: tuple[StoredEntry, ...] = ()
    force: bool = False


class RetryChange(IntEnum):
    """Actions of an operator on a message that is retried."""

    NOW = 1  # it does not wait for its next attempt
    BURY = 2  # it has no further attempt, and is a dead letter
    SKIP = 3  # likewise, and closed: its key goes on


class ChangeRetries(NamedTuple):
    """Change messages that are retried, wherever they wait: at the broker, or in a
    consumer's store. The `reason` is stored with those that have no further attempt.
    """

    group: str
    change: RetryChange
    messages: tuple[TopicOffset, ...]
    reason: str = ""
    by: str = ""


class AdoptStore(NamedTuple):
    """Deliver all messages of a consumer's store to the members, and fence the store.

    Refused while its owner is a member, but for `force`.
    """

    group: str
    store: bytes
    force: bool = False
    by: str = ""
