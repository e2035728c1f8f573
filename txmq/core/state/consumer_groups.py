"""Consumer groups as plain objects: members, leases, key fences, settings.

This module holds data, look-ups and conversion to table rows. What grows with the
number of failed messages is in tables (`failed_messages`). Groups, positions, leases
and fences are objects; `GroupRegistry.save` writes those that have changed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.state.positions import GroupPosition
from txmq.core.state.put_back import PlainLetter, PutBackQueue
from txmq.core.state.waiting_fences import WaitingFences
from txmq.model.retry import RetryPolicy
from txmq.model.topic_partition import FIRST_EPOCH, TopicPartition
from txmq.model.units import MINUTE, SECOND
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator


# topic id, partition, offset: one message. A plain tuple: hot paths make many of them.
MessageRef = tuple[int, int, int]

# A group's epoch, and (topic id, partition, offset, epoch from there on) of partitions
# that have others than the first one; () = all 1.
Epochs = tuple[int, tuple[tuple[int, int, int, int], ...]] | tuple[()]
EpochSteps = tuple[tuple[int, int], ...]  # offset, epoch from there on; both rise

CONCURRENT, ORDERED, BROADCAST = MODES = ("concurrent", "ordered", "broadcast")
PARK, BLOCK, SKIP = ON_EXHAUSTED = ("park", "block", "skip")
FIRST, LAST = "first", "last"
DEFAULT, CRITICAL, WARNING, OFF = SEVERITIES = ("default", "critical", "warning", "off")


class GroupSettings(NamedTuple):
    """Settings of a group, agreed when it was created or set by an operator.

    `retry` is the row of a `RetryPolicy`. `altered` names the settings that an operator
    has set: members that ask for other values are not refused, they get the operator's.
    """

    mode: str = CONCURRENT
    on_exhausted: str = PARK
    retry: tuple[Any, ...] = RetryPolicy().row
    lease_us: int = MINUTE
    session_us: int = 30 * SECOND
    # where a topic that is new to the group begins: "first", "last" or a time (µs)
    start: str | int = FIRST
    strategy: str = ""  # of assignment; "" = the mode's own
    altered: tuple[str, ...] = ()
    max_parked: int = 10_000  # messages behind one key; beyond, the partition stalls
    flood_keys: int = 20  # that fail alike before the circuit breaker opens; 0 = never
    # messages by which deliveries of a partition may be ahead of the first unsettled
    # one; 0 = no limit
    span: int = 0
    consume_timeout_us: int = 15 * MINUTE  # for a handler; enforced by the members
    keep_until_exported: bool = False  # dead letters, whatever their retention
    messages_per_s: int = 0  # to all members together; 0 = no limit
    cold_bytes_per_s: int = 0  # of messages far behind the end of the log; 0 = no limit
    alarm_severity: str = DEFAULT  # of alarms about its letters, keys and stores

    @property
    def policy(self) -> RetryPolicy:
        """The retry policy of the group."""
        return _policy(self.retry)

    def redelivery_delay(self, attempt: int, chance: float = 0.5) -> int | None:
        """Return the delay after the failure of delivery number `attempt`.

        None if that was the last one. `chance` (0 to 1) places the jitter.
        """
        policy = self.policy
        if self.on_exhausted == BLOCK:
            attempt = min(attempt, policy.retries)
        return policy.delay(attempt, chance)


@lru_cache(maxsize=256)
def _policy(row: tuple[Any, ...]) -> RetryPolicy:
    # A policy validates itself when it is created, which costs more than the rest of a
    # delivery that reads it.
    return RetryPolicy.of_row(*row)


@dataclass(slots=True)
class GroupMember:
    """A member of a group. `since` is the generation in which this instance joined.

    A `static` member outlives the broker: a consumer that joins by its name again gets
    its partitions.
    """

    name: str
    instance: str
    topics: tuple[int, ...]
    since: int
    # assigned partitions: an ordered set
    partitions: dict[TopicPartition, None] = field(default_factory=dict)
    static: bool = False

    def to_row(self) -> t.Row:
        return (
            self.name,
            self.instance,
            self.topics,
            self.since,
            tuple(self.partitions),
            self.static,
        )


@dataclass(slots=True)
class Lease:
    """The messages of one fetch that their member has neither settled nor returned.

    `single`: the lease is of one message in poison isolation. `deaths` counts the
    consumers that were lost with each of its messages before.
    """

    member: str
    generation: int
    granted_at: int
    deadline: int
    single: bool = False
    remaining: int = 0  # messages
    # partitions that have, or had, ranges of the lease
    partitions: set[TopicPartition] = field(default_factory=set, compare=False)
    rows: set[MessageRef] = field(default_factory=set)  # leased failed messages
    deaths: int = 0

    def to_row(self) -> t.Row:
        rows = tuple(sorted(self.rows))
        return (
            self.member,
            self.generation,
            self.granted_at,
            self.deadline,
            self.single,
            rows,
            self.deaths,
        )

    @classmethod
    def from_row(cls, row: Any) -> Lease:  # noqa: ANN401  # rows are untyped
        """Return a lease without its ranges: those stand in the positions."""
        member, generation, granted_at, deadline, single, rows, deaths = row
        held = {tuple(ref) for ref in rows}
        return cls(member, generation, granted_at, deadline, single, len(held), set(), held, deaths)


class FenceState(IntEnum):
    """State of a fenced key, by its head: the message that the others wait for."""

    RETRYING = 1  # the head waits for its next delivery, is leased, or at a consumer
    DEAD = 2  # the head is a dead letter
    WAITING = 3  # the head is settled; older leases decide which message is next


@dataclass(slots=True)
class ConsumerStore:
    """The local store of a consumer, as the broker knows it from its reports.

    Its owner is the `member` that last reported it, in this process (`instance`).
    `seen_at` is the last report that changed anything, `lost_at` the time at which the
    owner left (0 = it has not). `attempts` is the sum of those of its `messages`. An
    adopted store is fenced: it may only keep messages that were leased under `fence` or
    later numbers (0 = no fence). While it is being `adopted`, its messages wait to
    become retries. `begin` (first failure and place) is not after any of its messages
    by age; it is on no disk.
    """

    member: str
    instance: str
    host: str
    seen_at: int
    lost_at: int = 0
    fence: int = 0
    adopted: bool = False
    messages: int = 0
    attempts: int = 0
    orders: int = 0
    begin: tuple[int, int, int, int] = field(default=(0, 0, 0, 0), compare=False)

    def to_row(self) -> t.Row:
        return (
            self.member,
            self.instance,
            self.host,
            self.seen_at,
            self.lost_at,
            self.fence,
            self.adopted,
            self.messages,
            self.attempts,
            self.orders,
        )


@dataclass(slots=True)
class KeyFence:
    """The fence of a failed key of an ordered group: later messages of the key are
    parked behind its head.
    """

    state: FenceState
    partition: int  # of the head, or of the last head where that is settled
    offset: int
    first_lease: int  # leases with lower numbers may still hold messages of the key
    since: int
    parked: int = 0


# topic id and key hash, or a message without a key
FailingUnit = tuple[int, int] | MessageRef


class OpenBreaker(NamedTuple):
    """The failure that opened a group's circuit breaker, and its probes. `lease` is the
    probe's; 0 = there was none.
    """

    fingerprint: str
    error_type: str
    since: int
    probe_at: int
    probes: int = 0  # failed ones
    lease: int = 0


@dataclass(slots=True)
class FailureWindow:
    """Failures since `since`, by fingerprint. They are cleared once as many messages
    were acked.
    """

    since: int = 0
    acked: int = 0
    failed: int = 0
    keys: dict[str, set[FailingUnit]] = field(default_factory=dict)

    def clear(self) -> None:
        self.acked = self.failed = 0
        self.keys.clear()


class CloneProgress(NamedTuple):
    """The state of a clone in the making: the id of its source group, and the first of
    the source's failed messages that is not copied yet.
    """

    source: int
    start: MessageRef = (0, 0, 0)


@dataclass(slots=True)
class ConsumerGroup:
    """A consumer group. A broadcast group has a group of its own for each member, named
    `group@member`, with the broadcast group as `parent`.
    """

    group_id: int
    name: str
    settings: GroupSettings
    parent: int = 0
    temporary: bool = False  # deleted with its member
    paused: bool = False
    epoch: int = FIRST_EPOCH  # raised when messages shall be processed again
    generation: int = 0
    # the group's epoch when a part of a partition was last processed again; without an
    # entry it is FIRST_EPOCH
    epochs: dict[TopicPartition, EpochSteps] = field(default_factory=dict)
    # the generation that the last reset of a partition began; older leases are over
    resets: dict[TopicPartition, int] = field(default_factory=dict)
    next_lease: int = 1
    next_letter: int = 1
    letters: int = 0  # open dead letters
    exported_letters: int = 0  # those of them that an export has
    members: dict[str, GroupMember] = field(default_factory=dict)
    positions: dict[TopicPartition, GroupPosition] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)
    leased_rows: dict[MessageRef, int] = field(default_factory=dict)  # failed message: lease
    # of letters among them that plans have put back, what their acks have to know; of
    # those that are not here, the rows say it
    leased_letters: dict[MessageRef, PlainLetter] = field(default_factory=dict, compare=False)
    # rows of table `retries`, and offsets of `put_back`
    retrying: Counter[TopicPartition] = field(default_factory=Counter)
    # failed messages that are not processed: all but the abandoned ones
    failed: Counter[TopicPartition] = field(default_factory=Counter)
    # letters that plans have put back, and that wait; follows from the tables
    put_back: dict[TopicPartition, PutBackQueue] = field(default_factory=dict, compare=False)
    # topic id: key hash: fence
    fences: dict[int, dict[int, KeyFence]] = field(default_factory=dict)
    waiting_fences: WaitingFences = field(default_factory=WaitingFences)
    breaker: OpenBreaker | None = None  # None = closed
    breaker_openings: int = 0
    failure_window: FailureWindow = field(default_factory=FailureWindow, compare=False)
    # stalled partitions, because a key's fence is full: offset, key hash
    stops: dict[TopicPartition, tuple[int, int]] = field(default_factory=dict)
    paused_topics: set[int] = field(default_factory=set)
    # resets that take several steps: the offset at which the partition will go on
    pending_resets: dict[TopicPartition, int] = field(default_factory=dict)
    clone_progress: CloneProgress | None = None  # while this group is a clone in the making
    unfinished_clones: set[int] = field(default_factory=set)  # clones of this group in the making
    expired: int = 0  # messages whose time to live ended before their delivery
    filtered: int = 0  # messages that filters of members (tags, selectors) passed over
    # topic id: messages that had their effect, since the start of the broker
    processed: Counter[int] = field(default_factory=Counter, compare=False)
    deleted: bool = False  # rows of its failed messages are still to be removed
    suspect_leases: dict[str, int] = field(default_factory=dict)  # member: lease of suspects
    # partitions that may have suspects to redeliver (`core/consumers/poison.py`)
    suspect_partitions: set[TopicPartition] = field(default_factory=set, compare=False)
    # failed messages that wait to go out alone: when they are due
    isolated_rows: dict[MessageRef, int] = field(default_factory=dict)
    # local stores of its consumers, by id: those with messages, orders or a fence
    stores: dict[bytes, ConsumerStore] = field(default_factory=dict)

    @property
    def ordered(self) -> bool:
        """True if messages of a key are processed strictly in order."""
        return self.settings.mode == ORDERED

    def begin_epoch(self, tp: TopicPartition, offset: int) -> None:
        """Apply: a partition is processed again from `offset` on. Messages below keep
        their epoch: a later reset may deliver them again.
        """
        steps = self.epochs.get(tp, ())
        self.epochs[tp] = (*(step for step in steps if step[0] < offset), (offset, self.epoch))

    @property
    def epochs_row(self) -> Epochs:
        """The epochs of all partitions, for the next group of this name."""
        own = tuple((*tp, *step) for tp, steps in sorted(self.epochs.items()) for step in steps)
        return (self.epoch, own) if self.epoch > FIRST_EPOCH else ()

    def set_epochs(self, row: Epochs) -> None:
        """Apply: take over the epochs of a row, if it has any."""
        if row:
            self.epoch, own = row
            for topic_id, partition, *step in own:
                tp = TopicPartition(topic_id, partition)
                self.epochs[tp] = (*self.epochs.get(tp, ()), (step[0], step[1]))

    def is_stopped(self, tp: TopicPartition) -> bool:
        """Return whether an operator's command stops all deliveries of a partition."""
        return (
            self.paused
            or tp[0] in self.paused_topics
            or tp in self.pending_resets
            or self.clone_progress is not None
        )

    def update_suspects(self, tp: TopicPartition) -> None:
        """Apply: note whether a partition has suspects to redeliver."""
        if any(redelivery.deaths for _, _, redelivery in self.positions[tp].redeliver):
            self.suspect_partitions.add(tp)
        else:
            self.suspect_partitions.discard(tp)

    def has_owner(self, store: ConsumerStore) -> bool:
        """Return True if the process that last reported a store is a member."""
        member = self.members.get(store.member)
        return member is not None and member.instance == store.instance

    @property
    def unreachable(self) -> int:
        """The number of messages in local stores that have no owner: no member can be
        given one, until the stores are adopted.
        """
        stores = self.stores.values()
        return sum(s.messages for s in stores if not (s.adopted or self.has_owner(s)))

    @property
    def max_attempts(self) -> int | None:
        """The most deliveries of a message that count as attempts; None = no limit."""
        return None if self.settings.on_exhausted == BLOCK else self.settings.policy.retries + 1

    def fence(self, topic_id: int, key_hash: int | None) -> KeyFence | None:
        """Return the fence of a key, if it has one. It holds in all partitions."""
        return None if key_hash is None else self.fences.get(topic_id, {}).get(key_hash)

    def count_failed(self, topic_id: int, partition: int, change: int) -> None:
        """Apply: a partition has more failed messages, or fewer."""
        tp = TopicPartition(topic_id, partition)
        self.failed[tp] += change
        if not self.failed[tp]:
            del self.failed[tp]

    def set_fence(self, topic_id: int, key_hash: int, fence: KeyFence | None) -> None:
        """Set the fence of a key, or remove it."""
        fences = self.fences.setdefault(topic_id, {})
        if fence is None:
            fences.pop(key_hash, None)
        else:
            fences[key_hash] = fence
        self.waiting_fences.discard((topic_id, key_hash))
        if fence is not None and fence.state is FenceState.WAITING:
            self.waiting_fences.add((topic_id, key_hash), fence.partition, fence.first_lease)
        if not fences:
            del self.fences[topic_id]

    def all_fences(self) -> Iterator[tuple[int, int, KeyFence]]:
        """Yield topic id, key hash and fence of each fenced key."""
        for topic_id, fences in self.fences.items():
            for key_hash, fence in fences.items():
                yield topic_id, key_hash, fence

    def oldest_fences(self) -> Iterator[KeyFence]:
        """Yield the oldest fence of each topic."""
        return (next(iter(fences.values())) for fences in self.fences.values())

    def to_row(self) -> t.Row:
        return (
            self.name,
            tuple(self.settings),
            self.parent,
            self.temporary,
            self.paused,
            self.epoch,
            self.generation,
            self.next_lease,
            self.next_letter,
            self.letters,
            tuple(member.to_row() for member in self.members.values()),
            tuple((number, *lease.to_row()) for number, lease in self.leases.items()),
            tuple((*tp, rows) for tp, rows in self.retrying.items()),
            tuple((*tp, *stop) for tp, stop in self.stops.items()),
            self.breaker,
            self.breaker_openings,
            tuple(sorted(self.paused_topics)),
            tuple((*tp, offset) for tp, offset in self.pending_resets.items()),
            self.deleted,
            self.expired,
            tuple((*ref, due) for ref, due in self.isolated_rows.items()),
            self.clone_progress,
            self.epochs_row,
            tuple((*tp, generation) for tp, generation in self.resets.items()),
            tuple((store_id, *store.to_row()) for store_id, store in self.stores.items()),
            self.exported_letters,
            self.filtered,
            tuple((*tp, rows) for tp, rows in self.failed.items()),
        )

    @classmethod
    def from_row(cls, group_id: int, row: Any) -> ConsumerGroup:  # noqa: ANN401  # rows are untyped
        name, settings, parent, temporary, paused, epoch, generation, *rest = row
        group = cls(
            group_id, name, GroupSettings(*settings), parent, temporary, paused, epoch, generation
        )
        group.next_lease, group.next_letter, group.letters, members, leases, retrying, *rest = rest
        stops, breaker, group.breaker_openings, paused_topics, resets, *rest = rest
        group.deleted, group.expired, isolated, clone, epochs, *rest = rest
        last_resets, stores, group.exported_letters, group.filtered, failed = rest
        group.set_epochs(epochs)
        group.paused_topics = set(paused_topics)
        for member, instance, topics, since, partitions, static in members:
            assigned = dict.fromkeys(map(TopicPartition._make, partitions))
            group.members[member] = GroupMember(member, instance, topics, since, assigned, static)
        for number, *row_of_lease in leases:
            lease = group.leases[number] = Lease.from_row(row_of_lease)
            group.leased_rows.update(dict.fromkeys(lease.rows, number))
            if lease.deaths:
                group.suspect_leases[lease.member] = number
        group.retrying, group.failed = _counts(retrying), _counts(failed)
        for topic_id, partition, offset, key_hash in stops:
            group.stops[TopicPartition(topic_id, partition)] = (offset, key_hash)
        for topic_id, partition, offset in resets:
            group.pending_resets[TopicPartition(topic_id, partition)] = offset
        group.resets = {TopicPartition(*tp): generation for *tp, generation in last_resets}
        for *ref, due in isolated:
            group.isolated_rows[tuple(ref)] = due
        group.stores = {store_id: ConsumerStore(*fields) for store_id, *fields in stores}
        if breaker is not None:
            group.breaker = OpenBreaker(*breaker)
        if clone is not None:
            group.clone_progress = CloneProgress(clone[0], tuple(clone[1]))
        return group


def _counts(rows: Any) -> Counter[TopicPartition]:  # noqa: ANN401  # rows are untyped
    return Counter({TopicPartition(*tp): count for *tp, count in rows})
