"""Events of consumers: kinds 64 to 127.

Each event is the outcome of a decision; changes that belong together are one event.
Ranges are (topic id, partition, start, end[, attempt]), messages (topic id, partition,
offset[, ...]). `moves` are new rows of failed messages, `fences` new states of key
fences: `apply` needs no rule to record them.
"""

from __future__ import annotations

from typing import NamedTuple

from txmq.core.events.base import event
from txmq.core.state.consumer_groups import Epochs, GroupSettings, MessageRef
from txmq.core.state.failed_rows import Move

Range = tuple[int, int, int, int]
AttemptRange = tuple[int, int, int, int, int]
DueRow = tuple[int, int, int, int]  # message, due at


class FenceChange(NamedTuple):
    """New state of a key fence, as part of an event.

    `state` is a `FenceState`, 0 = lifted. `partition` and `offset` are those of the
    head.
    """

    topic_id: int
    key_hash: int
    state: int
    partition: int
    offset: int
    first_lease: int


@event(64)
class GroupCreated(NamedTuple):
    """A consumer group was created. `epochs` are those that the last group of its name
    has left.
    """

    group_id: int
    name: str
    settings: GroupSettings
    parent: int
    temporary: bool
    epochs: Epochs


@event(65)
class GroupChanged(NamedTuple):
    """The settings of a group changed."""

    group_id: int
    settings: GroupSettings
    by: str


@event(66)
class GroupPaused(NamedTuple):
    """Deliveries of a group were stopped or resumed; `topic_id` 0 = of all topics."""

    group_id: int
    paused: bool
    by: str
    topic_id: int


@event(67)
class GroupDeleted(NamedTuple):
    """A group was deleted. Its name is free, its id is never used again.

    At most `most` of its rows and fences are removed with it (see GroupTidied).
    """

    group_id: int
    by: str
    most: int = 1 << 62


@event(68)
class MemberJoined(NamedTuple):
    """A member joined, or changed its topics."""

    group_id: int
    member: str
    instance: str
    topics: tuple[int, ...]
    static: bool


@event(69)
class MemberLeft(NamedTuple):
    """A member is gone, and messages leased to it are redelivered.

    `lost`: one of them may have killed it (`poison`). `rows` are its failed messages.
    """

    group_id: int
    member: str
    lost: bool
    rows: tuple[DueRow, ...]


@event(70)
class Rebalanced(NamedTuple):
    """A new generation began.

    `shares` are each member's partitions. `starts` are the first offsets of partitions
    that are new to the group.
    """

    group_id: int
    generation: int
    shares: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]
    starts: tuple[tuple[int, int, int], ...]


@event(89)
class PositionsBegun(NamedTuple):
    """Partitions that are new to a group got their first offsets, before the Rebalanced
    of a join that has too many of them for one turn.
    """

    group_id: int
    starts: tuple[tuple[int, int, int], ...]


@event(71)
class PositionReset(NamedTuple):
    """Partitions of a topic continue from other offsets.

    Failed messages at or above them are back in their places. A higher `epoch` is that
    of these partitions from now on. `generation` begins, so that members that do not
    know of the reset get nothing; 0 = a ResetBegun before has begun it.
    """

    group_id: int
    topic_id: int
    offsets: tuple[tuple[int, int], ...]
    epoch: int
    by: str
    generation: int


@event(72)
class GroupGuarded(NamedTuple):
    """The circuit breaker opened: many keys failed with the same error."""

    group_id: int
    fingerprint: str
    error_type: str


@event(76)
class ResetBegun(NamedTuple):
    """A reset began that has to restore many failed messages.

    The group delivers nothing until PositionReset follows. `epoch` and `generation` are
    as there.
    """

    group_id: int
    topic_id: int
    offsets: tuple[tuple[int, int], ...]
    epoch: int
    by: str
    generation: int


@event(77)
class BroughtBack(NamedTuple):
    """The first `most` failed messages at or above `offset` returned to their
    places.
    """

    group_id: int
    topic_id: int
    partition: int
    offset: int
    most: int


@event(78)
class GroupTidied(NamedTuple):
    """At most `most` more rows and fences of a deleted group were removed.

    The group is removed with the last of them.
    """

    group_id: int
    most: int


@event(113)
class TopicTidied(NamedTuple):
    """At most `most` key fences and failed messages of a deleted topic ended in a
    group, letters among them.

    With the last of them the group has nothing left to do in the topic.
    """

    group_id: int
    topic_id: int
    most: int


@event(79)
class GroupCloned(NamedTuple):
    """A group was created that continues where its source is.

    Messages that the source has not acked are delivered by both.
    """

    group_id: int
    name: str
    source: int
    by: str
    epochs: Epochs


@event(101)
class CloneBegun(NamedTuple):
    """A clone began whose source has many failed messages.

    The clone delivers nothing until CloneEnded follows.
    """

    group_id: int
    name: str
    source: int
    by: str
    epochs: Epochs


@event(102)
class CloneContinued(NamedTuple):
    """The next `most` failed messages of the source were added to the clone."""

    group_id: int
    most: int


@event(103)
class CloneEnded(NamedTuple):
    """The clone is complete and independent of its source."""

    group_id: int


@event(104)
class InboxOpened(NamedTuple):
    """A member has an inbox with the effects of what is settled from `base` on, but for
    the ranges `passed`.
    """

    group_id: int
    topic_id: int
    partition: int
    base: int
    passed: tuple[tuple[int, int], ...]


@event(105)
class EffectsPassed(NamedTuple):
    """Effects of these ranges are lost: an inbox lacks them, and the messages are not
    retained.
    """

    group_id: int
    topic_id: int
    partition: int
    ranges: tuple[tuple[int, int], ...]


@event(106)
class EffectsRestored(NamedTuple):
    """Settled messages are delivered again, because an inbox lacks their effects.

    In an ordered group the partition's leases end with the generation before.
    """

    group_id: int
    topic_id: int
    partition: int
    ranges: tuple[tuple[int, int], ...]
    generation: int


@event(80)
class Delivered(NamedTuple):
    """A fetch delivered messages to a member.

    `ranges` and `rows` are leased; lease 0 = nothing. `moves` are messages that were
    found fenced or exhausted. `stops` are (topic id, partition, offset, key hash) of
    keys whose chain is full. `expired`, `expired_rows` and `unwanted` are settled
    without delivery: their time to live is over, or no row has a wanted tag. `deaths`:
    consumers lost with each leased message. `single`: one isolated message is leased.
    """

    group_id: int
    lease: int
    member: str
    deadline: int
    single: bool
    ranges: tuple[AttemptRange, ...]
    rows: tuple[MessageRef, ...]
    moves: tuple[Move, ...]
    fences: tuple[FenceChange, ...]
    stops: tuple[Range, ...]
    expired: tuple[Range, ...]
    expired_rows: tuple[MessageRef, ...]
    unwanted: tuple[Range, ...]
    deaths: int


@event(81)
class Acked(NamedTuple):
    """Messages were processed. `filtered` and `filtered_rows` were passed over: the
    member's tags or selector do not want them. `moves` and `fences` are the steps of
    key fences this allows.
    """

    group_id: int
    ranges: tuple[Range, ...]
    rows: tuple[MessageRef, ...]
    moves: tuple[Move, ...]
    fences: tuple[FenceChange, ...]
    filtered: tuple[Range, ...] = ()
    filtered_rows: tuple[MessageRef, ...] = ()


@event(82)
class Returned(NamedTuple):
    """Messages were returned before they were started; the attempt does not count."""

    group_id: int
    ranges: tuple[Range, ...]
    rows: tuple[DueRow, ...]


@event(83)
class LeasesExtended(NamedTuple):
    """The deadline of leases was moved."""

    group_id: int
    leases: tuple[int, ...]
    deadline: int


@event(84)
class LeasesExpired(NamedTuple):
    """Leases expired, and their remaining messages are redelivered.

    One of them may have killed the consumer (`poison`).
    """

    group_id: int
    leases: tuple[int, ...]
    rows: tuple[DueRow, ...]


@event(85)
class Retried(NamedTuple):
    """A message failed and waits for its next delivery.

    `failed` is False if it was only postponed.
    """

    group_id: int
    moves: tuple[Move, ...]
    fences: tuple[FenceChange, ...]
    failed: bool


@event(86)
class DeadLettered(NamedTuple):
    """A message failed for the last time."""

    group_id: int
    moves: tuple[Move, ...]
    fences: tuple[FenceChange, ...]


@event(87)
class Replayed(NamedTuple):
    """Dead letters are delivered again."""

    group_id: int
    moves: tuple[Move, ...]
    fences: tuple[FenceChange, ...]
    by: str


@event(88)
class Abandoned(NamedTuple):
    """Dead letters were closed for ever, and their keys go on."""

    group_id: int
    moves: tuple[Move, ...]
    fences: tuple[FenceChange, ...]
    by: str


@event(100)
class LettersExpired(NamedTuple):
    """Dead letters were deleted after their retention time, and their keys go on."""

    group_id: int
    rows: tuple[MessageRef, ...]
    moves: tuple[Move, ...]
    fences: tuple[FenceChange, ...]


@event(107)
class StoreReported(NamedTuple):
    """A consumer, or an operator who has a copy, told what its local store knows.

    `member`, `instance` and `host` own the store from now on; all "" = unchanged.
    `settled` were processed there. `moves` and `fences` are as in Retried. `failed` are
    those of the moves that count as failures, `answered` messages without further
    orders to the store. `returned` were leased to the member, and are redelivered.
    """

    group_id: int
    store: bytes
    member: str
    instance: str
    host: str
    settled: tuple[MessageRef, ...]
    moves: tuple[Move, ...]
    fences: tuple[FenceChange, ...]
    failed: tuple[MessageRef, ...]
    answered: tuple[MessageRef, ...]
    returned: tuple[MessageRef, ...]


@event(114)
class RetriesChanged(NamedTuple):
    """An operator changed messages that are retried.

    `moves` and `fences` are as in Retried: messages that are due, dead or abandoned
    now. Those that a consumer's store has leave it but for `ordered`, which the store
    shall retry at once.
    """

    group_id: int
    moves: tuple[Move, ...]
    fences: tuple[FenceChange, ...]
    ordered: tuple[MessageRef, ...]
    by: str


@event(111)
class StoreAdopted(NamedTuple):
    """An operator took a consumer's store over. It may only keep messages of leases
    from `first_lease` on; all others become retries (StoreMessagesAdopted).
    """

    group_id: int
    store: bytes
    first_lease: int
    by: str


@event(112)
class StoreMessagesAdopted(NamedTuple):
    """At most `most` more messages of an adopted store are retries that are due."""

    group_id: int
    store: bytes
    most: int


@event(120)
class FingerprintNoted(NamedTuple):
    """An operator noted something on a fingerprint of a group's dead letters; "" = the
    note was removed.
    """

    group_id: int
    fingerprint: str
    text: str
    by: str


@event(121)
class SelectionSaved(NamedTuple):
    """A selection of dead letters, as JSON, was saved under a name; "" = it was
    removed.
    """

    name: str
    text: str
    by: str
