"""Conditions of alarms that each consumer group has for itself: one alarm a group,
whose severity the group's setting `alarm_severity` may change.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from txmq.broker.monitoring.alarm_conditions import Raised
from txmq.core.consumers import letter_stats
from txmq.core.state import local_stores
from txmq.core.state.consumer_groups import DEFAULT, OFF, FenceState
from txmq.model.measures import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from txmq.broker.monitoring.alarm_conditions import Conditions
    from txmq.core.state.consumer_groups import ConsumerGroup, ConsumerStore

    GroupCheck = Callable[[Conditions, ConsumerGroup], str]

MAX_GROUPS = 100  # that one condition tells apart
MAX_ERRORS = 3  # that an alarm names
MAX_KEYS = 3
MAX_FENCES_READ = 100


def each_group(check: GroupCheck) -> Callable[[Conditions], list[Raised]]:
    """Return a condition that judges each group by itself."""

    def check_all(seen: Conditions) -> list[Raised]:
        found = _raised(seen, check)
        told = list(islice(found, MAX_GROUPS))
        more = sum(1 for _one in found)
        return [*told, Raised(f"and of {more} more groups", "")] if more else told

    return check_all


def _raised(seen: Conditions, check: GroupCheck) -> Iterator[Raised]:
    for group in seen.state.groups.by_id.values():
        severity = group.settings.alarm_severity
        text = "" if severity == OFF else check(seen, group)
        if text:
            own = "" if severity == DEFAULT else severity
            yield Raised(text, f"group:{group.name}", own)


def letters(seen: Conditions, group: ConsumerGroup) -> str:
    if not group.letters:
        return ""
    errors = letter_stats.frequent_errors(seen.state, group, MAX_ERRORS)
    kinds = ", ".join(
        f"{one.error_type or 'no type'} {one.fingerprint} ({number})" for one, number in errors
    )
    text = f"open dead letters of group {group.name}: {group.letters}, by error: {kinds}"
    keys = sum(map(len, group.fences.values()))
    stand = f"keys that stand behind letters or retries: {keys}{_heads(seen, group)}"
    return f"{text}; {stand}" if keys else text


def _heads(seen: Conditions, group: ConsumerGroup) -> str:
    """Return places of letters behind which keys stand."""
    dead = (
        f"{seen.state.topics_by_id[topic_id].name}/{fence.partition}/{fence.offset}"
        for topic_id, _key, fence in islice(group.all_fences(), MAX_FENCES_READ)
        if fence.state is FenceState.DEAD
    )
    places = ", ".join(islice(dead, MAX_KEYS))
    return f", as {places}" if places else ""


def old_fence(seen: Conditions, group: ConsumerGroup) -> str:
    since = min((fence.since for fence in group.oldest_fences()), default=0)
    if not seen.older_than(since, seen.limits.fence_s):
        return ""
    keys = sum(map(len, group.fences.values()))
    return (
        f"keys of group {group.name} that stand, their later messages parked: {keys}, one for "
        f"{seen.age(since)}"
    )


def guarded(seen: Conditions, group: ConsumerGroup) -> str:
    breaker = group.breaker
    if breaker is None:
        return ""
    error = f"{breaker.error_type or 'no type'}, fingerprint {breaker.fingerprint}"
    lost = group.unreachable
    return (
        f"the circuit breaker of group {group.name} has been open for {seen.age(breaker.since)}: "
        f"many keys failed alike ({error}); {counted(breaker.probes, 'probe')} failed"
    ) + (
        f"; {counted(lost, 'message')} cannot be probes, in stores without an owner: "
        "see store.no_owner"
        if lost
        else ""
    )


def no_member(seen: Conditions, group: ConsumerGroup) -> str:
    found = seen.unattended.get(group.group_id)
    if found is None or group.members or group.paused:
        return ""
    if not seen.older_than(found.since, seen.limits.no_member_s):
        return ""
    return (
        f"group {group.name} has had no member for {seen.age(found.since)}, and messages that "
        f"wait for one: {found.messages}"
    )


def lost_store(seen: Conditions, group: ConsumerGroup) -> str:
    lost = _lost_stores(group)
    since = min((store.lost_at for _store_id, store in lost), default=0)
    if not seen.older_than(since, seen.limits.store_owner_s):
        return ""
    store_id, store = min(lost, key=lambda item: item[1].lost_at)
    last = f"{store.member or 'nobody'}{f' on {store.host}' if store.host else ''}"
    messages = sum(store.messages for _store_id, store in lost)
    return (
        f"local stores of group {group.name} without an owner: {len(lost)}, with "
        f"{counted(messages, 'message')}, as {store_id.hex()} for {seen.age(since)}, "
        f"last reported by {last}"
    ) + ("; adopted messages wait for the group, see group.guarded" if group.breaker else "")


def _lost_stores(group: ConsumerGroup) -> list[tuple[bytes, ConsumerStore]]:
    return [
        (store_id, store)
        for store_id, store in (local_stores.with_messages(group) if group.stores else ())
        if not group.has_owner(store) and not store.adopted
    ]


def old_store(seen: Conditions, group: ConsumerGroup) -> str:
    stores = local_stores.with_messages(group) if group.stores else ()
    ages = (
        (local_stores.oldest(seen.state, group, store_id) or seen.now, store_id)
        for store_id, _store in stores
    )
    since, store_id = min(ages, default=(0, b""))
    if not seen.older_than(since, seen.limits.store_s):
        return ""
    return (
        f"a message has been failing in local store {store_id.hex()} of group {group.name} "
        f"for {seen.age(since)}"
    )
