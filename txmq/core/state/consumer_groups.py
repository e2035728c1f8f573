"""What the broker knows of consumer groups, as plain objects.

Rules for this module: plain data, look-ups, and how they become table rows. What grows
with the number of failed messages is in tables (`moved`); groups, positions, leases and
fences are here and are written to their tables when they have changed (`save`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.consumers.circuit_breaker import Flood, Watch
from txmq.core.consumers.cloning import Cloning
from txmq.core.state.positions import Position
from txmq.model.retry import RetryPolicy
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

Spot = tuple[int, int]  # topic id, partition
Spotted = tuple[int, int, int]  # topic id, partition, offset: one message

CONCURRENT, ORDERED, BROADCAST = MODES = ("concurrent", "ordered", "broadcast")
PARK, BLOCK, SKIP = POLICIES = ("park", "block", "skip")
FIRST, LAST = "first", "last"
EARLIER: tuple[Any, ...] = (
    (),
    None,
    0,
    (),
    (),
    False,
    0,
    (),
    None,
)  # the last fields of a row, for one without them


class Settings(NamedTuple):
    """What was agreed when the group was made, or set by an operator.

    `retry` is the row of a `RetryPolicy`. `altered` names what an operator has set:
    members that ask for something else are not refused for it, they get what the
    operator said.
    """

    mode: str = CONCURRENT
    on_exhausted: str = PARK
    retry: tuple[Any, ...] = RetryPolicy().row
    lease_us: int = 60_000_000
    session_us: int = 30_000_000
    start: str | int = (
        FIRST  # "first", "last" or a time (µs): where a topic new to the group begins
    )
    strategy: str = ""  # of assignment; "" = the mode's own
    altered: tuple[str, ...] = ()
    max_parked: int = 10_000  # messages behind one key; with more of it the partition stands still
    flood_keys: int = 20  # that fail alike before the group is guarded (`guard`); 0 = it never is
    # messages that deliveries of a partition may be ahead of the first one not done
    # with; 0 = any
    span: int = 0
    consume_timeout_us: int = (
        900_000_000  # that a handler may hold a message for; members see to it
    )

    @property
    def policy(self) -> RetryPolicy:
        """The retry policy as an object."""
        return _policy(self.retry)


@lru_cache(maxsize=256)
def _policy(row: tuple[Any, ...]) -> RetryPolicy:
    # It checks itself when it is made, which is more than a delivery that looks at it
    # costs otherwise.
    return RetryPolicy(*row)


@dataclass(slots=True)
class Member:
    """A member of a group. `since` is the generation in which this instance of it
    joined.

    A `static` one outlives the broker: whoever comes back by its name finds its
    partitions.
    """

    name: str
    instance: str
    topics: tuple[int, ...]
    since: int
    partitions: dict[Spot, None] = field(
        default_factory=dict
    )  # its share, in order; a set that keeps its order
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
    """One fetch of a member: what it took and has not given back. `single`: it is one
    message, which is out alone.
    """

    member: str
    generation: int
    granted_at: int
    deadline: int
    single: bool = False
    left: int = 0  # messages
    spots: set[Spot] = field(default_factory=set, compare=False)  # where its ranges are, or were
    rows: set[Spotted] = field(default_factory=set)  # its rows of table `moved`
    deaths: int = 0  # consumers that were lost with each of its messages before: a lot of suspects

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
    def from_row(cls, row: Any) -> Lease:  # rows are untyped tuples
        """Without its ranges, which positions know."""
        member, generation, granted_at, deadline, single, rows, *deaths = row
        held = {tuple(spotted) for spotted in rows}
        return cls(
            member, generation, granted_at, deadline, single, len(held), set(), held, *deaths
        )


class FenceState(IntEnum):
    """How things stand with a fenced key."""

    RETRYING = 1  # its head waits for its next delivery or has it
    DEAD = 2  # its head is a dead letter
    WAITING = 3  # its head is done with; who is next can be said once older leases are back


@dataclass(slots=True)
class Fence:
    """A key of an ordered group that failed: later messages of the key are parked
    behind its head.
    """

    state: FenceState
    partition: int  # of the head, or of the last one where it is done with
    offset: int
    born: int  # leases below this number may still hold messages of the key
    since: int
    parked: int = 0


@dataclass(slots=True)
class Group:
    """A consumer group. A broadcast group is one group for each member, named
    `group@member`, below their `parent`.
    """

    group_id: int
    name: str
    settings: Settings
    parent: int = 0
    temporary: bool = False  # ends with its member
    paused: bool = False
    epoch: int = 1  # raised when messages are to be processed again: the inbox counts by it
    generation: int = 0
    next_lease: int = 1
    next_letter: int = 1
    letters: int = 0  # open ones
    members: dict[str, Member] = field(default_factory=dict)
    positions: dict[Spot, Position] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)
    held_rows: dict[Spotted, int] = field(
        default_factory=dict
    )  # leased rows of table `moved`: their lease
    retrying: Counter[Spot] = field(default_factory=Counter)  # rows of table `retries`
    fences: dict[int, dict[int, Fence]] = field(default_factory=dict)  # by topic and key hash
    waiting: set[tuple[int, int]] = field(
        default_factory=set
    )  # topic and key hash of fences in that state
    flood: Flood | None = None
    floods: int = 0  # there have been so many
    watch: Watch = field(default_factory=Watch, compare=False)
    stops: dict[Spot, tuple[int, int]] = field(
        default_factory=dict
    )  # where a key's fence was full: offset, key hash
    paused_topics: set[int] = field(default_factory=set)
    resets: dict[Spot, int] = field(
        default_factory=dict
    )  # resets that take a while: where they will go on
    cloning: Cloning | None = None  # while it is being made from another one
    clones: set[int] = field(default_factory=set)  # groups that are being made from this one
    expired: int = 0  # messages whose time to live was over before they were delivered
    doomed: bool = False  # deleted, but for rows of its moved messages
    lots: dict[str, int] = field(default_factory=dict)  # leases of suspects, by member
    suspects: set[Spot] = field(
        default_factory=set, compare=False
    )  # where some may wait that have come back
    loners: dict[Spotted, int] = field(
        default_factory=dict
    )  # waiting rows that go out alone: when they are due

    @property
    def ordered(self) -> bool:
        """One key strictly in order, one member a partition."""
        return self.settings.mode == ORDERED

    def stands(self, spot: Spot) -> bool:
        """Whether nothing of a partition is to be delivered, because of what an
        operator has said.
        """
        return (
            self.paused
            or spot[0] in self.paused_topics
            or spot in self.resets
            or self.cloning is not None
        )

    @property
    def limit(self) -> int | None:
        """Deliveries that count which a message gets at most; None = no end."""
        return None if self.settings.on_exhausted == BLOCK else self.settings.policy.retries + 1

    def fence(self, topic_id: int, key_hash: int | None) -> Fence | None:
        """The fence of a key, if it has one; whatever partition the message is in."""
        return None if key_hash is None else self.fences.get(topic_id, {}).get(key_hash)

    def set_fence(self, topic_id: int, key_hash: int, fence: Fence | None) -> None:
        """Put up a fence, or take it down."""
        fences = self.fences.setdefault(topic_id, {})
        if fence is None:
            fences.pop(key_hash, None)
        else:
            fences[key_hash] = fence
        if fence is not None and fence.state is FenceState.WAITING:
            self.waiting.add((topic_id, key_hash))
        else:
            self.waiting.discard((topic_id, key_hash))
        if not fences:
            del self.fences[topic_id]

    def every_fence(self) -> Iterator[tuple[int, int, Fence]]:
        """Topic id, key hash and fence of each fenced key."""
        for topic_id, fences in self.fences.items():
            for key_hash, fence in fences.items():
                yield topic_id, key_hash, fence

    def oldest_fences(self) -> Iterator[Fence]:
        """Of each topic the fence that was put up first."""
        return (next(iter(fences.values())) for fences in self.fences.values())

    def to_row(self) -> t.Row:
        members = tuple(member.to_row() for member in self.members.values())
        leases = tuple((number, *lease.to_row()) for number, lease in self.leases.items())
        retrying = tuple((*spot, rows) for spot, rows in self.retrying.items())
        return (
            self.name, tuple(self.settings), self.parent, self.temporary, self.paused, self.epoch, self.generation,
            self.next_lease, self.next_letter, self.letters, members, leases, retrying,
            tuple((*spot, *stop) for spot, stop in self.stops.items()), self.flood, self.floods,
            tuple(sorted(self.paused_topics)), tuple((*spot, offset) for spot, offset in self.resets.items()),
            self.doomed, self.expired, tuple((*spotted, due) for spotted, due in self.loners.items()),
            self.cloning,
        )  # fmt: skip

    @classmethod
    def from_row(cls, group_id: int, row: Any) -> Group:  # rows are untyped tuples
        (name, settings, parent, temporary, paused, epoch, generation, next_lease, next_letter, letters,
         members, leases, retrying, *later) = row  # fmt: skip
        stops, flood, floods, paused_topics, resets, doomed, expired, loners, cloning = (
            tuple(later) + EARLIER[len(later) :]
        )
        group = cls(
            group_id, name, Settings(*settings), parent, temporary, paused, epoch, generation
        )
        group.next_lease, group.next_letter, group.letters = next_lease, next_letter, letters
        group.paused_topics, group.doomed, group.expired = set(paused_topics), doomed, expired
        group.resets = {(topic_id, partition): offset for topic_id, partition, offset in resets}
        for member, instance, topics, since, partitions, *static in members:
            share = dict.fromkeys(map(tuple, partitions))
            group.members[member] = Member(member, instance, topics, since, share, *static)
        group.loners = {tuple(spotted): due for *spotted, due in loners}
        for number, *row_of_lease in leases:
            lease = group.leases[number] = Lease.from_row(row_of_lease)
            group.held_rows.update(dict.fromkeys(lease.rows, number))
            if lease.deaths:
                group.lots[lease.member] = number
        for topic_id, partition, count in retrying:
            group.retrying[topic_id, partition] = count
        group.cloning = None if cloning is None else Cloning(cloning[0], tuple(cloning[1]))
        group.flood, group.floods = None if flood is None else Flood(*flood), floods
        for topic_id, partition, offset, key_hash in stops:
            group.stops[topic_id, partition] = (offset, key_hash)
        return group
