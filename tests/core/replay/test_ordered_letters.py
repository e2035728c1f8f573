"""Letters of an ordered group that plans put back in bulk: some are acked in part,
fail in the middle or are lost with their consumer. Each message is with one consumer at
a time, and no key overtakes itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.core.consumers.invariants import moved_rows
from tests.core.replay.world import PlansWorld
from txmq.core.consumers.commands import (
    AbandonLetters,
    ExpireLeases,
    LeaveGroup,
    NackMessage,
    ReplayLetters,
)
from txmq.core.consumers.key_fences import FailureChanges
from txmq.core.replay.cleanup import SweepPlan
from txmq.core.replay.orders import CancelPlan, DeletePlan, PausePlan, ResumePlan, StartPlan
from txmq.core.replay.putting_back import AdvancePlan
from txmq.core.state import put_back_queues
from txmq.core.state.failed_rows import FailedKind
from txmq.core.state.plans import PlanState
from txmq.core.state.put_back import PutBackQueue
from txmq.errors import RequestRejected
from txmq.model.retry import FailureReport
from txmq.model.units import MINUTE

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.state import State

TURNS = 600
SEEDS = 4


class OrderedWorld(PlansWorld):
    """One consumer of an ordered group, and operators with plans."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.known: dict[int, int | None] = {}  # the key of each offset
        self.held: list[int] = []
        self.over: set[int] = set()
        self.plans_made = 0
        self.enter()

    def enter(self) -> None:
        self.join("m", "a", group="o", mode="ordered")
        self.held = []

    def turn(self) -> None:
        acts = {
            self.produce: 2, self.get: 4, self.settle: 4, self.make: 1, self.go_on: 6,
            self.lose: 0.2, self.close: 0.1, self.sweep_plans: 1, self.order: 0.3,
        }  # fmt: skip
        [act] = self.random.choices([*acts], [*acts.values()])
        act()
        self.forget_returned()

    def forget_returned(self) -> None:
        """Forget what the consumer holds no more."""
        group = self.group("o")
        leased = {ref[2] for ref in group.leased_rows}
        for position in group.positions.values():
            leased.update(*(range(start, end) for start, end, _lease in position.leased))
        self.held = [at for at in self.held if at in leased]

    def produce(self) -> None:
        keys = self.random.choices((*range(16), None), k=self.random.randint(1, 8))
        base = self.state.topics["a"].end_offsets[0]
        self.publish("a", *keys, partition=0)
        self.known |= {base + row: key for row, key in enumerate(keys)}

    def get(self) -> None:
        got = self.fetch("m", "o", most=self.random.choice((1, 3, 1_000)))
        for at in [] if isinstance(got, RequestRejected) else [one.offset for one in got]:
            assert at not in self.over, "it was processed before"
            assert at not in self.held, "it is delivered twice"
            key = self.known[at]
            before = [one for one, other in self.known.items() if other == key and one < at]
            waits = [one for one in before if one not in self.over and one not in self.held]
            assert key is None or not waits, "its key overtakes itself"
            self.held.append(at)

    def settle(self) -> None:
        """Process some of what the consumer has; acks follow failures."""
        failing = self.random.choice((0.0, 0.5, 1.0, 1.0))
        some = sorted(self.held)[: self.random.choice((1, 3, 100))]
        failed, done = set[int | None](), list[int]()
        for at in some:
            key = self.known[at]
            if key is not None and key in failed:
                continue
            if self.random.random() < failing:
                failure = FailureReport("E", "text", "f")
                place = ("a", 0, at, key, None)
                generation = self.generation("o")
                assert self.do(NackMessage("o", "m", generation, *place, failure, dead=True))
                failed.add(key)
                self.held.remove(at)
            else:
                done.append(at)
        if done and not isinstance(self.ack_all(done), RequestRejected):
            self.over.update(done)
            self.held = [at for at in self.held if at not in done]

    def ack_all(self, done: list[int]) -> object:
        ranges: list[tuple[int, int]] = []
        for at in done:
            if ranges and ranges[-1][1] == at:
                ranges[-1] = (ranges[-1][0], at + 1)
            else:
                ranges.append((at, at + 1))
        return self.ack("m", *ranges, topic="a", group="o")

    def dead(self) -> list[tuple[str, int, int]]:
        rows = moved_rows(self.state, self.group("o"))
        return [("a", 0, ref[2]) for ref, row in rows.items() if row.kind == FailedKind.LETTER]

    def make(self) -> None:
        if dead := self.dead():
            self.plans_made += 1
            some = self.random.sample(dead, self.random.randint(1, len(dead)))
            self.create(f"p{self.plans_made}", *some, group="o")

    def go_on(self) -> None:
        for plan in list(self.state.plans.by_name.values()):
            if plan.state is PlanState.PLANNED:
                self.do(StartPlan(plan.name))
            self.do(AdvancePlan(plan.plan_id, self.random.choice((1, 4, 1_000))))

    def order(self) -> None:
        if self.state.plans.by_name:
            orders = (CancelPlan, PausePlan, ResumePlan, DeletePlan)
            self.do(self.random.choice(orders)(self.random.choice([*self.state.plans.by_name])))

    def sweep_plans(self) -> None:
        for plan in self.state.plans.by_id.values():
            self.do(SweepPlan(plan.plan_id))

    def lose(self) -> None:
        """Let the leases end, or the consumer leave."""
        if self.random.random() < 0.5:
            self.now += 2 * MINUTE
            self.do(ExpireLeases(self.now))
        else:
            self.do(LeaveGroup("o", "m", "m"))
        self.enter()

    def close(self) -> None:
        if dead := self.dead():
            one = self.random.choice(dead)
            if self.do(AbandonLetters("o", (one,), "no use")).done:
                self.over.add(one[2])

    def drain(self) -> None:
        """Process everything, letters too."""
        for name in list(self.state.plans.by_name):
            self.do(CancelPlan(name))
        self.lose()
        while len(self.over) < len(self.known):
            before = len(self.over)
            for one in self.dead():
                self.do(ReplayLetters("o", (one,)))
            self.get()
            assert not isinstance(self.ack_all(sorted(self.held)), RequestRejected)
            self.over.update(self.held)
            self.held = []
            assert len(self.over) > before, "nobody gets what is left"
        assert not self.group("o").fences


def run(seed: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the number of letters that went out together."""
    taken: list[int] = []
    take = put_back_queues.take

    def counted(state: State, group: ConsumerGroup, refs: list[MessageRef]) -> bool:
        whole = take(state, group, refs)
        if whole and len(refs) > 1:
            taken.append(len(refs))
        return whole

    with monkeypatch.context() as patch:
        patch.setattr(put_back_queues, "take", counted)
        world = OrderedWorld(seed)
        for _ in range(TURNS):
            world.turn()
        world.check_plans()
        world.drain()
    return sum(taken)


def test_letters_that_are_acked_in_part_keep_the_order_of_their_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert sum(run(seed, monkeypatch) for seed in range(SEEDS)) > 100


def neighbours_know_no_keys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FailureChanges, "dead_head", lambda *_: None)
    patch.setattr(FailureChanges, "put_back", lambda *_: None)


def a_queue_mixes_up_keys(patch: pytest.MonkeyPatch) -> None:
    keys_at = PutBackQueue._keys_at
    patch.setattr(PutBackQueue, "_keys_at", lambda *args: keys_at(*args)[::-1])


@pytest.mark.parametrize("bug", [neighbours_know_no_keys, a_queue_mixes_up_keys])
def test_a_planted_bug_of_ordered_letters_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    for seed in range(SEEDS):
        try:
            run(seed, monkeypatch)
        except AssertionError:
            return
    pytest.fail("the scene is blind to this bug")
