"""What operators do to consumer groups as a whole: settings and pauses. See also
`resets`, `clones`, `tidying`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from txmq.core.consumers import circuit_breaker
from txmq.core.consumers.authorization import known
from txmq.core.consumers.commands import GroupPause, GroupSet
from txmq.core.consumers.group_settings import altered
from txmq.core.events.consumers import GroupChanged, GroupPaused
from txmq.core.state.consumer_groups import Settings
from txmq.core.state.state import Outcome, Rejected, State
from txmq.errors import UnknownTopic

if TYPE_CHECKING:
    from txmq.core.events.base import Place
    from txmq.core.state.consumer_groups import Group


def family(state: State, name: str) -> list[Group] | Rejected:
    """The group and, of a broadcast group, those of its members."""
    group = known(state, name)
    if isinstance(group, Rejected):
        return group
    return [
        group,
        *(other for other in state.consumers.by_id.values() if other.parent == group.group_id),
    ]


def decide_set(state: State, command: GroupSet, now: int) -> Outcome | Rejected:
    del now
    found = family(state, command.group)
    if isinstance(found, Rejected):
        return found
    changed = []
    for group in found:
        settings = altered(command.wanted, group.settings)
        if isinstance(settings, Rejected):
            return settings
        if settings != group.settings:
            changed.append(GroupChanged(group.group_id, settings, command.by))
    return Outcome(tuple(changed))


def decide_pause(state: State, command: GroupPause, now: int) -> Outcome | Rejected:
    del now
    found = family(state, command.group)
    if isinstance(found, Rejected):
        return found
    topic = state.topics.get(command.topic)
    if command.topic and topic is None:
        return Rejected(
            UnknownTopic, f"there is no topic {command.topic!r}", "see: txmq topic list"
        )
    topic_id = 0 if topic is None else topic.topic_id
    changed = [
        group
        for group in found
        if _is_paused(group, topic_id) is not command.paused or _guarded(group, command)
    ]
    return Outcome(
        tuple(
            GroupPaused(group.group_id, command.paused, command.by, topic_id) for group in changed
        )
    )


def _is_paused(group: Group, topic_id: int) -> bool:
    return topic_id in group.paused_topics if topic_id else group.paused


def _guarded(group: Group, command: GroupPause) -> bool:
    """Whether an operator ends what the guard began."""
    return group.flood is not None and not command.paused and not command.topic


def apply_changed(state: State, event: GroupChanged, place: Place) -> None:
    del place
    group = state.consumers.by_id[event.group_id]
    group.settings = Settings(*event.settings)
    if not group.settings.flood_keys:
        circuit_breaker.lift(group)
    state.consumers.dirty_groups.add(event.group_id)


def apply_paused(state: State, event: GroupPaused, place: Place) -> None:
    del place
    group = state.consumers.by_id[event.group_id]
    if not event.topic_id:
        group.paused = event.paused
    elif event.paused:
        group.paused_topics.add(event.topic_id)
    else:
        group.paused_topics.discard(event.topic_id)
    if not event.paused and not event.topic_id:
        circuit_breaker.lift(group)
    state.consumers.dirty_groups.add(event.group_id)


DECIDERS: dict[type, Any] = {
    GroupSet: decide_set,
    GroupPause: decide_pause,
}
APPLIERS: dict[type, Any] = {
    GroupChanged: apply_changed,
    GroupPaused: apply_paused,
}
