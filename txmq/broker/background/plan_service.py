"""Background work on replay plans: letters are collected, counted in a digest, and put
back at each plan's rate.

Rates are kept here, not in the log: after a start of the broker, or a pause, the ramp
begins again.
"""

from __future__ import annotations

from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any

from txmq.broker.background.paced_steps import PacedSteps
from txmq.broker.background.plan_pace import PlanPace
from txmq.core.replay import building, cleanup, putting_back
from txmq.core.replay.abandoning import AbandonNextLetters
from txmq.core.replay.building import AddPlanLetters, FreezePlan
from txmq.core.replay.cleanup import EndLostLetters, LostReply, SweepPlan, TidyPlan
from txmq.core.replay.orders import DeletePlan, StartPlan
from txmq.core.replay.policies import is_own, replayable
from txmq.core.replay.putting_back import AdvancePlan, AdvanceReply
from txmq.core.state.plans import FINISHED, RUNNING, LetterOutcome, Plan, PlanState
from txmq.crashpoints import crashpoint
from txmq.errors import RequestRejected
from txmq.model.units import DAY
from txmq.wire.calls.letters import DlqReplay, SelectionArgs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from txmq.broker.engine.engine import Engine
    from txmq.broker.engine.turn_work import TurnWork
    from txmq.broker.reactor.interfaces import Clock
    from txmq.core.consumers.commands import TopicOffset
    from txmq.core.steps import Steps

REST_S = 1.0  # after a step that was refused
KEEP_FINISHED = 30 * DAY
MAX_FINISHED = 1_000
ADDED_AT_ONCE = 250  # letters, so that no record takes long
SEARCHED_PER_S = 10_000  # letters that the search for lost ones reads, on the average
STEPS = 32  # of a plan that abandons letters, of which only the last one is waited for
UNSWEPT = 1_500  # chunks of processed letters that may wait while their plan runs


class PlanService:
    """Makes the steps of all plans. All methods belong to the reactor's thread."""

    def __init__(
        self,
        engine: Engine,
        turns: TurnWork,
        clock: Clock,
        next_places: Callable[[DlqReplay, int], Steps[dict[str, Any]]],
    ) -> None:
        """`next_places` finds the next letters of a selection, at most so many."""
        self._engine, self._turns, self._clock = engine, turns, clock
        self._next_places = next_places
        # False = rows that are not on disk yet fill enough memory
        self.has_room: Callable[[], bool] = lambda: True
        self._plans = engine.state.plans
        self._stopped = False
        self._busy: set[int] = set()  # plans with a step under way
        self._paces: dict[int, PlanPace] = {}
        self._paced = PacedSteps(engine, clock)  # those that abandon letters, and sweep these
        self._resting_until: dict[int, float] = {}  # of each plan
        # of each plan, what the last search for lost letters depended on, and when the
        # next one may be
        self._searched: dict[int, tuple[tuple[int, ...], float]] = {}
        self._sweeping: set[int] = set()  # plans whose processed letters are being swept
        self._counts: dict[int, dict[int, int]] = {}  # of each plan, when it was looked at

    def tick(self) -> None:
        """Timer: begin a step of each plan that has something to do."""
        for plan in list(self._plans.active.values()):
            rests = self._now() < self._resting_until.get(plan.plan_id, 0.0)
            if plan.plan_id not in self._busy and not rests:
                self._resting_until.pop(plan.plan_id, None)
                self._begin(plan)
        for plan in self._plans.by_id.values():
            waits = plan.plan_id in self._sweeping or self._ends(plan) or not self.has_room()
            if plan.has_unswept and not waits:
                self._sweep(plan)
        running = {plan.plan_id for plan in self._plans.active.values() if plan.state in RUNNING}
        for plan_id in self._paces.keys() - running:
            del self._paces[plan_id]

    def stop(self) -> None:
        """Make no further step; the next start continues."""
        self._stopped = True
        self._paced.stop()

    def progress(self, plan: Plan) -> dict[str, Any]:
        """Return how far a plan is, its rate of now in letters per second, and when the
        last letter will be put back. That is not known of a canary, because somebody
        may stop the plan there.
        """
        left = plan.count(LetterOutcome.PLANNED)
        settled = plan.letters - left - plan.count(LetterOutcome.DELIVERED)
        pace = self._paces.get(plan.plan_id) if plan.state in RUNNING else None
        eta = None
        if pace is not None and plan.state is PlanState.RAMPING:
            by_outcomes = putting_back.room(plan) < min(left, putting_back.STEP_LETTERS)
            eta = pace.seconds_for(left, self._now(), by_outcomes=by_outcomes)
            eta = None if eta is None or not isfinite(eta) else eta
        return {
            "progress": settled / plan.letters if plan.letters else 1.0,
            "rate_now": 0.0 if pace is None else round(pace.rate(self._now()), 3),
            "eta_s": None if eta is None else round(eta, 1),
        }

    def end_lost(self) -> None:
        """Timer: end letters that were put back, and that nobody will get. Those of
        cancelled plans have their outcomes, too.
        """
        known, self._searched, before = self._searched, {}, self._counts
        self._counts = {}
        for plan in list(self._plans.by_name.values()):
            why = cleanup.what_may_be_lost(self._engine.state, plan)
            if why is None:
                continue
            self._counts[plan.plan_id] = plan.counts.copy()
            last, pause_until = known.get(plan.plan_id, ((), 0.0))
            if last:
                self._searched[plan.plan_id] = last, pause_until
            stands = before.get(plan.plan_id) == plan.counts and plan.plan_id not in self._busy
            if stands and why != last and self._now() >= pause_until:
                then = partial(self._ended_lost, why=why)
                self._submit(plan, EndLostLetters(plan.plan_id), then)

    def _ended_lost(self, plan: Plan, reply: object, why: tuple[int, ...]) -> None:
        if not isinstance(reply, LostReply):
            return
        if reply.following is None:
            pause = plan.letters / SEARCHED_PER_S
            self._searched[plan.plan_id] = why, self._now() + pause
        else:
            then = partial(self._ended_lost, why=why)
            self._submit(plan, EndLostLetters(plan.plan_id, reply.following), then)

    def forget_old(self) -> None:
        """Timer: delete plans that ended long ago, and the oldest where there are too
        many.
        """
        finished = [plan for plan in self._plans.by_name.values() if plan.state in FINISHED]
        finished.sort(key=lambda plan: plan.changed_at)
        old = self._engine.certain() - KEEP_FINISHED
        surplus = len(finished) - MAX_FINISHED
        for number, plan in enumerate(finished):
            if number < surplus or plan.changed_at < old:
                self._engine.submit(DeletePlan(plan.name, "the broker: old"))

    def _now(self) -> float:
        return self._clock.seconds()

    def _begin(self, plan: Plan) -> None:
        if not self.has_room():
            return  # until a later tick
        if plan.state is PlanState.DELETED:
            self._submit(plan, TidyPlan(plan.plan_id), self._tidied)
        elif plan.state is PlanState.BUILDING and plan.complete:
            self._run(plan, building.manifest_digest(self._engine.state, plan), self._freeze)
        elif plan.state is PlanState.BUILDING and plan.selection:
            self._run(plan, self._next_places(_search(plan), ADDED_AT_ONCE), self._found)
        elif plan.state in RUNNING:
            self._advance(plan)
        elif plan.state is PlanState.ABANDONING:
            self._submit(plan, AbandonNextLetters(plan.plan_id), self._abandoned)
        elif building.is_to_start(self._engine.state, plan):
            self._submit(plan, StartPlan(plan.name, plan.by), _ignore_start)

    def _advance(self, plan: Plan) -> None:
        pace = self._paces.get(plan.plan_id)
        if pace is None or pace.state is not plan.state:
            pace = self._paces[plan.plan_id] = PlanPace(plan, self._now())
        pace.measure(self._now())
        most = pace.allowed(self._now())
        if putting_back.next_move(self._engine.state, plan) is None and (
            most <= 0 or putting_back.room(plan) <= 0
        ):
            return
        then = partial(self._advanced, before=plan.state)
        self._submit(plan, AdvancePlan(plan.plan_id, most), then)

    def _submit(self, plan: Plan, command: object, then: Callable[[Plan, Any], None]) -> None:
        if self._stopped:
            return
        self._busy.add(plan.plan_id)
        self._engine.submit(command, partial(self._done, plan, then))

    def _run(self, plan: Plan, steps: Steps[Any], then: Callable[[Plan, Any], None]) -> None:
        if self._stopped:
            return
        self._busy.add(plan.plan_id)
        self._turns.run(self, self._freed(plan, steps), partial(self._done, plan, then))

    def _freed(self, plan: Plan, steps: Steps[Any]) -> Steps[Any]:
        """Make steps after which the plan is tried again, if they fail: a disk may have
        been away for a moment.
        """
        try:
            return (yield from steps)
        except Exception:
            self._busy.discard(plan.plan_id)
            self._rest(plan)
            raise

    def _done(self, plan: Plan, then: Callable[[Plan, Any], None], reply: object) -> None:
        self._busy.discard(plan.plan_id)
        if isinstance(reply, RequestRejected):  # the disk is full, for example
            self._rest(plan)
        then(plan, reply)

    def _rest(self, plan: Plan) -> None:
        """Try this plan again after a while; the others go on."""
        self._resting_until[plan.plan_id] = self._now() + REST_S

    def _found(self, plan: Plan, page: dict[str, Any] | RequestRejected) -> None:
        """Add the letters that the search has found."""
        if isinstance(page, RequestRejected):  # its topic was deleted meanwhile
            page = {"letters": (), "damaged": (), "next": None}
        crashpoint("plan.before_add")
        letters = page["letters"]
        complete = page["next"] is None
        if plan.settings.most:
            letters, is_full = self._bounded(plan, letters)
            complete = complete or is_full
        scan = "" if complete else page["next"]
        command = AddPlanLetters(plan.name, letters, tuple(page["damaged"]), scan, complete)
        self._submit(plan, command, self._added)

    def _bounded(
        self, plan: Plan, letters: Sequence[TopicOffset]
    ) -> tuple[Sequence[TopicOffset], bool]:
        """Return what is left of these letters for the plan, and whether there are
        more.

        Letters that wait take no places in the plan of a policy: later ones would
        wait with them.
        """
        state = self._engine.state
        if is_own(state, plan):
            group = state.groups.by_id[plan.group_id]
            letters = replayable(state, group, letters, plan.plan_id)
        room = max(plan.settings.most - plan.letters, 0)
        return letters[:room], len(letters) > room

    def _added(self, plan: Plan, reply: object) -> None:
        crashpoint("plan.after_add")
        if not isinstance(reply, RequestRejected) and plan.state is PlanState.BUILDING:
            self._begin(plan)

    def _freeze(self, plan: Plan, digest: str) -> None:
        crashpoint("plan.before_freeze")
        self._submit(plan, FreezePlan(plan.plan_id, digest), self._frozen)

    def _frozen(self, _plan: Plan, _reply: object) -> None:
        crashpoint("plan.after_freeze")

    def _advanced(self, plan: Plan, reply: object, before: PlanState) -> None:
        """Go on at once where the rate allows it; requests come in between."""
        if not isinstance(reply, AdvanceReply):
            return
        pace = self._paces.get(plan.plan_id)
        if pace is not None:
            pace.take(reply.letters)
        if reply.letters:
            crashpoint("plan.after_step")
        if before is PlanState.CANARY and plan.state is PlanState.RAMPING:
            crashpoint("plan.after_canary")
        if plan.state is PlanState.DONE:
            crashpoint("plan.after_end")
        waits = reply.letters and pace is not None and not pace.goes_on(self._now())
        if reply.more and not waits and plan.plan_id in self._plans.active:
            self._begin(plan)

    def _abandoned(self, plan: Plan, reply: object) -> None:
        crashpoint("plan.after_abandon")
        if isinstance(reply, AdvanceReply) and reply.more:
            self._busy.add(plan.plan_id)
            self._paced.add(partial(self._go_on, plan))

    def _go_on(self, plan: Plan, steps: int = STEPS) -> None:
        """Abandon more letters in several steps, and wait for the last one."""
        self._busy.add(plan.plan_id)
        if steps and not self._stopped and self.has_room():
            before = plan.cursor
            self._engine.submit(AbandonNextLetters(plan.plan_id))
            if plan.cursor != before:
                self._paced.add(partial(self._go_on, plan, steps - 1))
                return
        self._busy.discard(plan.plan_id)
        if plan.plan_id in self._plans.active:
            self._begin(plan)

    def _ends(self, plan: Plan) -> bool:
        """Return True while the last outcome of a plan is on its way to its state."""
        return plan.plan_id in self._busy and not plan.count(LetterOutcome.DELIVERED)

    def _sweep(self, plan: Plan) -> None:
        if self._stopped:
            return
        self._sweeping.add(plan.plan_id)
        swept = partial(self._swept, plan)
        sweep = partial(self._engine.submit, SweepPlan(plan.plan_id), swept)
        if plan.unswept:
            sweep()
        else:  # abandoned letters, which take longer
            self._paced.add(sweep)

    def _swept(self, plan: Plan, reply: object) -> None:
        """Go on at once where nobody waits for letters of the plan, or much is left:
        what is processed next comes first.
        """
        self._sweeping.discard(plan.plan_id)
        if not isinstance(reply, AdvanceReply):
            return
        crashpoint("plan.after_sweep")
        busy = plan.count(LetterOutcome.DELIVERED) and len(plan.unswept) < UNSWEPT
        if reply.more and not busy and self.has_room():
            self._sweep(plan)

    def _tidied(self, plan: Plan, reply: object) -> None:
        crashpoint("plan.after_tidy")
        if isinstance(reply, AdvanceReply) and plan.plan_id in self._plans.active:
            self._begin(plan)


def _search(plan: Plan) -> DlqReplay:
    select = SelectionArgs.model_validate_json(plan.selection)
    return DlqReplay(group=plan.group, select=select, cursor=plan.scan or None)


def _ignore_start(plan: Plan, reply: object) -> None:
    """The next tick goes on with the plan."""
