"""Settings of consumer groups, and pauses.

Members name settings when they join, operators change them later. See also `resets`,
`clones` and `background_work` for the other calls of operators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.core.consumers import circuit_breaker
from txmq.core.consumers.assignment import STRATEGIES
from txmq.core.consumers.authorization import find_group
from txmq.core.consumers.commands import AlterGroup, PauseGroup, RequestedSettings
from txmq.core.events.consumers import GroupChanged, GroupPaused
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.state.consumer_groups import (
    FIRST,
    LAST,
    MODES,
    ON_EXHAUSTED,
    SEVERITIES,
    GroupSettings,
)
from txmq.errors import BadRequest, UnknownTopic
from txmq.model.units import DAY, HOUR, SECOND

if TYPE_CHECKING:
    from txmq.core.events.base import RecordContext
    from txmq.core.state.consumer_groups import ConsumerGroup
    from txmq.core.state.state import State

# A shorter lease would end in transit. The maximum is that of other brokers' proxies.
LEASE_RANGE = (SECOND, 12 * HOUR)
SESSION_RANGE = (SECOND, HOUR)
MAX_CONSUME_TIMEOUT = 7 * DAY
MAX_SPAN = 100_000_000
MAX_PARKED, MAX_FLOOD_KEYS = 100_000_000, 1_000


def merge_settings(wanted: RequestedSettings, base: GroupSettings) -> GroupSettings:
    """Return `base` with the requested settings, if these are valid."""
    named = {name: value for name, value in wanted._asdict().items() if value is not None}
    if wanted.retry is not None:
        named["retry"] = wanted.retry.row
    settings = base._replace(**named)
    mode, on_exhausted, strategy = settings.mode, settings.on_exhausted, settings.strategy
    lease, session, timeout = settings.lease_us, settings.session_us, settings.consume_timeout_us
    parked, keys, span = settings.max_parked, settings.flood_keys, settings.span
    checks = (
        (mode in MODES, f"mode {mode!r} is unknown: choose {', '.join(MODES)}"),
        (
            on_exhausted in ON_EXHAUSTED,
            f"on_exhausted {on_exhausted!r} is unknown: choose {', '.join(ON_EXHAUSTED)}",
        ),
        (
            LEASE_RANGE[0] <= lease <= LEASE_RANGE[1],
            f"a lease of {lease} µs is out of range: choose 1 s to 12 h",
        ),
        (
            SESSION_RANGE[0] <= session <= SESSION_RANGE[1],
            f"a session of {session} µs is out of range: choose 1 s to 1 h",
        ),
        (
            settings.start in (FIRST, LAST) or isinstance(settings.start, int),
            f"start {settings.start!r} is unknown: choose first, last or a time",
        ),
        (
            SECOND <= timeout <= MAX_CONSUME_TIMEOUT,
            f"consume_timeout {timeout} µs is out of range: choose 1 s to 7 days",
        ),
        (
            0 <= parked <= MAX_PARKED,
            f"max_parked {parked} is out of range: choose 0 to {MAX_PARKED}",
        ),
        (
            0 <= keys <= MAX_FLOOD_KEYS,
            f"flood_keys {keys} is out of range: choose 0 to {MAX_FLOOD_KEYS}",
        ),
        (0 <= span <= MAX_SPAN, f"span {span} is out of range: choose 0 to {MAX_SPAN}"),
        (
            strategy in ("", *STRATEGIES),
            f"strategy {strategy!r} is unknown: choose {', '.join(STRATEGIES)}",
        ),
        (
            settings.alarm_severity in SEVERITIES,
            f"severity {settings.alarm_severity!r} is unknown: choose {', '.join(SEVERITIES)}",
        ),
    )
    invalid = next((message for valid, message in checks if not valid), None)
    if invalid is not None:
        raise BadRequest(invalid)
    return settings


def settings_for_join(wanted: RequestedSettings, base: GroupSettings) -> GroupSettings:
    """Return the settings that a member asks for.

    Settings that an operator has altered stay.
    """
    return merge_settings(wanted._replace(**dict.fromkeys(base.altered)), base)


def settings_altered(wanted: RequestedSettings, base: GroupSettings) -> GroupSettings:
    """Return the settings that an operator asks for, marked as altered."""
    named = {name for name, value in wanted._asdict().items() if value is not None}
    return merge_settings(wanted, base._replace(altered=tuple(sorted(named.union(base.altered)))))


def are_compatible(settings: GroupSettings, base: GroupSettings) -> bool:
    """Return True if a member with `settings` may join a group with `base`.

    Only `start` may differ.
    """
    return (
        settings.policy == base.policy
        and settings._replace(start=base.start, retry=base.retry) == base
    )


def with_members(state: State, name: str) -> list[ConsumerGroup]:
    """Return the group and, if it is a broadcast group, its members' groups."""
    group = find_group(state, name)
    return [
        group,
        *(other for other in state.groups.by_id.values() if other.parent == group.group_id),
    ]


def decide_alter(state: State, command: AlterGroup, _now: int) -> Outcome:
    found = with_members(state, command.group)
    changed, altered = [], []
    for group in found:
        settings = settings_altered(command.wanted, group.settings)
        altered.append(settings)
        if settings != group.settings:
            changed.append(GroupChanged(group.group_id, settings, command.by))
    return Outcome(tuple(changed), altered[0])


def decide_pause(state: State, command: PauseGroup, _now: int) -> Outcome:
    found = with_members(state, command.group)
    topic = state.topics.get(command.topic)
    if command.topic and topic is None:
        raise UnknownTopic(
            f"there is no topic {command.topic!r}", hint="list the topics: txmq topic list"
        )
    topic_id = 0 if topic is None else topic.topic_id
    changed = [
        group
        for group in found
        if _is_paused(group, topic_id) is not command.paused or _closes_breaker(group, command)
    ]
    return Outcome(
        tuple(
            GroupPaused(group.group_id, command.paused, command.by, topic_id) for group in changed
        )
    )


def _is_paused(group: ConsumerGroup, topic_id: int) -> bool:
    return topic_id in group.paused_topics if topic_id else group.paused


def _closes_breaker(group: ConsumerGroup, command: PauseGroup) -> bool:
    return group.breaker is not None and not command.paused and not command.topic


def apply_changed(state: State, event: GroupChanged, _context: RecordContext) -> None:
    group = state.groups.by_id[event.group_id]
    group.settings = GroupSettings(*event.settings)
    if not group.settings.flood_keys:
        circuit_breaker.close_breaker(group)
    state.groups.dirty_groups.add(event.group_id)


def apply_paused(state: State, event: GroupPaused, _context: RecordContext) -> None:
    group = state.groups.by_id[event.group_id]
    if not event.topic_id:
        group.paused = event.paused
    elif event.paused:
        group.paused_topics.add(event.topic_id)
    else:
        group.paused_topics.discard(event.topic_id)
    if not event.paused and not event.topic_id:
        circuit_breaker.close_breaker(group)
    state.groups.dirty_groups.add(event.group_id)


DECIDERS: Deciders = {AlterGroup: decide_alter, PauseGroup: decide_pause}
APPLIERS: Appliers = {GroupChanged: apply_changed, GroupPaused: apply_paused}
