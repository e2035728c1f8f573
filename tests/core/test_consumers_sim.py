"""Consumers by simulation: many seeds, each a run of hundreds of steps; and proof that
the checks have teeth.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.core.consumer_checks import moved_rows
from tests.core.consumer_sim import Sim, replayed_equals
from tests.core.driver import SECOND
from txmq.core import machine
from txmq.core.consumers import (
    circuit_breaker,
    delivery,
    failed_messages,
    failures,
    key_fences,
    leases,
    planning,
    poison,
)
from txmq.core.consumers.authorization import active
from txmq.core.consumers.candidates import Runs
from txmq.core.consumers.changes import Changes
from txmq.core.consumers.commands import Deliver
from txmq.core.consumers.failed_messages import Kind
from txmq.core.state.positions import Back, Position
from txmq.core.state.state import Outcome
from txmq.core.topics import growth
from txmq.core.transactions import actions as consumer_actions

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 400
SEEDS = 60
BUG_SEEDS = 150


def run(seed: int) -> Sim:
    sim = Sim(seed)
    for number in range(STEPS):
        try:
            sim.step()
            sim.check()
        except AssertionError as wrong:
            raise AssertionError(f"seed {seed}, step {number}: {wrong}") from wrong
    replayed_equals(sim)
    sim.drain()
    sim.check()
    return sim


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Floods end, and suspects are alone, in the time of a run."""
    monkeypatch.setattr(poison, "LOTS", (0, 2))
    monkeypatch.setattr(poison, "ALONE", 2)
    monkeypatch.setattr(circuit_breaker, "FIRST_PROBE", SECOND // 2)
    monkeypatch.setattr(circuit_breaker, "LONGEST_PROBE", 2 * SECOND)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_message_is_in_one_place_and_keys_stay_in_order(seed: int) -> None:
    run(seed)


def fence_of_the_partition_only(patch: pytest.MonkeyPatch) -> None:
    found = Changes.fenced

    def fenced(self: Changes, spotted: Any, key_hash: Any) -> bool:
        fence = self._group.fence(spotted[0], key_hash)
        return found(self, spotted, key_hash) and (fence is None or fence.partition == spotted[1])

    patch.setattr(Changes, "fenced", fenced)


def the_floor_passes_what_was_not_moved(patch: pytest.MonkeyPatch) -> None:
    put = failed_messages.put
    patch.setattr(
        failed_messages, "put", lambda *args: None if args[3].kind == Kind.PARKED else put(*args)
    )


def expiry_forgets_the_attempt(patch: pytest.MonkeyPatch) -> None:
    give_back = Position.give_back
    patch.setattr(
        Position,
        "give_back",
        lambda self, start, end, back: give_back(self, start, end, Back(1, back.deaths)),
    )


def every_death_counts(patch: pytest.MonkeyPatch) -> None:
    back = leases._back

    def blamed(state: Any, group: Any, spot: Any, piece: Any, *, died: bool) -> None:
        back(
            state,
            group,
            spot,
            piece._replace(value=piece.value._replace(attempt=piece.value.attempt + died)),
            died=died,
        )

    patch.setattr(leases, "_back", blamed)


def a_restart_counts(patch: pytest.MonkeyPatch) -> None:
    end = leases.end
    patch.setattr(leases, "end", lambda *args, **_: end(*args, died=True))


def deaths_do_not_survive_the_broker(patch: pytest.MonkeyPatch) -> None:
    load = Position.from_row

    def forgetful(row: Any) -> Position:
        position = load(row)
        for start, end, back in list(position.redeliver):
            position.redeliver.put(start, end, Back(back.attempt))
        return position

    patch.setattr(Position, "from_row", forgetful)


def no_look_at_the_generation(patch: pytest.MonkeyPatch) -> None:
    for module in (planning, delivery):
        patch.setattr(
            module,
            "current",
            lambda state, group, member, _generation: active(state, group, member),
        )


def the_chain_out_of_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(failed_messages, "first_parked", last_parked)


def last_parked(state: Any, group: Any, topic_id: int, key_hash: int) -> Any:
    found = [
        (m, row)
        for m, row in moved_rows(state, group).items()
        if (row.kind, row.key_hash) == (Kind.PARKED, key_hash)
    ]
    return max((item for item in found if item[0][0] == topic_id), default=None)


def no_hold_back_behind_older_leases(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(key_fences, "clear", lambda *_: True)


def no_wait_for_the_member_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(planning, "blocked", lambda *_: False)


def new_before_what_came_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(planning._Planner, "_given_back", lambda *_: True)
    patch.setattr(
        delivery._Draft,
        "_next_live",
        lambda _self, start, _spot, position: start == position.cursor,
    )


def a_head_is_forgotten_by_a_commit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(key_fences, "head_done", lambda *_: None)


def a_reboot_takes_reservations(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(consumer_actions, "_settle_ranges", lambda *_, **__: None)


def a_run_ends_behind_what_is_given_back(patch: pytest.MonkeyPatch) -> None:
    add = Runs.add

    def longer(self: Runs, base: int, first: int, _rows: int, entry: Any, **more: Any) -> None:
        add(self, base, first, entry.count - first, entry, **more)

    patch.setattr(Runs, "add", longer)


def growth_is_no_barrier(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(growth, "limit", lambda *_: None)


def a_count_is_lost_with_the_power(patch: pytest.MonkeyPatch) -> None:
    def decide(*args: Any) -> Any:
        outcome = delivery.decide_deliver(*args)
        return outcome._replace(early=True) if isinstance(outcome, Outcome) else outcome

    patch.setitem(machine.DECIDERS, Deliver, decide)


def a_flood_goes_through(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(circuit_breaker, "may_deliver", lambda *_: True)


def failures_in_a_flood_count(patch: pytest.MonkeyPatch) -> None:
    action = failures._action
    patch.setattr(
        failures, "_action", lambda group, command: action(replace(group, flood=None), command)
    )


@pytest.mark.parametrize(
    "bug",
    [
        a_run_ends_behind_what_is_given_back,
        growth_is_no_barrier,
        a_count_is_lost_with_the_power,
        a_flood_goes_through,
        failures_in_a_flood_count,
        fence_of_the_partition_only,
        the_floor_passes_what_was_not_moved,
        expiry_forgets_the_attempt,
        every_death_counts,
        a_restart_counts,
        deaths_do_not_survive_the_broker,
        no_look_at_the_generation,
        the_chain_out_of_order,
        no_hold_back_behind_older_leases,
        no_wait_for_the_member_before,
        new_before_what_came_back,
        a_head_is_forgotten_by_a_commit,
        a_reboot_takes_reservations,
    ],
)
def test_a_planted_bug_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    for seed in range(BUG_SEEDS):
        try:
            run(seed)
        except AssertionError:
            return
    pytest.fail("the simulation is blind to this bug")
