"""Membership: members join and leave; each change is a new generation and
assignment.
"""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from txmq.core.consumers import leases
from txmq.core.consumers.assignment import Subscriber, assign
from txmq.core.consumers.authorization import LeaseClaim, find_group, find_instance
from txmq.core.consumers.commands import JoinGroup, LeaveGroup, Rebalance
from txmq.core.consumers.group_settings import are_compatible, settings_for_join
from txmq.core.events.consumers import (
    DueRow,
    GroupCreated,
    GroupDeleted,
    MemberJoined,
    MemberLeft,
    PositionsBegun,
    Rebalanced,
    Returned,
)
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.state import local_stores, visibility
from txmq.core.state.consumer_groups import (
    BROADCAST,
    LAST,
    ORDERED,
    ConsumerGroup,
    EpochSteps,
    GroupMember,
    GroupSettings,
)
from txmq.core.state.positions import GroupPosition
from txmq.core.state.ranges import RangeMap, gaps
from txmq.core.state.restores import epoch_steps
from txmq.core.state.state import State
from txmq.errors import BadRequest, GroupMismatch, Throttled, UnknownTopic
from txmq.model.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from txmq.core.events.base import Event, RecordContext
    from txmq.core.state.state import Topic

MAX_MEMBERS = 1_000  # of one group; each join computes the assignment of all
MAX_TOPICS = 1_000  # of one member
MAX_GROUPS = 100_000  # each is an object in memory
STEP_POSITIONS = 500  # begun in one turn, and the others of the last topic
# of the topics of one member: each is a position in memory, and is named in the reply
MAX_JOIN_PARTITIONS = 8_192
MAX_POSITIONS = 524_288  # of all groups, each of about 0.7 KB


class JoinReply(NamedTuple):
    """The member's place in the group.

    `group` is the name to use from now on: a broadcast member has a group of its own.
    """

    group: str
    group_id: int
    generation: int
    epoch: int
    assignment: tuple[tuple[str, int], ...]
    settings: GroupSettings
    identities: Identities


class JoinBegun(NamedTuple):
    """The member is in the group, and some of the partitions that are new to it have
    begun. The same command goes on, `continued`.
    """

    group: str
    session_us: int


class Identities(NamedTuple):
    """The ids of topics and the epochs of partitions, by which an inbox knows messages.

    `topics`: the ids of the member's topics, by name. `resets`: topic, partition, the
    generation that its last reset began, and (offset, epoch from there on) where it is
    not FIRST_EPOCH; of partitions that were reset.
    """

    topics: dict[str, int]
    resets: tuple[tuple[str, int, int, EpochSteps], ...]


def decide_join(state: State, command: JoinGroup, now: int) -> Outcome:
    """Decide a join, or the first of its steps where very many partitions are new to
    the group: the reply is JoinBegun then.
    """
    topics = _topics(state, command)
    group, events = _group_to_join(state, command)
    _refuse_member(state, group, topics, command)
    member = group.members.get(command.member)
    if member is not None and member.instance != command.instance:
        rows = _rows_of_member(state, group, member.name, now, lost=True)
        events.append(MemberLeft(group.group_id, member.name, True, rows))
    elif member is not None and command.held is not None:
        events += _return_unheld(state, group, member, command, now)
    wanted = tuple(topic.topic_id for topic in topics)
    begun = _first_positions(state, group, topics, command)
    read = wanted if begun is None else _topics_read(member, command.instance)
    joined = MemberJoined(group.group_id, command.member, command.instance, read, command.static)
    if member is None or joined[2:] != (member.instance, member.topics, member.static):
        events.append(joined)
    if begun is not None:
        return Outcome((*events, begun), JoinBegun(group.name, group.settings.session_us))
    subscribers = [
        *_subscribers(group, but=command.member),
        _subscriber(member, command.member, wanted),
    ]
    fresh = bool(events) and isinstance(events[-1], MemberJoined)
    events += _rebalance(state, group, subscribers, command, always=fresh)
    return Outcome(tuple(events), _join_reply(state, group, command.member, wanted, events))


def _topics_read(member: GroupMember | None, instance: str) -> tuple[int, ...]:
    """Return what a member reads while its join is made in steps: as before, which is
    nothing for a new one.
    """
    return () if member is None or member.instance != instance else member.topics


def _topics(state: State, command: JoinGroup) -> tuple[Topic, ...]:
    if not command.topics or len(command.topics) > MAX_TOPICS:
        raise BadRequest(
            f"a member cannot read {len(command.topics)} topics",
            hint=f"name 1 to {MAX_TOPICS} topics",
        )
    missing = next((name for name in command.topics if name not in state.topics), None)
    if missing is not None:
        raise UnknownTopic(
            f"there is no topic {missing!r}",
            hint="create it: txmq topic create",
            detail={"topic": missing},
        )
    topics = [state.topics[name] for name in set(command.topics)]
    partitions = sum(len(topic.end_offsets) for topic in topics)
    if partitions > MAX_JOIN_PARTITIONS:
        raise BadRequest(
            f"the {len(topics)} topics have {partitions} partitions: "
            f"a member reads at most {MAX_JOIN_PARTITIONS}",
            hint="read them with several consumer groups",
        )
    return tuple(sorted(topics, key=lambda topic: topic.topic_id))


def _group_to_join(state: State, command: JoinGroup) -> tuple[ConsumerGroup, list[Event]]:
    """Return the group to join, and the events that create it if it does not exist."""
    if "@" in command.group or "@" in command.member:
        raise BadRequest(
            f"the name of group {command.group!r} or member {command.member!r} contains '@'",
            hint="use other characters: '@' is reserved for broadcast groups",
        )
    if command.static and (not command.named or command.mode == BROADCAST):
        raise BadRequest(
            f"{command.member!r} cannot be a static member: "
            "it has no name, or the group is a broadcast group",
            hint="name the member, and use another mode than broadcast",
        )
    group = state.groups.by_name.get(command.group)
    base = GroupSettings(mode=command.mode) if group is None else group.settings
    settings = settings_for_join(command.wanted, base)
    events: list[Event] = []
    if group is None:
        group = ConsumerGroup(state.groups.next_group_id, command.group, settings)
        events.append(_created(state, group))
    elif base.mode != command.mode or not are_compatible(settings, base):
        raise _mismatch(group)
    if command.mode != BROADCAST:
        return group, events
    return _broadcast_group(state, group, command, events)


def _created(state: State, group: ConsumerGroup) -> GroupCreated:
    epochs = state.groups.past_epochs.get(group.name, ())
    group.set_epochs(epochs)  # for the reply
    row = (group.group_id, group.name, group.settings, group.parent, group.temporary)
    return GroupCreated(*row, epochs)


def _mismatch(group: ConsumerGroup) -> GroupMismatch:
    have = group.settings._asdict()
    message = (
        f"consumer group {group.name!r} is {have['mode']}, "
        "or has other settings than its new member asks for"
    )
    return GroupMismatch(
        message,
        hint="use the group's settings, or change them: txmq group alter; the mode cannot change",
        detail={"settings": have},
    )


def _broadcast_group(
    state: State, parent: ConsumerGroup, command: JoinGroup, events: list[Event]
) -> tuple[ConsumerGroup, list[Event]]:
    name = f"{parent.name}@{command.member}"
    group = state.groups.by_name.get(name)
    if group is None:
        group_id = max(state.groups.next_group_id, parent.group_id + 1)
        own = parent.settings if command.named else parent.settings._replace(start=LAST)
        group = ConsumerGroup(group_id, name, own, parent.group_id, temporary=not command.named)
        events.append(_created(state, group))
    return group, events


def _new_positions(group: ConsumerGroup, topics: tuple[Topic, ...]) -> bool:
    return any((topic.topic_id, 0) not in group.positions for topic in topics)


def _first_positions(
    state: State, group: ConsumerGroup, topics: tuple[Topic, ...], command: JoinGroup
) -> PositionsBegun | None:
    """Return the beginnings of some partitions that are new to the group, if they are
    too many for one turn.

    They are those of whole topics: of a topic with a position, other partitions are
    such as were added.
    """
    found: list[tuple[int, int, int]] = []
    for _topic_id, starts in groupby(_starts(state, group, topics, command), itemgetter(0)):
        if len(found) >= STEP_POSITIONS:
            return PositionsBegun(group.group_id, tuple(found))
        found += starts
    return None


def _positions(state: State) -> int:
    return sum(len(group.positions) for group in state.groups.by_id.values())


def _refuse_member(
    state: State, group: ConsumerGroup, topics: tuple[Topic, ...], command: JoinGroup
) -> None:
    """Refuse a member that cannot join. One that has begun to is in the group, unless
    its session has ended or another process has replaced it.
    """
    if command.continued:
        find_instance(state, group.name, command.member, command.instance)
    elif full := _refusal_when_full(state, group, topics, command):
        raise Throttled(full, hint="close or delete some first")


def _refusal_when_full(
    state: State, group: ConsumerGroup, topics: tuple[Topic, ...], command: JoinGroup
) -> str:
    """Return why no member can be added; "" if one can.

    A broadcast member that has a group already keeps it.
    """
    groups = state.groups.by_id
    if group.group_id not in groups and len(groups) >= MAX_GROUPS:
        return f"there are {MAX_GROUPS} consumer groups, the maximum"
    if _new_positions(group, topics) and _positions(state) >= MAX_POSITIONS:
        return f"consumer groups have positions in {MAX_POSITIONS} partitions, the maximum"
    members = len(group.members)
    if group.parent:
        members = sum(
            1 for other in groups.values() if other.parent == group.parent and other is not group
        )
    if command.member in group.members or members < MAX_MEMBERS:
        return ""
    return f"consumer group {command.group!r} has {MAX_MEMBERS} members, the maximum"


def _subscriber(member: GroupMember | None, name: str, topics: tuple[int, ...]) -> Subscriber:
    return Subscriber(name, topics, () if member is None else tuple(member.partitions))


def _subscribers(group: ConsumerGroup, but: str = "") -> list[Subscriber]:
    return [
        _subscriber(member, name, member.topics)
        for name, member in group.members.items()
        if name != but
    ]


def _rebalance(
    state: State,
    group: ConsumerGroup,
    members: list[Subscriber],
    join: JoinGroup | None = None,
    *,
    always: bool,
) -> list[Event]:
    """Return a new generation, if anything changes or `always` is set."""
    wanted = {topic_id for member in members for topic_id in member.topics}
    topics = [
        topic for topic_id in sorted(wanted) if not (topic := state.topics_by_id[topic_id]).deleted
    ]
    counts = {topic.topic_id: len(topic.end_offsets) for topic in topics}
    strategy = group.settings.strategy or ("sticky" if group.ordered else "average")
    shares = assign(strategy, members, counts, share=group.settings.mode != ORDERED)
    starts = tuple(_starts(state, group, topics, join))
    same = all(shares[member.name] == member.before for member in members)
    if same and not starts and not always:
        return []
    return [Rebalanced(group.group_id, group.generation + 1, tuple(sorted(shares.items())), starts)]


def _starts(
    state: State, group: ConsumerGroup, topics: Iterable[Topic], join: JoinGroup | None
) -> Iterator[tuple[int, int, int]]:
    """Yield the first offsets of partitions that are new to the group, topic by topic.

    A partition that was added to a topic of the group begins at its first message, and
    so does a topic that was made again under its name.
    """
    known_topics = {topic_id for topic_id, _partition in group.positions}
    known_names = {state.topics_by_id[topic_id].name for topic_id in known_topics}
    for topic in topics:
        for partition, first in enumerate(topic.start_offsets):
            if (topic.topic_id, partition) not in group.positions:
                known = topic.name in known_names
                offset = first if known else _start(state, group, topic, partition, join)
                yield topic.topic_id, partition, offset


def _start(  # a partition, and what its first member has asked for
    state: State, group: ConsumerGroup, topic: Topic, partition: int, join: JoinGroup | None
) -> int:
    asked = None if join is None else join.wanted.start
    if isinstance(asked, int):
        return visibility.offset_at_time(state, topic.topic_id, partition, asked)
    if (asked or group.settings.start) == LAST:
        return visibility.visible_end(state, topic.topic_id, partition)
    return topic.start_offsets[partition]


def _rows_of_member(
    state: State, group: ConsumerGroup, member: str, now: int, *, lost: bool
) -> tuple[DueRow, ...]:
    return leases.rows_due(state, group, leases.leases_of(group, member), now, died=lost)


def _return_unheld(
    state: State, group: ConsumerGroup, member: GroupMember, command: JoinGroup, now: int
) -> list[Event]:
    """Return leased messages that never reached the member."""
    held: dict[TopicPartition, RangeMap[None]] = {}
    for topic, partition, start, end in command.held or ():
        if topic in state.topics:
            held.setdefault(
                TopicPartition(state.topics[topic].topic_id, partition), RangeMap()
            ).put(start, end, None)
    claim = LeaseClaim(group, member.name, group.generation)
    partitions = {
        tp
        for lease in group.leases.values()
        if lease.member == member.name
        for tp in lease.partitions
    }
    partitions |= {TopicPartition(row[0], row[1]) for row in group.leased_rows}
    for topic_id, partition in sorted(partitions):
        name = state.topics_by_id[topic_id].name
        kept = held.get(TopicPartition(topic_id, partition), RangeMap())
        end_offset = max(group.positions[TopicPartition(topic_id, partition)].cursor, 1)
        for start, end in gaps(kept.overlap(0, end_offset), 0, end_offset):
            claim.add(state, name, partition, start, end)
    rows = tuple((*ref, now) for ref in claim.rows)
    return [Returned(group.group_id, claim.ranges, rows)] if claim.ranges or rows else []


def _join_reply(
    state: State, group: ConsumerGroup, name: str, wanted: tuple[int, ...], events: list[Event]
) -> JoinReply:
    generation = group.generation
    mine: tuple[tuple[int, int], ...] = (
        tuple(group.members[name].partitions) if name in group.members else ()
    )
    for event in events:
        if isinstance(event, Rebalanced):
            generation, mine = event.generation, dict(event.shares)[name]
    assignment = tuple(
        (state.topics_by_id[topic_id].name, partition) for topic_id, partition in mine
    )
    return JoinReply(
        group.name,
        group.group_id,
        generation,
        group.epoch,
        assignment,
        group.settings,
        identities(state, group, wanted),
    )


def identities(state: State, group: ConsumerGroup, topics: Iterable[int]) -> Identities:
    """Return the identities of these topics for a group."""
    wanted = set(topics)
    names = {topic_id: state.topics_by_id[topic_id].name for topic_id in sorted(wanted)}
    return Identities(
        {name: topic_id for topic_id, name in names.items()},
        tuple(
            (names[tp[0]], tp[1], group.resets.get(tp, 0), epoch_steps(state, group, tp))
            for tp in sorted(group.resets.keys() | group.epochs.keys() | _restored(state, wanted))
            if tp[0] in wanted
        ),
    )


def _restored(state: State, topics: Iterable[int]) -> set[TopicPartition]:
    """Return the partitions of those of the topics that were there at a restore."""
    return {
        TopicPartition(topic_id, partition)
        for topic_id in topics
        if state.topics_by_id[topic_id].ends_at_restore
        for partition in range(len(state.topics_by_id[topic_id].end_offsets))
    }


def decide_leave(state: State, command: LeaveGroup, now: int) -> Outcome:
    group, _member = find_instance(state, command.group, command.member, command.instance)
    rows = _rows_of_member(state, group, command.member, now, lost=command.lost)
    left = MemberLeft(group.group_id, command.member, command.lost, rows)
    if group.temporary:
        return Outcome((left, GroupDeleted(group.group_id, "its member left")))
    rest = _rebalance(state, group, _subscribers(group, but=command.member), always=True)
    return Outcome((left, *rest))


def decide_rebalance(state: State, command: Rebalance, _now: int) -> Outcome:
    group = find_group(state, command.group)
    moved = [
        MemberJoined(group.group_id, member.name, member.instance, topics, member.static)
        for member in group.members.values()
        if (topics := _present_topics(state, member)) != member.topics
    ]
    topics_of = {member.member: member.topics for member in moved}
    subscribers = [
        _subscriber(member, name, topics_of.get(name, member.topics))
        for name, member in group.members.items()
    ]
    events = _rebalance(state, group, subscribers, always=bool(moved))
    return Outcome((*moved, *events))


def _present_topics(state: State, member: GroupMember) -> tuple[int, ...]:
    """Return the topics that a member reads: in place of a deleted one that which has
    its name now.
    """
    names = {topic_id: state.topics_by_id[topic_id].name for topic_id in member.topics}
    if not any(state.topics_by_id[topic_id].deleted for topic_id in names):
        return member.topics
    return tuple(
        sorted(
            state.topics[name].topic_id if name in state.topics else topic_id
            for topic_id, name in names.items()
        )
    )


def apply_created(state: State, event: GroupCreated, _context: RecordContext) -> None:
    settings = GroupSettings(*event.settings)
    group = ConsumerGroup(event.group_id, event.name, settings, event.parent, event.temporary)
    group.set_epochs(event.epochs)
    state.groups.add(group)


def apply_joined(state: State, event: MemberJoined, context: RecordContext) -> None:
    group = state.groups.by_id[event.group_id]
    before = group.members.get(event.member)
    since = group.generation + 1 if before is None else before.since
    partitions = {} if before is None else before.partitions
    group.members[event.member] = GroupMember(
        event.member, event.instance, event.topics, since, partitions, event.static
    )
    local_stores.note_losses(state, group, context.stored_at)
    state.groups.dirty_groups.add(group.group_id)


def apply_left(state: State, event: MemberLeft, context: RecordContext) -> None:
    group = state.groups.by_id[event.group_id]
    leases.return_rows(state, group, event.rows, died=event.lost)
    for number in leases.leases_of(group, event.member):
        leases.end(state, group, number, died=event.lost)
    group.members.pop(event.member, None)
    local_stores.note_losses(state, group, context.stored_at)
    state.groups.dirty_groups.add(group.group_id)


def apply_positions_begun(state: State, event: PositionsBegun, _context: RecordContext) -> None:
    _begin(state, state.groups.by_id[event.group_id], event.starts)


def _begin(state: State, group: ConsumerGroup, starts: tuple[tuple[int, int, int], ...]) -> None:
    for topic_id, partition, offset in starts:
        group.positions[TopicPartition(topic_id, partition)] = GroupPosition(offset, offset)
        state.groups.position_for_update(group, TopicPartition(topic_id, partition))


def apply_rebalanced(state: State, event: Rebalanced, _context: RecordContext) -> None:
    group = state.groups.by_id[event.group_id]
    group.generation = event.generation
    _begin(state, group, event.starts)
    for name, partitions in event.shares:
        group.members[name].partitions = dict.fromkeys(map(TopicPartition._make, partitions))
    state.groups.dirty_groups.add(group.group_id)


DECIDERS: Deciders = {
    JoinGroup: decide_join,
    LeaveGroup: decide_leave,
    Rebalance: decide_rebalance,
}
APPLIERS: Appliers = {
    GroupCreated: apply_created,
    MemberJoined: apply_joined,
    MemberLeft: apply_left,
    PositionsBegun: apply_positions_begun,
    Rebalanced: apply_rebalanced,
}
