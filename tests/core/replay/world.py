"""A group with dead letters, and operators who replay them with plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.core.consumers.letters_world import LettersWorld, Place
from tests.core.replay.invariants import check_plans
from txmq.core.consumers.commands import NackMessage
from txmq.core.replay.building import AddPlanLetters, FreezePlan, manifest_digest
from txmq.core.replay.cleanup import TidyPlan
from txmq.core.replay.orders import CreatePlan, StartPlan
from txmq.core.replay.putting_back import AdvancePlan
from txmq.core.state import plan_letters
from txmq.core.state.failed_rows import FailedKind
from txmq.core.state.plan_letters import PlanLetter
from txmq.core.state.plans import LetterOutcome, Plan, PlanSettings, PlanState
from txmq.core.steps import run_to_end
from txmq.model.retry import FailureReport

if TYPE_CHECKING:
    from txmq.core.state.consumer_groups import MessageRef

AT_ONCE = PlanSettings(rate=0, ramp_s=0, in_flight=0, stop_after=0)


class PlansWorld(LettersWorld):
    """Letters in two topics, and plans of them."""

    def plan_of(self, name: str) -> Plan:
        return self.state.plans.by_name[name]

    def create(
        self,
        name: str,
        *places: Place,
        settings: PlanSettings = AT_ONCE,
        by: str = "ada",
        group: str = "g",
    ) -> Any:
        """Create a plan of these letters, and freeze it."""
        reply = self.do(CreatePlan(name, group, settings, by=by))
        self.do(AddPlanLetters(name, places))
        self.do(AddPlanLetters(name, (), complete=True))
        self.freeze(name)
        return reply

    def freeze(self, name: str) -> None:
        plan = self.plan_of(name)
        self.do(FreezePlan(plan.plan_id, run_to_end(manifest_digest(self.state, plan))))

    def run_plan(self, name: str, most: int = 1_000) -> None:
        """Start a plan if need be, and go on with it until it has to wait."""
        plan = self.plan_of(name)
        if plan.state is PlanState.PLANNED:
            self.do(StartPlan(name, "ada"))
        while self.do(AdvancePlan(plan.plan_id, most)).more:
            pass

    def tidy(self, plan_id: int) -> None:
        while self.do(TidyPlan(plan_id)).more:
            pass

    def outcomes(self, name: str) -> dict[str, int]:
        return counted(self.plan_of(name))

    def letters_of(self, name: str) -> dict[MessageRef, PlanLetter]:
        plan_id = self.plan_of(name).plan_id
        return {
            placed.ref: placed.letter for placed in plan_letters.letters_of(self.state, plan_id)
        }

    def open_places(self) -> list[Place]:
        """Return the open letters in the order of their publication."""
        rows = sorted(self.rows().items(), key=lambda item: (item[1].visible_at, item[0]))
        return [
            (self.state.topics_by_id[ref[0]].name, *ref[1:])
            for ref, row in rows
            if row.kind == FailedKind.LETTER and not row.token
        ]

    def letters(self, *keys: int | None, topic: str = "a") -> list[Place]:
        """Publish messages with these keys, and let them die."""
        before = {*self.open_places()}
        self.publish(topic, *keys)
        for got in self.fetch("m"):
            self.fail(got.topic, got.partition, got.offset, dead=True)
        return [place for place in self.open_places() if place not in before]

    def fail_as(self, offset: int, fingerprint: str, *, dead: bool = True) -> None:
        """Let a message of topic a fail with this fingerprint."""
        failure = FailureReport("E", "text", fingerprint)
        key = self.keys[1, 0, offset]
        self.do(NackMessage("g", "m", self.generation(), "a", 0, offset, key, None, failure, dead))

    def check_plans(self) -> None:
        check_plans(self.state)


def counted(plan: Plan) -> dict[str, int]:
    """Return the number of letters by the name of their outcome."""
    return {LetterOutcome(at).name.lower(): number for at, number in sorted(plan.counts.items())}
