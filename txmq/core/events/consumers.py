"""Events of consumers: kinds 64 to 127. Each is the outcome of a decision, and what
must happen together is one event.

Ranges are (topic id, partition, start, end[, attempt]), single messages (topic id,
partition, offset[, …]). `moves` and `fences` are what a message, or a key's fence,
becomes: `apply` needs no rule to record them.
"""

from __future__ import annotations

from typing import NamedTuple

from txmq.core.consumers.failed_messages import Move
from txmq.core.events.base import event
from txmq.core.state.consumer_groups import Settings

Range = tuple[int, int, int, int]
Attempted = tuple[int, int, int, int, int]
Row = tuple[int, int, int]
Due = tuple[int, int, int, int]  # a message and when it is due


class FenceSet(NamedTuple):
    """Part of an event: what becomes of a key's fence. `state` is a `FenceState`, 0 =
    lifted; the head is a message.
    """

    topic_id: int
    key_hash: int
    state: int
    partition: int
    offset: int
    born: int


@event(64)
class GroupCreated(NamedTuple):
    """A consumer group came to be."""

    group_id: int
    name: str
    settings: Settings
    parent: int
    temporary: bool


@event(65)
class GroupChanged(NamedTuple):
    """The group has other settings from now on."""

    group_id: int
    settings: Settings
    by: str = ""


@event(66)
class GroupPaused(NamedTuple):
    """The group delivers nothing, or delivers again; `topic_id` 0 = of all topics."""

    group_id: int
    paused: bool
    by: str
    topic_id: int = 0


@event(67)
class GroupDeleted(NamedTuple):
    """The group is gone, its name free, its id never used again. `most`: rows and
    fences that go now (GroupTidied).
    """

    group_id: int
    by: str
    most: int = 1 << 62


@event(68)
class MemberJoined(NamedTuple):
    """A member came, or wants other topics."""

    group_id: int
    member: str
    instance: str
    topics: tuple[int, ...]
    static: bool = False


@event(69)
class MemberLeft(NamedTuple):
    """A member is gone: what was leased to it is delivered again. `lost`: it may have
    died of that (`suspects`). `rows` are those of table `moved`.
    """

    group_id: int
    member: str
    lost: bool
    rows: tuple[Due, ...]


@event(70)
class Rebalanced(NamedTuple):
    """A new generation: `shares` are each member's partitions, `starts` where those new
    to the group begin.
    """

    group_id: int
    generation: int
    shares: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]
    starts: tuple[tuple[int, int, int], ...]


@event(71)
class PositionReset(NamedTuple):
    """Partitions of a topic go on from other offsets. Whatever had left its place at or
    above them is back in it.
    """

    group_id: int
    topic_id: int
    offsets: tuple[tuple[int, int], ...]
    epoch: int
    by: str


@event(72)
class GroupGuarded(NamedTuple):
    """So many keys failed alike that it is taken for an outage: the group keeps its
    messages, and probes.
    """

    group_id: int
    fingerprint: str
    error_type: str


@event(76)
class ResetBegun(NamedTuple):
    """As PositionReset, but very many messages have left their place: nothing is
    delivered before that one follows.
    """

    group_id: int
    topic_id: int
    offsets: tuple[tuple[int, int], ...]
    epoch: int
    by: str


@event(77)
class BroughtBack(NamedTuple):
    """The first `most` messages of a partition that had left their place at or above
    `offset` will be back in it.
    """

    group_id: int
    topic_id: int
    partition: int
    offset: int
    most: int


@event(78)
class GroupTidied(NamedTuple):
    """At most so many more rows and fences of a deleted group are gone; with the last
    of them, the group.
    """

    group_id: int
    most: int


@event(79)
class GroupCloned(NamedTuple):
    """A group came to be that goes on where another one stands; what that one has not
    acked is delivered here, too.
    """

    group_id: int
    name: str
    source: int
    by: str


@event(101)
class CloneBegun(NamedTuple):
    """As GroupCloned, but very many messages have failed: nothing of the clone is
    delivered before CloneEnded.
    """

    group_id: int
    name: str
    source: int
    by: str


@event(102)
class CloneContinued(NamedTuple):
    """The next `most` messages that have failed in the source of a clone are looked
    through.
    """

    group_id: int
    most: int


@event(103)
class CloneEnded(NamedTuple):
    """There are no more, and the clone goes on by itself."""

    group_id: int


@event(80)
class Delivered(NamedTuple):
    """One fetch. `ranges` and `rows` are leased; what was found fenced or exhausted on
    the way has moved.

    Lease 0 = nothing is leased. `stops`: (topic id, partition, offset, key hash) where
    no more may be parked. The time to live of `expired` and `expired_rows` is over:
    they are done with, and were not delivered, like `unwanted`. `deaths`: so many
    consumers were lost with each message that is leased. `single`: it is one, which
    goes out alone.
    """

    group_id: int
    lease: int
    member: str
    deadline: int
    single: bool
    ranges: tuple[Attempted, ...]
    rows: tuple[Row, ...]
    moves: tuple[Move, ...]
    fences: tuple[FenceSet, ...]
    stops: tuple[Range, ...] = ()
    expired: tuple[Range, ...] = ()
    expired_rows: tuple[Row, ...] = ()
    unwanted: tuple[Range, ...] = ()
    deaths: int = 0


@event(81)
class Acked(NamedTuple):
    """Messages were processed. `moves` and `fences`: what that set free behind a
    fence.
    """

    group_id: int
    ranges: tuple[Range, ...]
    rows: tuple[Row, ...]
    moves: tuple[Move, ...]
    fences: tuple[FenceSet, ...]


@event(82)
class Returned(NamedTuple):
    """Messages were given back un-started: the attempt does not count."""

    group_id: int
    ranges: tuple[Range, ...]
    rows: tuple[Due, ...]


@event(83)
class LeasesExtended(NamedTuple):
    """Leases end later."""

    group_id: int
    leases: tuple[int, ...]
    deadline: int


@event(84)
class LeasesExpired(NamedTuple):
    """Leases ran out: what is left of them is delivered again, and their consumer may
    have died of it (`suspects`).
    """

    group_id: int
    leases: tuple[int, ...]
    rows: tuple[Due, ...]


@event(85)
class Retried(NamedTuple):
    """A consumer failed; the message waits for its next delivery. `failed` False: it
    was only postponed.
    """

    group_id: int
    moves: tuple[Move, ...]
    fences: tuple[FenceSet, ...]
    failed: bool = True


@event(86)
class DeadLettered(NamedTuple):
    """A message failed for good."""

    group_id: int
    moves: tuple[Move, ...]
    fences: tuple[FenceSet, ...]


@event(87)
class Replayed(NamedTuple):
    """Dead letters are delivered again."""

    group_id: int
    moves: tuple[Move, ...]
    fences: tuple[FenceSet, ...]
    by: str


@event(88)
class Abandoned(NamedTuple):
    """Dead letters were closed for ever; the chains behind them go on."""

    group_id: int
    moves: tuple[Move, ...]
    fences: tuple[FenceSet, ...]
    by: str


@event(100)
class LettersExpired(NamedTuple):
    """Dead letters are kept no longer; what waited for them goes on."""

    group_id: int
    rows: tuple[Row, ...]
    moves: tuple[Move, ...]
    fences: tuple[FenceSet, ...]
