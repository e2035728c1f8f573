"""Control calls of replay plans."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from txmq.broker.calls import operators
from txmq.broker.calls.dispatcher import CallContext, Handler, then
from txmq.broker.calls.operators import audited, operator_note
from txmq.broker.calls.pages import Page, page_of
from txmq.broker.calls.plan_checks import PlanChecks
from txmq.broker.search.message_view import fit_entries
from txmq.core.replay import abandoning, building, views
from txmq.core.replay import orders as core
from txmq.core.replay.policies import ReplayPolicy, SetPolicy, policies, waits_for
from txmq.core.state.plans import Plan, PlanSettings
from txmq.errors import BadRequest, Conflict
from txmq.model.units import SECOND
from txmq.wire.calls.letters import SelectionArgs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from txmq.broker.background.plan_service import PlanService
    from txmq.broker.calls.letters import DeadLetterCalls
    from txmq.broker.engine.engine import Engine
    from txmq.core.steps import Steps
    from txmq.wire.calls import plans as wire
    from txmq.wire.calls.letters import SelectArgs


class PlanCalls:
    """Calls of operators about replay plans."""

    def __init__(self, engine: Engine, letters: DeadLetterCalls, service: PlanService) -> None:
        self._engine, self._letters, self._service = engine, letters, service
        self._state = engine.state
        self.handlers: dict[str, Handler] = {
            "plan.create": self.create,
            "plan.add": self.add,
            "plan.freeze": self.freeze,
            "plan.list": self.list_plans,
            "plan.show": self.show,
            "plan.letters": self.letters,
            "plan.check": self.check,
            "plan.approve": self.approve,
            "plan.start": partial(self._order, core.StartPlan),
            "plan.pause": partial(self._order, core.PausePlan),
            "plan.resume": partial(self._order, core.ResumePlan),
            "plan.cancel": partial(self._order, core.CancelPlan),
            "plan.abandon": self.abandon,
            "plan.leave": self.leave,
            "plan.delete": partial(self._order, core.DeletePlan),
            "policy.set": self.set_policy,
            "policy.list": self.list_policies,
        }

    def create(self, call: CallContext, args: wire.PlanCreate) -> None:
        chosen = self._open_letters(args, "plan") if args.selects else None
        selection = "" if chosen is None else _text(chosen)
        settings = PlanSettings(**args.settings.model_dump())
        if settings.second_approver and args.operator is None:
            raise _nameless("a plan that somebody else approves")
        note = operator_note(args)
        command = core.CreatePlan(args.name, args.group, settings, selection, note)
        self._act(call, args, command)

    def _open_letters(self, args: SelectArgs, what: str) -> SelectionArgs:
        """Return the selection of open letters that a plan or a policy is about."""
        chosen = self._letters.selection(args)
        if chosen.states != ("open",):
            message = f"a {what} of letters that are {', '.join(chosen.states)}"
            raise BadRequest(message, hint="only open letters can be replayed")
        return chosen

    def set_policy(self, call: CallContext, args: wire.PolicySet) -> None:
        chosen = self._open_letters(args, "policy")
        policy = None
        if args.after_s is not None or args.on_version:
            policy = ReplayPolicy(
                _text(chosen),
                round((args.after_s or 0) * SECOND),
                args.on_version,
                args.max_replays,
                PlanSettings(**args.settings.model_dump()),
            )
        command = SetPolicy(args.group, policy, operator_note(args))
        acted = audited(call.name, operators.group(args.group), args, command)
        self._engine.submit(acted, then(call.answer, lambda _reply: {}))

    def list_policies(self, call: CallContext, args: wire.PolicyList) -> dict[str, Any]:
        known = {group.name: policy for group, policy in policies(self._state)}
        page = page_of(known, args, "policies")
        described = (
            {
                "group": name,
                **self._describe_policy(known[name]),
                "waits_for": waits_for(self._state, self._state.groups.by_name[name]),
            }
            for name in page.names
        )
        found = list(fit_entries(described))
        return {"policies": found, "next": _following(page, found, "group")}

    def _describe_policy(self, policy: ReplayPolicy) -> dict[str, Any]:
        plan = self._state.plans.by_id.get(policy.plan_id)
        return {
            "after_s": policy.after_us / SECOND if policy.after_us else None,
            "on_version": policy.on_version,
            "max_replays": policy.max_replays,
            "select": json.loads(policy.selection),
            "settings": policy.settings._asdict(),
            "versions": policy.versions,
            "fired_at": policy.fired_at,
            "plan": None if plan is None else plan.name,
            "by": policy.by,
            "set_at": policy.set_at,
        }

    def add(self, call: CallContext, args: wire.PlanAdd) -> None:
        self._refuse_if_searching(args.name)
        command = building.AddPlanLetters(args.name, args.letters, numbers=args.numbers)
        self._engine.submit(command, then(call.answer, lambda reply: reply._asdict()))

    def freeze(self, call: CallContext, args: wire.PlanOrder) -> None:
        self._refuse_if_searching(args.name)
        command = building.AddPlanLetters(args.name, (), complete=True)
        self._act(call, args, command)

    def abandon(self, call: CallContext, args: wire.PlanAbandon) -> None:
        order = abandoning.AbandonPlan(args.name, args.reason, args.operator or "")
        self._act(call, args, order)

    def leave(self, call: CallContext, args: wire.PlanLeave) -> None:
        order = abandoning.LeavePlan(args.name, args.letters, args.reason)
        self._act(call, args, order)

    def _refuse_if_searching(self, name: str) -> None:
        """Refuse letters of clients, and a freeze by them: the broker finds the letters
        of a selection, and freezes them.
        """
        plan = self._state.plans.by_name.get(name)
        if plan is not None and plan.selection:
            message = f"plan {name!r} has the letters of a selection"
            raise Conflict(message, hint="make another plan, without a selection")

    def approve(self, call: CallContext, args: wire.PlanOrder) -> None:
        if args.operator is None:
            raise _nameless("an approval")
        self._order(core.ApprovePlan, call, args)

    def list_plans(self, call: CallContext, args: wire.PlanList) -> dict[str, Any]:
        known = self._state.plans.by_name
        page = page_of(known, args, "plans")
        found = list(fit_entries(self._describe(known[name]) for name in page.names))
        return {
            "plans": found,
            "next": _following(page, found, "name"),
            "deleting": len(self._state.plans.by_id) - len(known),
        }

    def show(self, call: CallContext, args: wire.PlanName) -> dict[str, Any]:
        found = views.describe_whole(self._state, args.name)
        found |= self._progress(self._state.plans.by_name[args.name])
        return found

    def _describe(self, plan: Plan) -> dict[str, Any]:
        return views.describe(self._state, plan) | self._progress(plan)

    def _progress(self, plan: Plan) -> dict[str, Any]:
        return self._service.progress(plan)

    def letters(self, call: CallContext, args: wire.PlanLetters) -> dict[str, Any]:
        after = bytes.fromhex(args.cursor or "")
        page = views.page(self._state, args.name, args.outcome, after, args.limit)
        following = None if page.following is None else page.following.hex()
        return {"letters": page.letters, "next": following}

    def check(self, call: CallContext, args: wire.PlanCheck) -> Steps[dict[str, Any]]:
        """Judge letters that are not put back yet, as of now."""
        checks = PlanChecks(self._state, self._letters)
        return checks.check(args)

    def _order(
        self, command: Callable[[str, str], object], call: CallContext, args: wire.PlanOrder
    ) -> None:
        self._act(call, args, command(args.name, operator_note(args)))

    def _act(
        self, call: CallContext, args: wire.PlanCreate | wire.PlanName, command: object
    ) -> None:
        """Submit an operator's command about a plan."""
        acted = audited(call.name, f"plan:{args.name}", args, command)
        self._engine.submit(acted, then(call.answer, lambda reply: reply._asdict()))


def _nameless(what: str) -> BadRequest:
    return BadRequest(f"{what} has to have an operator", hint="say who you are: --operator")


def _following(page: Page, found: Sequence[dict[str, Any]], name: str) -> str | None:
    """Return where the next page begins, behind what fits in a reply."""
    return page.following if len(found) == len(page.names) else found[-1][name]


def _text(chosen: SelectionArgs) -> str:
    return chosen.model_dump_json(exclude_defaults=True)
