"""Views of consumer groups: answers for operators, in JSON values."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.consumers import head_of_line, progress, stall_reasons, store_views
from txmq.core.consumers.authorization import find_group, find_instance, find_member
from txmq.core.consumers.membership import identities
from txmq.core.consumers.stall_reasons import StallContext
from txmq.core.state import failed_messages, local_stores, visibility
from txmq.core.state.consumer_groups import FenceState
from txmq.core.state.restores import all_epochs, epoch_of
from txmq.core.state.state import State
from txmq.core.steps import run_to_end
from txmq.core.topics import topics
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.core.consumers.progress import TopicProgress
    from txmq.core.state.consumer_groups import (
        ConsumerGroup,
        GroupMember,
        GroupSettings,
        KeyFence,
    )
    from txmq.core.steps import Steps
    from txmq.model.topic_partition import TopicPartition

MAX_FENCES_LISTED = 100
MAX_STORES_LISTED = 100
COUNTED = (
    "group", "members", "unprocessed", "age_ms", "unsettled", "leased", "retrying", "parked",
    "letters",
)  # fmt: skip


class LogRow(NamedTuple):
    """Place of a message in the log: a batch, and its row there."""

    position: int
    length: int
    row: int


def list_groups(state: State, now: int | None = None) -> list[dict[str, Any]]:
    """Describe all groups, by name, in one go. `now` None = as of the last record."""
    at = state.stored_at if now is None else now
    groups = [group for _name, group in sorted(state.groups.by_name.items())]
    return [run_to_end(summarize(state, group, at)) for group in groups]


def count_messages(state: State, group: ConsumerGroup, now: int) -> dict[str, Any]:
    """Return the numbers of a group."""
    summary = run_to_end(summarize(state, group, now))
    return {name: summary[name] for name in COUNTED}


def summarize(
    state: State, group: ConsumerGroup, now: int, topics: list[TopicProgress] | None = None
) -> Steps[dict[str, Any]]:
    """Describe a group in a list, in steps. The state may change between them."""
    if topics is None:
        topics = yield from progress.by_topic(state, group, now)
    return {
        "group": group.name,
        "unprocessed": sum(one.unprocessed for one in topics),
        "age_ms": max((one.age_ms for one in topics), default=0),
        "unsettled": sum(one.unsettled for one in topics),
        "mode": group.settings.mode,
        "state": _state(group),
        "generation": group.generation,
        "epoch": group.epoch,
        "members": len(group.members),
        "topics": sorted({one.topic for one in topics}),
        "leased": sum(lease.remaining for lease in group.leases.values()),
        "retrying": sum(group.retrying.values()),
        "parked": sum(fence.parked for _topic, _key, fence in group.all_fences()),
        "fences": sum(map(len, group.fences.values())),
        "oldest_fence": min((fence.since for fence in group.oldest_fences()), default=None),
        **_summarize_stores(state, group),
        "letters": group.letters,
        "floods": group.breaker_openings,
        "expired": group.expired,
        "filtered": group.filtered,
    }


def _summarize_stores(state: State, group: ConsumerGroup) -> dict[str, Any]:
    """Return numbers of the messages in local stores of a group's consumers."""
    stores = local_stores.with_messages(group)
    oldest = (local_stores.oldest(state, group, store_id) for store_id, _store in stores)
    return {
        "at_consumers": sum(store.messages for _store_id, store in stores),
        "store_attempts": sum(store.attempts for _store_id, store in stores),
        "stores": len(stores),
        "stores_lost": sum(not group.has_owner(store) for _store_id, store in stores),
        "oldest_stored": min((one for one in oldest if one is not None), default=None),
    }


def _state(group: ConsumerGroup) -> str:
    if group.paused:
        return "paused"
    if group.breaker is not None:
        return "guarded"
    if group.pending_resets:
        return "being reset"
    if group.clone_progress is not None:
        return "being cloned"
    return "active" if group.members else "empty"


def describe_group(state: State, name: str, context: StallContext) -> Steps[dict[str, Any]]:
    """Describe a group in full, in steps.

    `why` has the stall reason of each partition, "" if it has none.
    """
    group = find_group(state, name)
    positions: list[dict[str, Any]] = []
    for tp in sorted(group.positions):
        if tp in group.positions:
            positions.append(_position(state, group, tp, context))
        yield  # it may have read hundreds of failed messages
    summary = yield from summarize(state, group, context.now)
    return summary | {
        "settings": describe_settings(group.settings),
        "flood": None if group.breaker is None else group.breaker._asdict(),
        "group_id": group.group_id,
        "next_letter": group.next_letter,
        "member_list": [
            _member(state, group, member, context) for member in group.members.values()
        ],
        "age_ms": max((position["age_ms"] for position in positions), default=0),
        "paused_topics": [
            state.topics_by_id[topic_id].name for topic_id in sorted(group.paused_topics)
        ],
        "positions": positions,
        "store_list": list(islice(store_views.list_stores(state, group), MAX_STORES_LISTED)),
        "fence_list": [
            _fence(state, *item) for item in islice(group.all_fences(), MAX_FENCES_LISTED)
        ],
    }


def describe_settings(settings: GroupSettings) -> dict[str, Any]:
    """Return a group's settings; times are in microseconds."""
    return settings._asdict() | {"retry": settings.policy.to_json()}


def _member(
    state: State, group: ConsumerGroup, member: GroupMember, context: StallContext
) -> dict[str, Any]:
    mine = [lease for lease in group.leases.values() if lease.member == member.name]
    return {
        "member": member.name,
        "since": member.since,
        "assignment": _assignment(state, member),
        "leased": sum(lease.remaining for lease in mine),
        "oldest_lease": min((lease.granted_at for lease in mine), default=None),
        "paused": sorted(context.paused.get(member.name, ())),
    }


def _assignment(state: State, member: GroupMember) -> list[tuple[str, int]]:
    return [
        (state.topics_by_id[topic_id].name, partition) for topic_id, partition in member.partitions
    ]


def _position(
    state: State, group: ConsumerGroup, tp: TopicPartition, context: StallContext
) -> dict[str, Any]:
    position = group.positions[tp]
    reason = stall_reasons.stall_reason(state, group, tp, context)
    window = head_of_line.window_of(state, group, tp, context.now)
    topic, counts = state.topics_by_id[tp[0]], progress.counts(state, group, tp)
    holders = sorted({group.leases[held.value.lease].member for held in position.leased})
    owners = [member.name for member in group.members.values() if tp in member.partitions]
    return {
        "topic": topic.name,
        "topic_id": tp[0],
        "partition": tp[1],
        "epoch": epoch_of(state, group, tp),
        "epochs": all_epochs(state, group, tp),
        "floor": position.floor,
        "cursor": position.cursor,
        "end": visibility.visible_end(state, *tp, context.durable),
        "unprocessed": counts.unprocessed,
        "age_ms": progress.age_ms(state, group, tp, context.now),
        "unsettled": counts.unsettled,
        "leased": position.leased.total,
        "leased_to": holders,
        "redeliver": position.redeliver.total,
        "reserved": position.reserved.total,
        "retrying": group.retrying[tp],
        "at_consumers": sum(store_views.at_consumers(state, group, *tp).values()),
        "owners": owners,
        "passed": _passed(state, group, tp),
        "why": "" if reason is None else reason.text,
        "reason": "" if reason is None else reason.code,
        "window": window.size,
        "unprocessed_share": round(window.unprocessed_share, 3),
        "processed_share": round(window.processed_share, 3),
        "head": window.word,
    }


def _passed(state: State, group: ConsumerGroup, tp: TopicPartition) -> int:
    row = state.tables[t.MISSED].get(t.POSITION_KEY.pack(group.group_id, *tp))
    return 0 if row is None else int(row[0])


def _fence(state: State, topic_id: int, key_hash: int, fence: KeyFence) -> dict[str, Any]:
    return {
        "topic": state.topics_by_id[topic_id].name,
        "key_hash": key_hash,
        "state": FenceState(fence.state).name.lower(),
        "partition": fence.partition,
        "offset": fence.offset,
        "parked": fence.parked,
        "since": fence.since,
    }


def fence_head(state: State, name: str, topic: str, key_hash: int) -> LogRow | None:
    """Return where the log has a message of a fenced key: the head of its fence, or the
    next one behind it. None = it is not there any more.
    """
    group, found = state.groups.by_name.get(name), state.topics.get(topic)
    fence = None if group is None or found is None else group.fence(found.topic_id, key_hash)
    if group is None or found is None or fence is None:
        return None
    row = failed_messages.get(state, group, (found.topic_id, fence.partition, fence.offset))
    if row is None:
        parked = failed_messages.first_parked(state, group, found.topic_id, key_hash)
        row = None if parked is None else parked[1]
    if row is not None:
        return LogRow(row.position, row.length, row.row)
    for base, entry in topics.entry_at(state, found.topic_id, fence.partition, fence.offset):
        return LogRow(entry.position, entry.length, fence.offset - base)
    return None


def describe_membership(state: State, name: str, member: str, instance: str = "") -> dict[str, Any]:
    """Return the answer to a heartbeat: the current generation and assignment.

    An `instance` that another process has replaced is not a member any more.
    """
    found = (
        find_instance(state, name, member, instance)
        if instance
        else find_member(state, name, member)
    )
    group, present = found
    view = {
        "generation": group.generation,
        "epoch": group.epoch,
        "assignment": _assignment(state, present),
        "consume_timeout_ms": group.settings.consume_timeout_us // 1_000,
        "retry": group.settings.policy.to_json(),
        "on_exhausted": group.settings.on_exhausted,
    }
    return view | identities(state, group, present.topics)._asdict()
