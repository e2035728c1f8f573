"""Replay policies: plans of a group that begin by themselves.

A group has one at most. Its plans select letters, as those of operators do, and have
the policy's settings. A letter is replayed by policies so often at most: its replays
are counted in its row. The policy waits while one of its plans is unfinished, so that a
plan that has paused by itself is the last one until an operator has dealt with it.
"""

from __future__ import annotations

from itertools import chain, count
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.consumers import failures
from txmq.core.consumers.authorization import find_group
from txmq.core.consumers.key_fences import FailureChanges
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.events.plans import PlanCreated, PolicyPlanned, PolicySet, PolicyVersionSeen
from txmq.core.replay.orders import POLICY, CreatePlan, apply_created, decide_create, no_room
from txmq.core.state import failed_messages
from txmq.core.state.plans import Plan, PlanSettings
from txmq.errors import BadRequest
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from txmq.core.consumers.commands import TopicOffset
    from txmq.core.events.base import RecordContext
    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.state import State

KEPT_VERSIONS = 100  # of programs, that a policy remembers


class ReplayPolicy(NamedTuple):
    """A row of table `policies`.

    `selection` is JSON that the broker has checked. `after_us`: letters are replayed
    that have been dead for so long; 0 = at a new version only. `versions` are those of
    members' programs that the policy has seen, `plan_id` is its last plan. The row of a
    policy that was removed stays, with neither `after_us` nor `on_version`: its plan
    goes on, and the next policy waits for it.
    """

    selection: str
    after_us: int
    on_version: bool
    max_replays: int
    settings: PlanSettings
    by: str = ""
    set_at: int = 0
    fired_at: int = 0
    plan_id: int = 0
    versions: tuple[str, ...] = ()

    @property
    def stands(self) -> bool:
        """True unless it was removed."""
        return bool(self.after_us or self.on_version)


class SetPolicy(NamedTuple):
    """Set the policy of a group; None removes it."""

    group: str
    policy: ReplayPolicy | None
    by: str = ""


class FirePolicy(NamedTuple):
    """Make a plan of the policy's letters. `selection` is the policy's, as of now.

    `version`: a member has joined with it. The first one is only noted.
    """

    group: str
    selection: str
    version: str = ""


def policy_of(state: State, group: ConsumerGroup) -> ReplayPolicy | None:
    """Return the policy of a group."""
    policy = _stored(state, group.group_id)
    return policy if policy is not None and policy.stands else None


def _stored(state: State, group_id: int) -> ReplayPolicy | None:
    row: Any = state.tables[t.POLICIES].get(t.GROUP_KEY.pack(group_id))
    return None if row is None else _decode(row)


def policies(state: State) -> Iterator[tuple[ConsumerGroup, ReplayPolicy]]:
    """Yield the policies of all groups."""
    rows: Any = state.tables[t.POLICIES].range(b"")
    for key, row in rows:
        group = state.groups.by_id.get(t.GROUP_KEY.unpack(key)[0])
        if group is not None and (policy := _decode(row)).stands:
            yield group, policy


def _decode(row: Any) -> ReplayPolicy:  # noqa: ANN401  # rows are untyped
    policy = ReplayPolicy(*row)
    return policy._replace(settings=PlanSettings(*policy.settings))


def is_busy(state: State, group: ConsumerGroup) -> bool:
    """Return True while a plan of the group's policy is unfinished."""
    policy = policy_of(state, group)
    plan = None if policy is None else state.plans.by_id.get(policy.plan_id)
    return plan is not None and plan.unfinished


def waits_for(state: State, group: ConsumerGroup) -> str:
    """Return what the group's policy waits for, whatever letters there are; "" if for
    nothing.
    """
    if is_busy(state, group):
        return "the end of its last plan"
    if group.breaker is not None:  # it would pause the plan at once, and so the policy
        return "the group's circuit breaker, which is open"
    full = no_room(state)
    return "" if full is None else f"room for its plan: {full.message}; {full.hint}"


def replayable(
    state: State, group: ConsumerGroup, places: Iterable[TopicOffset], plan_id: int = 0
) -> list[TopicOffset]:
    """Return those of these letters that a plan could put back after those it has.

    The others are no longer open, are held, or wait for a dead letter of their key that
    is neither in the plan nor among those before them. A plan of such letters alone
    would put nothing back, and its policy would make the next one at once.
    """
    fences = FailureChanges(state, group, 0)
    found: dict[MessageRef, TopicOffset] = {}
    for place in places:
        ref, row = failures.find_message(state, group, *place)
        if ref is None or row is None:
            continue
        if failures.closed_reason(row) or failures.held_reason(state, row):
            continue
        head = fences.dead_head(ref, row.key_hash)
        if head is None or head in found or _is_planned(state, group, head, plan_id):
            found[ref] = place
    return list(found.values())


def _is_planned(state: State, group: ConsumerGroup, ref: MessageRef, plan_id: int) -> bool:
    row = failed_messages.get(state, group, ref)
    return row is not None and plan_id != 0 and row.plan == plan_id


def is_own(state: State, plan: Plan) -> bool:
    """Return True if a plan is the last one of its group's policy. Names tell nothing:
    an operator may have the name "policy".
    """
    group = state.groups.by_id.get(plan.group_id)
    policy = None if group is None else _stored(state, group.group_id)
    return policy is not None and policy.plan_id == plan.plan_id


def decide_set(state: State, command: SetPolicy, _now: int) -> Outcome:
    group = find_group(state, command.group)
    if group.parent or group.settings.mode == "broadcast":
        message = f"{group.name!r} is a broadcast group"
        raise BadRequest(message, hint="a policy is for a group whose members share messages")
    before = policy_of(state, group)
    if command.policy is None and before is None:
        message = f"group {group.name!r} has no replay policy"
        raise BadRequest(message, hint="see the policies: txmq policy list")
    row = () if command.policy is None else tuple(command.policy)
    return Outcome((PolicySet(group.group_id, row, command.by),))


def decide_fire(state: State, command: FirePolicy, now: int) -> Outcome:
    group = find_group(state, command.group)
    policy = policy_of(state, group)
    if policy is None or waits_for(state, group) or command.version in policy.versions:
        return Outcome()
    if command.version and not policy.versions:
        return Outcome((PolicyVersionSeen(group.group_id, command.version),))
    plan_id = state.plans.next_id
    settings = policy.settings._replace(start=True)
    name = _free_name(state, f"{group.name[:100]}-auto-{plan_id}")
    by = f"{POLICY}: {policy.by}" if policy.by else POLICY
    create = CreatePlan(name, group.name, settings, command.selection, by)
    created = decide_create(state, create, now)
    if not created.events:
        return created
    [plan] = created.events
    assert isinstance(plan, PlanCreated)
    return Outcome((PolicyPlanned(*plan, command.version),))  # one record, or there are two plans


def _free_name(state: State, name: str) -> str:
    """Return a name that no plan has: an operator may have taken this one."""
    names = chain((name,), (f"{name}-{number}" for number in count(2)))
    return next(one for one in names if one not in state.plans.by_name)


_REMOVED = ReplayPolicy("", 0, on_version=False, max_replays=0, settings=PlanSettings())


def apply_set(state: State, event: PolicySet, context: RecordContext) -> None:
    before = _stored(state, event.group_id)
    policy = _decode(event.policy) if event.policy else _REMOVED
    if before is not None:
        versions = before.versions if event.policy else ()
        policy = policy._replace(
            versions=versions, plan_id=before.plan_id, fired_at=before.fired_at
        )
    policy = policy._replace(by=event.by, set_at=context.stored_at)
    state.tables[t.POLICIES].put(t.GROUP_KEY.pack(event.group_id), _row(policy))


def apply_planned(state: State, event: PolicyPlanned, context: RecordContext) -> None:
    fields: Any = event[:-1]
    apply_created(state, PlanCreated(*fields), context)
    fired = {"plan_id": event.plan_id, "fired_at": context.stored_at}
    _change(state, event.group_id, event.version, **fired)


def apply_seen(state: State, event: PolicyVersionSeen, _context: RecordContext) -> None:
    _change(state, event.group_id, event.version)


def _change(state: State, group_id: int, version: str, **fired: int) -> None:
    policy = _stored(state, group_id)
    assert policy is not None, "it is there"
    if version:
        policy = policy._replace(versions=(*policy.versions, version)[-KEPT_VERSIONS:])
    row = _row(policy._replace(**fired))  # type: ignore[arg-type]  # numbers
    state.tables[t.POLICIES].put(t.GROUP_KEY.pack(group_id), row)


def _row(policy: ReplayPolicy) -> tuple[Any, ...]:
    return tuple(policy._replace(settings=tuple(policy.settings)))  # type: ignore[arg-type]  # on disk


DECIDERS: Deciders = {SetPolicy: decide_set, FirePolicy: decide_fire}
APPLIERS: Appliers = {
    PolicySet: apply_set,
    PolicyPlanned: apply_planned,
    PolicyVersionSeen: apply_seen,
}
