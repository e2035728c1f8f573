"""Consumer groups: members come and go, each change is a new generation with a new
assignment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.consumers import leases
from txmq.core.consumers.assignment import Subscriber, assign
from txmq.core.consumers.authorization import Claim, active, known
from txmq.core.consumers.commands import Join, Leave, Rebalance
from txmq.core.consumers.group_settings import agree, joined
from txmq.core.events.consumers import (
    Due,
    GroupCreated,
    GroupDeleted,
    MemberJoined,
    MemberLeft,
    Rebalanced,
    Returned,
)
from txmq.core.state import visibility
from txmq.core.state.consumer_groups import BROADCAST, LAST, ORDERED, Group, Member, Settings, Spot
from txmq.core.state.positions import Position
from txmq.core.state.ranges import RangeMap, gaps
from txmq.core.state.state import Outcome, Rejected, State
from txmq.errors import BadRequest, GroupMismatch, Throttled, UnknownMember, UnknownTopic

if TYPE_CHECKING:
    from txmq.core.events.base import Event, Place
    from txmq.core.state.state import Topic

MAX_MEMBERS = 1_000  # of one group: each join recomputes the assignment of all
MAX_TOPICS = 1_000  # of one member
MAX_GROUPS = 100_000  # each is an object in memory


class JoinReply(NamedTuple):
    """What a member needs to know. `group` is the name to use from now on: broadcast
    members have their own.
    """

    group: str
    group_id: int
    generation: int
    epoch: int
    assignment: tuple[tuple[str, int], ...]
    settings: Settings


def decide_join(state: State, command: Join, now: int) -> Outcome | Rejected:
    topics = _topics(state, command)
    if isinstance(topics, Rejected):
        return topics
    prepared = _prepare(state, command)
    if isinstance(prepared, Rejected):
        return prepared
    group, events = prepared
    if crowded := _crowded(state, group, command):
        return Rejected(Throttled, crowded, "close or delete some first")
    member = group.members.get(command.member)
    wanted = tuple(topic.topic_id for topic in topics)
    if member is not None and member.instance != command.instance:
        rows = _rows(state, group, member.name, now, lost=True)
        events.append(MemberLeft(group.group_id, member.name, True, rows))
    elif member is not None and command.held is not None:
        events += _not_held(state, group, member, command, now)
    joined = MemberJoined(group.group_id, command.member, command.instance, wanted, command.static)
    if member is None or joined[2:] != (member.instance, member.topics, member.static):
        events.append(joined)
    subscribers = [
        *_subscribers(group, but=command.member),
        _subscriber(member, command.member, wanted),
    ]
    fresh = bool(events) and isinstance(events[-1], MemberJoined)
    events += _rebalance(state, group, subscribers, command, always=fresh)
    return Outcome(tuple(events), _join_reply(state, group, command.member, events))


def _topics(state: State, command: Join) -> tuple[Topic, ...] | Rejected:
    if not command.topics or len(command.topics) > MAX_TOPICS:
        return Rejected(
            BadRequest, f"{len(command.topics)} topics", f"a member reads 1 to {MAX_TOPICS} topics"
        )
    missing = next((name for name in command.topics if name not in state.topics), None)
    if missing is not None:
        return Rejected(
            UnknownTopic,
            f"there is no topic {missing!r}",
            "create it: txmq topic create",
            {"topic": missing},
        )
    return tuple(
        sorted(
            (state.topics[name] for name in set(command.topics)), key=lambda topic: topic.topic_id
        )
    )


def _prepare(state: State, command: Join) -> tuple[Group, list[Event]] | Rejected:
    """The group to join, as it is or as the events say it will be."""
    if "@" in command.group or "@" in command.member:
        return Rejected(
            BadRequest,
            f"{command.group!r} or {command.member!r} is no name",
            "'@' is for broadcast groups",
        )
    if command.static and (not command.named or command.mode == BROADCAST):
        return Rejected(
            BadRequest,
            "a static member has a name, and a share of the partitions",
            "name the member",
        )
    group = state.consumers.groups.get(command.group)
    base = Settings(mode=command.mode) if group is None else group.settings
    settings = joined(command.wanted, base)
    if isinstance(settings, Rejected):
        return settings
    events: list[Event] = []
    if group is None:
        group = Group(state.consumers.next_group_id, command.group, settings)
        events.append(GroupCreated(group.group_id, group.name, settings, 0, False))
    elif base.mode != command.mode or not agree(settings, base):
        return _mismatch(group)
    if command.mode != BROADCAST:
        return group, events
    return _own_group(state, group, command, events)


def _mismatch(group: Group) -> Rejected:
    have = group.settings._asdict()
    message = f"consumer group {group.name!r} is {have['mode']} and has other settings than its new member asks for"
    return Rejected(
        GroupMismatch,
        message,
        "to change them: txmq group alter; the mode is for ever",
        {"settings": have},
    )


def _own_group(
    state: State, parent: Group, command: Join, events: list[Event]
) -> tuple[Group, list[Event]]:
    name = f"{parent.name}@{command.member}"
    group = state.consumers.groups.get(name)
    if group is None:
        group_id = max(state.consumers.next_group_id, parent.group_id + 1)
        own = parent.settings if command.named else parent.settings._replace(start=LAST)
        group = Group(group_id, name, own, parent.group_id, temporary=not command.named)
        events.append(GroupCreated(group_id, name, own, parent.group_id, not command.named))
    return group, events


def _crowded(state: State, group: Group, command: Join) -> str:
    """Why there is no room for one more; "" = there is. Broadcast members that were
    there before keep theirs.
    """
    groups = state.consumers.by_id
    if group.group_id not in groups and len(groups) >= MAX_GROUPS:
        return f"there are {MAX_GROUPS} consumer groups"
    members = len(group.members)
    if group.parent:
        members = sum(
            1 for other in groups.values() if other.parent == group.parent and other is not group
        )
    if command.member in group.members or members < MAX_MEMBERS:
        return ""
    return f"consumer group {command.group!r} has {MAX_MEMBERS} members"


def _subscriber(member: Member | None, name: str, topics: tuple[int, ...]) -> Subscriber:
    return Subscriber(name, topics, () if member is None else tuple(member.partitions))


def _subscribers(group: Group, but: str = "") -> list[Subscriber]:
    return [
        _subscriber(member, name, member.topics)
        for name, member in group.members.items()
        if name != but
    ]


def _rebalance(
    state: State, group: Group, members: list[Subscriber], join: Join | None = None, *, always: bool
) -> list[Event]:
    """The next generation; none where nothing changes."""
    wanted = {topic_id for member in members for topic_id in member.topics}
    topics = {
        topic_id: len(topic.ends)
        for topic_id in sorted(wanted)
        if not (topic := state.topics_by_id[topic_id]).deleted
    }
    strategy = group.settings.strategy or ("sticky" if group.ordered else "average")
    shares = assign(strategy, members, topics, share=group.settings.mode != ORDERED)
    starts = _starts(state, group, topics, join)
    same = all(shares[member.name] == member.before for member in members)
    if same and not starts and not always:
        return []
    return [Rebalanced(group.group_id, group.generation + 1, tuple(sorted(shares.items())), starts)]


def _starts(
    state: State, group: Group, topics: dict[int, int], join: Join | None
) -> tuple[tuple[int, int, int], ...]:
    """Where partitions new to the group begin. One that a topic of the group has grown
    begins at its beginning.
    """
    known_topics = {topic_id for topic_id, _partition in group.positions}
    starts = []
    for topic_id, count in topics.items():
        topic = state.topics_by_id[topic_id]
        for partition in range(count):
            if (topic_id, partition) not in group.positions:
                first = topic.firsts[partition]
                offset = (
                    first
                    if topic_id in known_topics
                    else _start(state, group, topic, partition, join)
                )
                starts.append((topic_id, partition, offset))
    return tuple(starts)


def _start(state: State, group: Group, topic: Topic, partition: int, join: Join | None) -> int:
    start, last = group.settings.start, visibility.end(state, topic.topic_id, partition)
    first = topic.firsts[partition]
    if join is not None and join.wanted.start is not None:
        start = join.wanted.start
    if start == LAST:
        return last
    given = (
        {(name, number): offset for name, number, offset in join.starts} if join is not None else {}
    )
    offset = given.get((topic.name, partition), first) if isinstance(start, int) else first
    return min(max(offset, first), last)


def _rows(state: State, group: Group, member: str, now: int, *, lost: bool) -> tuple[Due, ...]:
    return leases.rows_due(state, group, leases.of_member(group, member), now, died=lost)


def _not_held(state: State, group: Group, member: Member, command: Join, now: int) -> list[Event]:
    """Give back what was leased to the member but never reached it, as if it had
    returned it.
    """
    held: dict[Spot, RangeMap[None]] = {}
    for topic, partition, start, end in command.held or ():
        if topic in state.topics:
            held.setdefault((state.topics[topic].topic_id, partition), RangeMap()).put(
                start, end, None
            )
    claim = Claim(group, member.name, group.generation)
    spots = {
        spot
        for lease in group.leases.values()
        if lease.member == member.name
        for spot in lease.spots
    }
    spots |= {row[:2] for row in group.held_rows}
    for topic_id, partition in sorted(spots):
        name = state.topics_by_id[topic_id].name
        kept = held.get((topic_id, partition), RangeMap())
        everything = max(group.positions[topic_id, partition].cursor, 1)
        for start, end in gaps(kept.overlap(0, everything), 0, everything):
            claim.add(state, name, partition, start, end)
    rows = tuple((*spotted, now) for spotted in claim.rows)
    return [Returned(group.group_id, claim.ranges, rows)] if claim.ranges or rows else []


def _join_reply(state: State, group: Group, name: str, events: list[Event]) -> JoinReply:
    generation = group.generation
    mine: tuple[Spot, ...] = tuple(group.members[name].partitions) if name in group.members else ()
    for event in events:
        if isinstance(event, Rebalanced):
            generation, mine = event.generation, dict(event.shares)[name]
    assignment = tuple(
        (state.topics_by_id[topic_id].name, partition) for topic_id, partition in mine
    )
    return JoinReply(
        group.name, group.group_id, generation, group.epoch, assignment, group.settings
    )


def decide_leave(state: State, command: Leave, now: int) -> Outcome | Rejected:
    found = active(state, command.group, command.member)
    if isinstance(found, Rejected):
        return found
    group, member = found
    if member.instance != command.instance:
        return Rejected(
            UnknownMember,
            f"another process is member {command.member!r} of {command.group!r} by now",
        )
    rows = _rows(state, group, command.member, now, lost=command.lost)
    left = MemberLeft(group.group_id, command.member, command.lost, rows)
    if group.temporary:
        return Outcome((left, GroupDeleted(group.group_id, "its member left")))
    rest = _rebalance(state, group, _subscribers(group, but=command.member), always=True)
    return Outcome((left, *rest))


def decide_rebalance(state: State, command: Rebalance, now: int) -> Outcome | Rejected:
    del now
    group = known(state, command.group)
    if isinstance(group, Rejected):
        return group
    return Outcome(tuple(_rebalance(state, group, _subscribers(group), always=False)))


def apply_created(state: State, event: GroupCreated, place: Place) -> None:
    del place
    settings = Settings(*event.settings)
    state.consumers.add(Group(event.group_id, event.name, settings, event.parent, event.temporary))


def apply_joined(state: State, event: MemberJoined, place: Place) -> None:
    del place
    group = state.consumers.by_id[event.group_id]
    before = group.members.get(event.member)
    since = group.generation + 1 if before is None else before.since
    partitions = {} if before is None else before.partitions
    group.members[event.member] = Member(
        event.member, event.instance, event.topics, since, partitions, event.static
    )
    state.consumers.dirty_groups.add(group.group_id)


def apply_left(state: State, event: MemberLeft, place: Place) -> None:
    del place
    group = state.consumers.by_id[event.group_id]
    leases.put_back(state, group, event.rows, died=event.lost)
    for number in leases.of_member(group, event.member):
        leases.end(state, group, number, died=event.lost)
    group.members.pop(event.member, None)
    state.consumers.dirty_groups.add(group.group_id)


def apply_rebalanced(state: State, event: Rebalanced, place: Place) -> None:
    del place
    group = state.consumers.by_id[event.group_id]
    group.generation = event.generation
    for topic_id, partition, offset in event.starts:
        group.positions[topic_id, partition] = Position(offset, offset)
        state.consumers.touch(group, (topic_id, partition))
    for name, spots in event.shares:
        group.members[name].partitions = dict.fromkeys(spots)
    state.consumers.dirty_groups.add(group.group_id)


DECIDERS: dict[type, Any] = {Join: decide_join, Leave: decide_leave, Rebalance: decide_rebalance}
APPLIERS: dict[type, Any] = {
    GroupCreated: apply_created,
    MemberJoined: apply_joined,
    MemberLeft: apply_left,
    Rebalanced: apply_rebalanced,
}
