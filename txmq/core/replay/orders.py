"""Replay plans: what operators order, and the life of a plan.

The background work is in modules of its own: `building` collects and freezes the
letters, `putting_back` and `abandoning` go through them, and `cleanup` removes what
they leave.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.core.consumers.authorization import find_group
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.events.plans import PlanApproved, PlanCreated, PlanMoved
from txmq.core.state.plans import FINISHED, RUNNING, Plan, PlanSettings, PlanState
from txmq.errors import BadRequest, Conflict, Throttled, UnknownPlan

if TYPE_CHECKING:
    from txmq.core.events.base import RecordContext
    from txmq.core.state.state import State

POLICY = "policy"  # author of the plans that policies make
MAX_UNFINISHED = 100  # of all groups: each has a share of the broker's timer
MAX_REASON = 256  # characters of why a plan, or a letter of it, is as it is
MAX_PLANS = 1_100  # with the finished ones, which the broker deletes in time


class CreatePlan(NamedTuple):
    """Create a plan. Repeating the call is fine.

    `selection` is JSON that the broker has checked; "" = the letters are added by
    AddPlanLetters.
    """

    name: str
    group: str
    settings: PlanSettings = PlanSettings()
    selection: str = ""
    by: str = ""


class ApprovePlan(NamedTuple):
    """Approve a plan that needs a second person."""

    name: str
    by: str


class StartPlan(NamedTuple):
    """Begin to put letters back."""

    name: str
    by: str = ""


class PausePlan(NamedTuple):
    """Put no more letters back until it is resumed."""

    name: str
    by: str = ""


class ResumePlan(NamedTuple):
    """Go on where the plan was paused."""

    name: str
    by: str = ""


class CancelPlan(NamedTuple):
    """End a plan. What was put back stays put back."""

    name: str
    by: str = ""


class DeletePlan(NamedTuple):
    """Forget a finished plan."""

    name: str
    by: str = ""


class PlanReply(NamedTuple):
    """The name and state of a plan."""

    name: str
    state: str


def find_plan(state: State, name: str) -> Plan:
    """Return the plan with this name."""
    plan = state.plans.by_name.get(name)
    if plan is None:
        raise UnknownPlan(f"there is no plan {name!r}", hint="see the plans: txmq plan list")
    return plan


def author(by: str) -> str:
    """Return the operator of an operator's note, which may end with a reason."""
    return by.partition(": ")[0]


def no_room(state: State) -> Throttled | None:
    """Return why there can be no other plan now."""
    if sum(plan.unfinished for plan in state.plans.active.values()) >= MAX_UNFINISHED:
        message = f"there are {MAX_UNFINISHED} unfinished plans"
        return Throttled(message, hint="let them end, or cancel some: txmq plan list")
    if len(state.plans.by_name) >= MAX_PLANS:
        message = f"there are {MAX_PLANS} plans"
        return Throttled(message, hint="delete finished ones: txmq plan delete")
    return None


def decide_create(state: State, command: CreatePlan, _now: int) -> Outcome:
    group = find_group(state, command.group)
    known = state.plans.by_name.get(command.name)
    if known is not None:
        same = (known.group_id, known.settings, known.selection, known.by) == (
            group.group_id,
            command.settings,
            command.selection,
            command.by,
        )
        if same:
            return Outcome(reply=_reply(known))
        message = f"there is a plan {command.name!r} already"
        raise Conflict(message, hint="choose another name: txmq plan list shows them")
    if (full := no_room(state)) is not None:
        raise full
    plan_id = state.plans.next_id
    created = PlanCreated(
        plan_id,
        command.name,
        group.group_id,
        command.settings,
        command.selection,
        command.by,
    )
    return Outcome((created,), PlanReply(command.name, PlanState.BUILDING.name.lower()))


def decide_approve(state: State, command: ApprovePlan, _now: int) -> Outcome:
    plan = find_plan(state, command.name)
    if not plan.unfinished or not plan.waits_for_approval:
        message = f"plan {plan.name!r} does not wait for an approval"
        raise Conflict(message, hint="see it: txmq plan show")
    if plan.state is PlanState.BUILDING:
        message = f"the letters of plan {plan.name!r} are not fixed yet"
        raise Conflict(message, hint="approve it once it is planned: txmq plan show")
    if author(command.by) in _authors(plan):
        message = f"plan {plan.name!r} is of {author(command.by)!r}, who cannot approve it"
        raise BadRequest(message, hint="somebody else has to: --operator NAME")
    approved = PlanApproved(plan.plan_id, command.by)
    if plan.state is PlanState.PLANNED and plan.settings.start:
        started = start_of(plan, command.by)
        return Outcome((approved, started), _reply(plan, started))
    return Outcome((approved,), _reply(plan))


def _authors(plan: Plan) -> set[str]:
    """Return who cannot approve a plan: nobody without a name, its author, and who has
    set the policy that made it.
    """
    by, _, rest = plan.by.partition(": ")
    return {"", by, author(rest)} if by == POLICY else {"", by}


def start_of(plan: Plan, by: str) -> PlanMoved:
    """Return the event that starts a plan."""
    first = PlanState.CANARY if plan.settings.canary else PlanState.RAMPING
    return PlanMoved(plan.plan_id, first, "", by)


def decide_start(state: State, command: StartPlan, _now: int) -> Outcome:
    plan = find_plan(state, command.name)
    if plan.state in RUNNING:
        return Outcome(reply=_reply(plan))
    if plan.state is not PlanState.PLANNED:
        raise refused(plan, "start", "a plan starts once, when it is frozen")
    if plan.waits_for_approval:
        message = f"plan {plan.name!r} is not approved"
        raise Conflict(message, hint="somebody else has to approve it: txmq plan approve")
    _refuse_held_back(state, plan, "start")
    return moves(plan, start_of(plan, command.by))


def decide_pause(state: State, command: PausePlan, _now: int) -> Outcome:
    plan = find_plan(state, command.name)
    if plan.state is PlanState.PAUSED:
        return Outcome(reply=_reply(plan))
    if plan.state not in RUNNING:
        raise refused(plan, "pause", "only a running plan can be paused")
    return moves(plan, pause_of(plan, "by an operator", command.by))


def pause_of(plan: Plan, why: str, by: str = "", resume_to: PlanState | None = None) -> PlanMoved:
    """Return the event that pauses a running plan."""
    return PlanMoved(plan.plan_id, PlanState.PAUSED, why, by, resume_to or plan.state)


def decide_resume(state: State, command: ResumePlan, _now: int) -> Outcome:
    plan = find_plan(state, command.name)
    if plan.state in RUNNING:
        return Outcome(reply=_reply(plan))
    if plan.state is not PlanState.PAUSED:
        begin = f"begin it: txmq plan start {plan.name}"
        planned = plan.state is PlanState.PLANNED
        raise refused(plan, "resume", begin if planned else "only a paused plan can be resumed")
    resumed = PlanMoved(plan.plan_id, plan.resume_to, "", command.by)
    _refuse_held_back(state, plan, "resume")
    return moves(plan, resumed)


def decide_cancel(state: State, command: CancelPlan, _now: int) -> Outcome:
    plan = find_plan(state, command.name)
    if plan.state is PlanState.CANCELLED:
        return Outcome(reply=_reply(plan))
    if not plan.unfinished:
        raise refused(plan, "cancel", "it has ended")
    return moves(plan, PlanMoved(plan.plan_id, PlanState.CANCELLED, "by an operator", command.by))


def decide_delete(state: State, command: DeletePlan, _now: int) -> Outcome:
    plan = find_plan(state, command.name)
    if plan.state not in FINISHED:
        raise refused(plan, "delete", "cancel it first: txmq plan cancel")
    return moves(plan, PlanMoved(plan.plan_id, PlanState.DELETED, "", command.by))


def _refuse_held_back(state: State, plan: Plan, what: str) -> None:
    """Refuse what the group's open circuit breaker would undo at once."""
    group = state.groups.by_id[plan.group_id]
    if group.breaker is None:
        return
    message = f"cannot {what} plan {plan.name!r}: the circuit breaker of its group is open"
    hint = f"remove the cause, then: txmq group resume {group.name}"
    raise Conflict(message, hint=hint)


def refused(plan: Plan, what: str, hint: str) -> Conflict:
    """Return the refusal of what a plan cannot do in its state."""
    return Conflict(f"cannot {what} plan {plan.name!r}: it is {state_name(plan)}", hint=hint)


def state_name(plan: Plan) -> str:
    """Return the name of a plan's state."""
    return plan.state.name.lower()


def moves(plan: Plan, moved: PlanMoved) -> Outcome:
    """Return the outcome of an order that brings a plan to another state."""
    return Outcome((moved,), _reply(plan, moved))


def _reply(plan: Plan, moved: PlanMoved | None = None) -> PlanReply:
    state = plan.state if moved is None else PlanState(moved.state)
    return PlanReply(plan.name, state.name.lower())


def apply_created(state: State, event: PlanCreated, context: RecordContext) -> None:
    group = state.groups.by_id[event.group_id]
    state.plans.add(
        Plan(
            event.plan_id,
            event.name,
            event.group_id,
            group.name,
            PlanSettings(*event.settings),
            event.selection,
            event.by,
            context.stored_at,
            changed_at=context.stored_at,
        )
    )


def apply_approved(state: State, event: PlanApproved, _context: RecordContext) -> None:
    plan = state.plans.by_id[event.plan_id]
    plan.approved_by = event.by
    state.plans.dirty.add(plan.plan_id)


def apply_moved(state: State, event: PlanMoved, context: RecordContext) -> None:
    plan, to = state.plans.by_id[event.plan_id], PlanState(event.state)
    if plan.state is PlanState.PLANNED and to in RUNNING:
        plan.started_at = context.stored_at
    if to in RUNNING:
        plan.recent = ()  # what was judged before is not judged again
    if event.resume_to:
        plan.resume_to = PlanState(event.resume_to)
    plan.why, plan.changed_at = event.why, context.stored_at
    state.plans.set_state(plan, to)


DECIDERS: Deciders = {
    CreatePlan: decide_create,
    ApprovePlan: decide_approve,
    StartPlan: decide_start,
    PausePlan: decide_pause,
    ResumePlan: decide_resume,
    CancelPlan: decide_cancel,
    DeletePlan: decide_delete,
}
APPLIERS: Appliers = {
    PlanCreated: apply_created,
    PlanApproved: apply_approved,
    PlanMoved: apply_moved,
}
