"""The life of one message: what each consumer group has done with it, and when.

Times are known where something was written down for an operator: leases, failures,
deaths, stays at a consumer. That a message is settled is known. Only the log knows
whether a handler processed it or a filter passed over it, when, and at which member
(`broker/search/deliveries.py`).
What failed and was processed before it died leaves nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from txmq.core.consumers import failures
from txmq.core.consumers.letter_views import row_state
from txmq.core.state import attempts, failed_messages, letter_edits, plan_letters
from txmq.core.state.consumer_groups import FenceState
from txmq.core.state.failed_rows import FailedKind
from txmq.core.state.plans import LetterOutcome
from txmq.core.state.restores import all_epochs
from txmq.model.topic_partition import TopicPartition

if TYPE_CHECKING:
    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.failed_rows import FailedMessage
    from txmq.core.state.plans import Plan
    from txmq.core.state.state import State
    from txmq.core.steps import Steps

SETTLED = "settled"
GROUPS_PER_STEP = 64
MAX_GROUPS = 1_000  # that are described of one message


def groups_of(
    state: State, ref: MessageRef, key_hash: int | None, visible_at: int
) -> Steps[list[dict[str, Any]]]:
    """Describe a message, visible since a position of the log, in each group that reads
    its partition, in steps. The state may change between them.
    """
    found: list[dict[str, Any]] = []
    for number, group in enumerate(sorted(state.groups.by_name.values(), key=_name)):
        if TopicPartition(ref[0], ref[1]) in group.positions and not group.deleted:
            found.append(in_group(state, group, ref, key_hash, visible_at))
        if len(found) == MAX_GROUPS:
            break
        if number % GROUPS_PER_STEP == GROUPS_PER_STEP - 1:
            yield
    return found


def _name(group: ConsumerGroup) -> str:
    return group.name


def in_group(
    state: State, group: ConsumerGroup, ref: MessageRef, key_hash: int | None, visible_at: int
) -> dict[str, Any]:
    """Describe a message in one group."""
    row = failed_messages.get(state, group, ref)
    fields = (
        _in_partition(group, ref) | _failures(state, group, ref)
        if row is None
        else _failed(state, group, ref, row)
    )
    tp = TopicPartition(ref[0], ref[1])
    life: dict[str, Any] = {
        "group": group.name,
        "epoch": [epoch for start, epoch in all_epochs(state, group, tp) if start <= ref[2]][-1],
        "paused": group.is_stopped(tp),
        **fields,
    }
    if "plan" not in life and (plan := _last_plan(state, group, ref, visible_at)) is not None:
        life["plan"] = plan
    fence = group.fence(ref[0], key_hash)
    if fence is not None and (row is None or row.kind != FailedKind.ABANDONED):
        life["fence"] = {
            "state": FenceState(fence.state).name.lower(),
            "since": fence.since,
            "partition": fence.partition,
            "offset": fence.offset,
            "parked": fence.parked,
        }
    return life


def is_waiting(state: State, group: ConsumerGroup, ref: MessageRef) -> bool:
    """Return True if the group is not through with a message."""
    return (
        failed_messages.get(state, group, ref) is not None
        or _in_partition(group, ref)["state"] != SETTLED
    )


def _in_partition(group: ConsumerGroup, ref: MessageRef) -> dict[str, Any]:
    """Describe a message that has no row: it has never failed there, or it is over."""
    offset, position = ref[2], group.positions[TopicPartition(ref[0], ref[1])]
    if offset >= position.cursor:
        return {"state": "not delivered yet"}
    for held in position.leased.overlap(offset, offset + 1):
        return {"state": "leased", "attempt": held.value.attempt} | _lease(group, held.value.lease)
    for back in position.redeliver.overlap(offset, offset + 1):
        return {"state": "to be delivered again", "attempt": back.value.attempt}
    for reserved in position.reserved.overlap(offset, offset + 1):
        return {
            "state": "acked by an undecided transaction",
            "attempt": reserved.value.attempt,
            "consumer": reserved.value.member,
            "reserved_by": reserved.value.token.hex(),
        }
    return {"state": SETTLED}


def _failures(state: State, group: ConsumerGroup, ref: MessageRef) -> dict[str, Any]:
    """Describe the failures of a message that is no failed one any more: it was a dead
    letter.
    """
    history = attempts.get(state, group, ref)
    if not history.failures:
        return {}
    return {
        "failures": history.failures,
        "history": [attempt._asdict() for attempt in history.attempts],
    }


def _lease(group: ConsumerGroup, number: int) -> dict[str, Any]:
    lease = group.leases.get(number)
    if lease is None:
        return {}
    return {
        "consumer": lease.member,
        "leased_at": lease.granted_at,
        "deadline": lease.deadline,
    }


def _failed(
    state: State, group: ConsumerGroup, ref: MessageRef, row: FailedMessage
) -> dict[str, Any]:
    """Describe a message that has failed: a retry, a letter, at a consumer."""
    history = attempts.get(state, group, ref)
    kept = history.attempts
    if not kept and (row.first_failed_at or row.dead_at):
        kept = (attempts.attempt_of(row, row.died_at),)
    fields: dict[str, Any] = {
        "state": row_state(row),
        "attempt": row.attempt,
        "replays": row.replays,
        "due": row.due or None,
        "first_failed_at": row.first_failed_at or None,
        "dead_at": row.dead_at or None,
        "number": row.number or None,
        "reason": row.reason,
        "reserved_by": row.token.hex() or None,
        "given_by": row.given_by or None,
        "failures": history.failures or len(kept),
        "history": [attempt._asdict() for attempt in kept],
    }
    if row.edits:
        fields["edits"] = [
            {"number": number, "at": one.at, "by": one.by, "reason": one.reason}
            for number, one in letter_edits.versions(state, (group.group_id, *ref))
            if number != letter_edits.ORIGINAL
        ]
    if row.plan:
        fields["plan"] = _in_plan(state, ref, row.plan, row.visible_at)
    lease = group.leased_rows.get(ref)
    if lease is not None:
        fields |= {"state": "leased"} | _lease(group, lease)
    if row.store:
        store = group.stores.get(row.store)
        fields |= {
            "store": row.store.hex(),
            "consumer": row.consumer if store is None else store.member,
            "host": "" if store is None else store.host,
        }
    return fields


def last_plan(state: State, name: str, topic: str, partition: int, offset: int) -> str | None:
    """Return the name of the last plan that had a failed message of a group, also when
    it is through with it.
    """
    group = state.groups.by_name[name]
    ref, row = failures.find_message(state, group, topic, partition, offset)
    if ref is None or row is None:
        return None
    plan = _last_plan(state, group, ref, row.visible_at)
    return None if plan is None else str(plan["plan"])


def _last_plan(
    state: State, group: ConsumerGroup, ref: MessageRef, visible_at: int
) -> dict[str, Any] | None:
    """Describe a letter in the last plan that had it, as long as that is remembered: it
    was processed, or has died again and is a new letter.
    """
    for plan in sorted(state.plans.by_id.values(), key=_number, reverse=True):
        if plan.group_id == group.group_id:
            found = _in_plan(state, ref, plan.plan_id, visible_at)
            if found is not None:
                return found
    return None


def _number(plan: Plan) -> int:
    return plan.plan_id


def _in_plan(state: State, ref: MessageRef, plan_id: int, visible_at: int) -> dict[str, Any] | None:
    """Describe what became of a message in a replay plan."""
    plan = state.plans.by_id.get(plan_id)
    letter = plan_letters.get(state, plan_letters.key_of(plan_id, visible_at, ref))
    if plan is None or letter is None:
        return None
    return {
        "plan": plan.name,
        "state": plan.state.name.lower(),
        "by": plan.by,
        "started_at": plan.started_at or None,
        "outcome": LetterOutcome(letter.outcome).name.lower(),
        "why": letter.why,
    }
