"""Simulated operators with replay plans, and a broker whose power is cut meanwhile."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from tests.core.consumers.simulator import STEPS, Sim
from tests.core.replay.invariants import check_plans
from txmq.core.consumers.commands import AlterGroup, ReplayLetters, RequestedSettings
from txmq.core.consumers.group_redrives import GiveLetters, GivenLetter
from txmq.core.consumers.letter_edits import EditLetter
from txmq.core.consumers.letter_exports import NoteExported
from txmq.core.consumers.letter_trials import TryLetter
from txmq.core.events.plans import (
    PlanFrozen,
    PlanLettersAbandoned,
    PlanLettersAdded,
    PlanMoved,
    PlanPutBack,
)
from txmq.core.replay.abandoning import AbandonNextLetters, AbandonPlan, LeavePlan
from txmq.core.replay.building import AddPlanLetters, FreezePlan, manifest_digest
from txmq.core.replay.cleanup import EndLostLetters, SweepPlan, TidyPlan, what_may_be_lost
from txmq.core.replay.orders import (
    CancelPlan,
    CreatePlan,
    DeletePlan,
    PausePlan,
    ResumePlan,
    StartPlan,
)
from txmq.core.replay.policies import FirePolicy, ReplayPolicy, SetPolicy, policies
from txmq.core.replay.putting_back import AdvancePlan
from txmq.core.state import failed_messages, plan_letters
from txmq.core.state.plans import FINISHED, LetterOutcome, Plan, PlanSettings, PlanState
from txmq.core.steps import run_to_end
from txmq.errors import RequestRejected

if TYPE_CHECKING:
    from tests.core.consumers.simulated_processes import Message
    from txmq.core.consumers.commands import TopicOffset
    from txmq.core.state.failed_rows import FailedMessage

PLANNING = STEPS | {
    "act": 150, "make_plan": 2, "set_policy": 0.5, "fire": 1, "build": 12, "go_on": 25,
    "order_plan": 9, "tidy_plans": 3, "sweep_plans": 3, "produce": 20, "operate": 0.4,
    "crash": 0.3, "reset": 0.7, "give": 2, "alter": 0.5, "end_lost": 1, "edit": 2, "export": 1,
    "try_one": 1, "abandon_plan": 2, "leave_plan": 2, "abandon_next": 10,
}  # fmt: skip


def is_auto(plan: Plan) -> bool:
    return plan.unfinished and plan.by.startswith("policy")


class PlanningSim(Sim):
    """A run with plans. Nobody waits for the broker's own steps, so that a power cut
    may take them back.
    """

    fates = (1, 8, 1)

    def __init__(self, seed: int) -> None:
        super().__init__(seed, PLANNING)
        self.plans_made = self.versions_made = 0
        self.given: Counter[tuple[str, Message, int]] = Counter()  # to a group, by operators
        self.seen: dict[tuple[int, Message], int] = {}  # outcomes that were looked at

    def do(self, command: object) -> Any:
        planned = self.planned(command.plan_id) if isinstance(command, AdvancePlan) else {}
        reply = super().do(command)
        if isinstance(command, AdvancePlan):
            for ref, outcome in self.planned(command.plan_id).items():
                if outcome == LetterOutcome.DELIVERED and planned[ref] == LetterOutcome.PLANNED:
                    name = self.state.plans.by_id[command.plan_id].group
                    self.ledgers[name].replayed(ref)
        return reply

    def planned(self, plan_id: int) -> dict[Message, int]:
        """Return the outcomes of a plan."""
        return {
            placed.ref: placed.letter.outcome
            for placed in plan_letters.letters_of(self.state, plan_id)
        }

    def do_unseen(self, command: object) -> Any:
        """Do a step of the broker's own, which is lost if the power is cut at once."""
        before = self.safe
        reply = self.do(command)
        if self.random.random() < 0.1:
            self.safe = before
            self.crash()
        return reply

    def letters(self, group: str) -> list[Message]:
        """Return the letters that operators may replay without a plan."""
        found = super().letters(group)
        if not found:
            return found
        return [ref for ref in found if self._holder(group, ref) is None]

    def _row(self, group: str, ref: Message) -> FailedMessage:
        row = failed_messages.get(self.state, self.group(group), ref)
        assert row is not None
        return row

    def _holder(self, group: str, ref: Message) -> Plan | None:
        return plan_letters.holder(self.state, self._row(group, ref).plan)

    def some_plan(self, *states: PlanState) -> Plan | None:
        found = [plan for plan in self.state.plans.by_name.values() if plan.state in states]
        return self.random.choice(found) if found else None

    def make_plan(self) -> None:
        """Let an operator begin a plan, also of letters that others have."""
        group = self.random.choice(self.names_of_groups())
        letters = super().letters(group)
        if not letters:
            return
        choice = self.random.choice
        settings = PlanSettings(
            0, 0, choice((0, 1, 2)), choice((False, True)), 0.5, choice((0, 1, 2)),
            choice((0, 1, 3)), start=choice((False, True)),
        )  # fmt: skip
        self.plans_made += 1
        self.do(CreatePlan(f"p{self.plans_made}", group, settings))

    def build(self) -> None:
        """Add letters to a plan that is being built, or freeze it."""
        plan = self.some_plan(PlanState.BUILDING)
        if plan is None:
            return
        if plan.complete:
            digest = run_to_end(manifest_digest(self.state, plan))
            self.do_unseen(FreezePlan(plan.plan_id, digest))
            return
        letters = super().letters(plan.group)
        some = self.random.sample(letters, min(len(letters), 3))
        places = tuple((self.topic_names[ref[0]], *ref[1:]) for ref in some)
        complete = self.random.random() < 0.5
        self.do_unseen(AddPlanLetters(plan.name, places, complete=complete))

    def go_on(self) -> None:
        """Let the broker's timer make a step of a plan, which may come too late."""
        late = (PlanState.PAUSED, PlanState.CANCELLED) if self.random.random() < 0.2 else ()
        plan = self.some_plan(PlanState.CANARY, PlanState.RAMPING, *late)
        if plan is not None:
            self.do_unseen(AdvancePlan(plan.plan_id, self.random.randint(1, 4)))

    def order_plan(self) -> None:
        """Let an operator order something, sensible or not."""
        plan = self.some_plan(*PlanState)
        orders = (StartPlan, StartPlan, PausePlan, ResumePlan, ResumePlan, CancelPlan, DeletePlan)
        if plan is not None:
            self.do(self.random.choice(orders)(plan.name, "ada"))

    def abandon_plan(self) -> None:
        """Let an operator order that a plan abandons its letters, sensible or not."""
        plan = self.some_plan(PlanState.PLANNED, *PlanState)
        if plan is not None:
            self.do(AbandonPlan(plan.name, "sent elsewhere", "ada"))

    def leave_plan(self) -> None:
        """Let a client take letters out of a plan, which it may not have."""
        plan = self.some_plan(*PlanState)
        letters = [] if plan is None else super().letters(plan.group)
        if plan is None or not letters:
            return
        some = self.random.sample(letters, min(len(letters), 2))
        places = tuple((self.topic_names[ref[0]], *ref[1:]) for ref in some)
        self.do(LeavePlan(plan.name, places, "not sent"))

    def abandon_next(self) -> None:
        """Let the broker's timer abandon letters of a plan, perhaps too late."""
        late = (PlanState.CANCELLED,) if self.random.random() < 0.2 else ()
        plan = self.some_plan(PlanState.ABANDONING, *late)
        if plan is None:
            return
        held, before = set(super().letters(plan.group)), self.planned(plan.plan_id)
        self.do_unseen(AbandonNextLetters(plan.plan_id))
        if plan.name not in self.state.plans.by_name:
            return  # the power was cut
        for ref, outcome in self.planned(plan.plan_id).items():
            if outcome == LetterOutcome.ENDED and before[ref] == LetterOutcome.PLANNED:
                assert ref in held, "it was abandoned, and was no dead letter"
                self.ledgers[plan.group].abandoned.add(ref)

    def set_policy(self) -> None:
        """Let an operator set a policy, or remove it."""
        settings = PlanSettings(0, 0, 1, stop_after=2, in_flight=2)
        policy = ReplayPolicy("{}", 1, on_version=True, max_replays=1, settings=settings)
        group = self.random.choice(self.names_of_groups())
        self.do(SetPolicy(group, policy if self.random.random() < 0.8 else None, "ada"))

    def fire(self) -> None:
        """Let the policies' timer find letters, or a member with another version."""
        version = self.random.choice(("", "", "1", "2", "3"))
        for group, _policy in list(policies(self.state)):
            self.do_unseen(FirePolicy(group.name, "{}", version))

    def give(self) -> None:
        """Let an operator give letters of one group to another, sensible or not."""
        source, to = self.random.choices(self.names_of_groups() or [""], k=2)
        letters = super().letters(source)
        if not letters:
            return
        some = self.random.sample(letters, min(len(letters), 3))
        rows = [(ref, self._row(source, ref)) for ref in some]
        given = tuple(
            GivenLetter((self.topic_names[ref[0]], *ref[1:]), row.number, row.edits)
            for ref, row in rows
        )
        abandon, again = self.random.random() < 0.3, self.random.random() < 0.2
        before = {ref: failed_messages.get(self.state, self.group(to), ref) for ref in some}
        reply = self.do(GiveLetters(source, to, given, abandon, again, "ada", "theirs"))
        if isinstance(reply, RequestRejected):
            return
        for topic, *place, _partition, _offset in reply.done:
            ref = (self.topic_ids[topic], place[0], place[1])
            assert before[ref] is None, "it was a failed message there"
            death = (to, ref, dict(rows)[ref].number)
            assert again or not self.given[death], "a death was given twice"
            self.given[death] += 1
            self.ledgers[to].done.discard(ref)
            self.ledgers[to].replayed(ref)
            if abandon:
                self.ledgers[source].abandoned.add(ref)

    def _open_letter(self) -> tuple[str, Message, TopicOffset] | None:
        """Return a letter, which may be in a plan: its group, itself, its place."""
        group = self.random.choice(self.names_of_groups() or [""])
        letters = super().letters(group)
        if not letters:
            return None
        ref = self.random.choice(letters)
        return group, ref, (self.topic_names[ref[0]], *ref[1:])

    def edit(self) -> None:
        """Let an operator edit a letter, or take its edits back."""
        if (found := self._open_letter()) is None:
            return
        group, ref, place = found
        edits = self._row(group, ref).edits
        self.versions_made += 1
        at = (1 << 40) + 100 * self.versions_made  # where no record of the log is
        version = None if edits and self.random.random() < 0.3 else (at, 10)
        original = None if edits else (at + 20, 10)
        self.do(EditLetter(group, place, edits, version, original, "ada", "wrong"))

    def export(self) -> None:
        """Let an operator note that a letter is in a file."""
        if (found := self._open_letter()) is not None:
            group, ref, place = found
            row = self._row(group, ref)
            self.do(NoteExported(group, ((*place, row.number, row.edits),), "ada"))

    def try_one(self) -> None:
        """Let an operator have a member try a letter, sensible or not."""
        if (found := self._open_letter()) is None:
            return
        group, ref, place = found
        member = self.random.choice([*sorted(self.group(group).members), "nobody"])
        if not isinstance(self.do(TryLetter(group, place, member, "ada")), RequestRejected):
            self.ledgers[group].replayed(ref)

    def alter(self) -> None:
        """Let an operator change what a group does with dead letters: the one that
        skips them parks their keys for a while.
        """
        for group in list(self.state.groups.by_name.values()):
            if group.name == "skip":
                wish = RequestedSettings(on_exhausted=self.random.choice(("park", "skip")))
                self.do(AlterGroup(group.name, wish))

    def operate(self) -> None:
        """Let an operator replay letters one by one; one behind another one is
        refused.
        """
        group = self.random.choice(self.names_of_groups())
        for ref in self.letters(group)[:2]:
            self.ledgers[group].replayed(ref)
            self.do(ReplayLetters(group, ((self.topic_names[ref[0]], *ref[1:]),)))

    def end_lost(self) -> None:
        """Let the broker's timer look for letters that nobody will get."""
        for plan in list(self.state.plans.by_name.values()):
            if what_may_be_lost(self.state, plan) is not None:
                self.do_unseen(EndLostLetters(plan.plan_id))

    def tidy_plans(self) -> None:
        for plan in list(self.state.plans.active.values()):
            if plan.state is PlanState.DELETED:
                self.do_unseen(TidyPlan(plan.plan_id))

    def sweep_plans(self) -> None:
        for plan in list(self.state.plans.by_id.values()):
            if plan.has_unswept:
                self.do_unseen(SweepPlan(plan.plan_id))

    def check(self) -> None:
        super().check()
        check_plans(self.state)
        own = Counter(plan.group_id for plan in self.state.plans.active.values() if is_auto(plan))
        assert not own or max(own.values()) == 1, "a policy has two unfinished plans"
        for plan in self.state.plans.by_name.values():
            group = self.state.groups.by_id.get(plan.group_id)
            for placed in plan_letters.letters_of(self.state, plan.plan_id):
                known, outcome = (plan.plan_id, placed.ref), placed.letter.outcome
                if self.seen.get(known) == outcome or group is None:
                    continue
                self.seen[known] = outcome
                if outcome == LetterOutcome.PROCESSED:
                    assert placed.ref in self.ledgers[group.name].done, "it was not processed"
                if outcome == LetterOutcome.DIED_AGAIN:
                    assert placed.letter.died_as > placed.letter.number
                    assert placed.ref in self.ledgers[group.name].was_letter

    def drain(self) -> None:
        for plan in list(self.state.plans.active.values()):
            self.do(CancelPlan(plan.name))
        super().drain()
        self.check_histories()

    def check_histories(self) -> None:
        """Check from the log alone: no plan has put a letter back twice, or after its
        end, and none has changed its letters after they were frozen.
        """
        cursors = Counter[int]()
        over, frozen = set[int](), set[int]()
        for event in self.events():
            if isinstance(event, PlanPutBack):
                assert event.plan_id not in over, "it put letters back after its end"
                cursor = int.from_bytes(event.cursor)
                assert cursor > cursors[event.plan_id], "a letter was put back twice"
                cursors[event.plan_id] = cursor
            elif isinstance(event, PlanLettersAbandoned):
                assert event.plan_id not in over, "it abandoned letters after its end"
                cursor = int.from_bytes(event.cursor)
                assert cursor > cursors[event.plan_id], "a letter was abandoned twice"
                cursors[event.plan_id] = cursor
            elif isinstance(event, PlanMoved) and event.state in (*FINISHED, PlanState.DELETED):
                over.add(event.plan_id)
            elif isinstance(event, PlanFrozen):
                frozen.add(event.plan_id)
            elif isinstance(event, PlanLettersAdded):
                assert event.plan_id not in frozen, "letters were added to a frozen plan"
