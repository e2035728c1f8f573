"""A simulated operator who replays dead letters by plans, or has policies make them.
The broker carries them out over power cuts.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from tests.core.replay.invariants import check_plans
from tests.simulation import letter_mender, operators
from tests.simulation.history import InvariantBroken
from txmq.core.state.plans import LetterOutcome
from txmq.errors import BadRequest, Conflict, UnknownGroup, UnknownPlan

if TYPE_CHECKING:
    from tests.simulation.world import SimulatedWorld

SHARE = 0.3  # of the seeds in which nobody edits letters
ORDERS = ("pause", "resume", "resume", "cancel", "start")
POLICY_SHARE = 0.3  # of the groups
NOT_NOW = (BadRequest, Conflict, UnknownGroup, UnknownPlan)


def is_at_work(seed: int) -> bool:
    """Return whether letters are replayed by plans."""
    return not letter_mender.is_at_work(seed) and Random(seed + 0.8125).random() < SHARE


class PlanOperator(operators.LetterReplayer):
    """Make plans, one after the other, and order this and that while they run."""

    def __init__(self, world: SimulatedWorld, name: str, seed: int) -> None:
        super().__init__(world, name)
        self._own = Random(seed + 0.875)  # seeds without plans draw the same numbers
        self._made = 0
        groups = letter_mender.GROUPS
        self._policies = {name for name in groups if self._own.random() < POLICY_SHARE}

    async def _replay(self, group: str) -> None:
        found = (await self.connection.call("plan.list"))["plans"]
        mine = [plan for plan in found if plan["group"] == group]
        running = [plan for plan in mine if plan["state"] not in ("done", "cancelled")]
        if sum(plan["by"].startswith("policy: ") for plan in running) > 1:
            raise InvariantBroken(f"a policy of {group} has two unfinished plans")
        try:
            for plan in running:
                await self._order(plan)
            if group in self._policies and not self._in_doubt():
                await self._set_policy(group)
            elif not running or self._own.random() < 0.1:  # two may select the same letters
                await self._make(group)
        except NOT_NOW:
            return  # it went to another state, or its group was deleted meanwhile

    async def _make(self, group: str) -> None:
        letters = (await self.connection.call("dlq.list", group=group))["letters"]
        count = sum(letter["state"] == "dead" for letter in letters)
        if not count:
            return
        choice = self._own.choice
        settings: dict[str, Any] = {
            "rate": choice((0, 50)), "ramp_s": 0.2, "canary": choice((0, 1)),
            "in_flight": choice((0, 2)), "stop_after": choice((0, 2)), "start": True,
        }  # fmt: skip
        # a repetition after a lost reply has the same name, and is another plan's then
        self._made += 1
        name = f"plan-{self._made}"
        await self.connection.call(
            "plan.create", name=name, group=group, select={}, settings=settings, operator="sim"
        )
        self.world.history.counts["letters"] += count
        self.world.history.counts["plans"] += 1

    def _in_doubt(self) -> bool:
        """Return True while policies wait for somebody to confirm the clock."""
        return self.world.broker is not None and self.world.broker.engine.state.doubted > 0

    async def _set_policy(self, group: str) -> None:
        """Set the policy of a group, or remove it for a moment."""
        known = (await self.connection.call("policy.list"))["policies"]
        there = any(policy["group"] == group for policy in known)
        if there and self._own.random() < 0.9:
            return
        terms = {} if there else {"after_s": 1, "max_replays": 1_000}
        settings = {"rate": 0, "ramp_s": 0, "stop_after": self._own.choice((0, 2))}
        await self.connection.call(
            "policy.set", group=group, **terms, settings=settings, operator="sim"
        )

    async def _order(self, plan: dict[str, Any]) -> None:
        what = self._own.choice(ORDERS) if self._own.random() < 0.2 else ""
        if plan["state"] == "paused" and self._own.random() < 0.5:
            what = "resume"
        if what:
            await self.connection.call(f"plan.{what}", name=plan["name"], operator="sim")


def check(world: SimulatedWorld) -> None:
    """Check at the end, when all letters are processed, that each of a plan has its
    outcome.
    """
    assert world.broker is not None
    state = world.broker.engine.state
    check_plans(state)
    for plan in state.plans.by_name.values():
        by_policy = plan.by.startswith("policy: ")
        world.history.counts["planned by policies"] += by_policy * plan.letters
        world.history.counts["planned processed"] += plan.count(LetterOutcome.PROCESSED)
        world.history.counts["planned died again"] += plan.count(LetterOutcome.DIED_AGAIN)
        if plan.count(LetterOutcome.DELIVERED):
            raise InvariantBroken(f"letters of a plan have no outcome: {plan}")
