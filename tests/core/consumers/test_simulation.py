"""Simulation of consumers: many seeds with hundreds of steps each, and planted bugs.

The planted bugs prove that the checks find faults.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.core.consumers.invariants import moved_rows
from tests.core.consumers.simulator import FLAPPING, TOUCHED, Sim, run_steps, shorten_pauses
from tests.core.consumers.simulator import STEPS as STEPS_OF_ALL
from txmq.core import machine
from txmq.core.consumers import (
    circuit_breaker,
    delivery,
    failures,
    fetch_choice,
    key_fences,
    leases,
    retries,
    store_reports,
)
from txmq.core.consumers.authorization import find_member
from txmq.core.consumers.candidates import RunBuilder
from txmq.core.consumers.commands import Deliver
from txmq.core.consumers.key_fences import FailureChanges
from txmq.core.events.outcome import Outcome
from txmq.core.state import failed_changes, failed_messages, local_stores
from txmq.core.state.consumer_groups import FenceState
from txmq.core.state.failed_rows import FailedKind, Move
from txmq.core.state.positions import GroupPosition, Redelivery
from txmq.core.topics import topics
from txmq.core.transactions import actions as consumer_actions

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 400
SEEDS = 60
BUG_SEEDS = 150
FLAPPING_SEEDS = 20
# Of bugs whose scene is rare: seeds that soon find them. Where a change of the
# simulator moves a scene, the next seeds find it, and the test takes longer.
FIRST_SEEDS = {
    "no_hold_back_behind_older_leases": 140,
    "a_run_ends_behind_what_is_given_back": 10,
    "growth_is_no_barrier": 22,
    "a_count_is_lost_with_the_power": 23,
    "failures_in_a_flood_count": 13,
    "deaths_do_not_survive_the_broker": 4,
    "the_chain_out_of_order": 3,
    "no_wait_for_the_member_before": 26,
}


def run(seed: int, weights: dict[str, float] = STEPS_OF_ALL) -> Sim:
    sim = Sim(seed, weights)
    run_steps(sim, seed, STEPS)
    sim.drain()
    sim.check()
    return sim


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_pauses(monkeypatch)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_message_is_in_one_place_and_keys_stay_in_order(seed: int) -> None:
    run(seed)


def fence_of_the_partition_only(patch: pytest.MonkeyPatch) -> None:
    found = FailureChanges.is_fenced

    def fenced(self: FailureChanges, ref: Any, key_hash: Any) -> bool:
        fence = self._group.fence(ref[0], key_hash)
        return found(self, ref, key_hash) and (fence is None or fence.partition == ref[1])

    patch.setattr(FailureChanges, "is_fenced", fenced)


def the_floor_passes_what_was_not_moved(patch: pytest.MonkeyPatch) -> None:
    put = failed_changes.put
    patch.setattr(
        failed_changes,
        "put",
        lambda *args: None if args[3].kind == FailedKind.PARKED else put(*args),
    )


def expiry_forgets_the_attempt(patch: pytest.MonkeyPatch) -> None:
    give_back = GroupPosition.redeliver_range
    patch.setattr(
        GroupPosition,
        "redeliver_range",
        lambda self, start, end, back: give_back(self, start, end, Redelivery(1, back.deaths)),
    )


def every_death_counts(patch: pytest.MonkeyPatch) -> None:
    back = leases._redeliver

    def blamed(state: Any, group: Any, tp: Any, piece: Any, *, died: bool) -> None:
        back(
            state,
            group,
            tp,
            piece._replace(value=piece.value._replace(attempt=piece.value.attempt + died)),
            died=died,
        )

    patch.setattr(leases, "_redeliver", blamed)


def a_restart_counts(patch: pytest.MonkeyPatch) -> None:
    end = leases.end
    patch.setattr(leases, "end", lambda *args, **_: end(*args, died=True))


def deaths_do_not_survive_the_broker(patch: pytest.MonkeyPatch) -> None:
    load = GroupPosition.from_row

    def forgetful(row: Any) -> GroupPosition:
        position = load(row)
        for start, end, back in list(position.redeliver):
            position.redeliver.put(start, end, Redelivery(back.attempt))
        return position

    patch.setattr(GroupPosition, "from_row", forgetful)


def no_look_at_the_generation(patch: pytest.MonkeyPatch) -> None:
    for module in (fetch_choice, delivery):
        patch.setattr(
            module,
            "find_current_member",
            lambda state, group, member, _generation: find_member(state, group, member),
        )


def the_chain_out_of_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(failed_messages, "first_parked", last_parked)


def last_parked(state: Any, group: Any, topic_id: int, key_hash: int) -> Any:
    found = [
        (m, row)
        for m, row in moved_rows(state, group).items()
        if (row.kind, row.key_hash) == (FailedKind.PARKED, key_hash)
    ]
    return max((item for item in found if item[0][0] == topic_id), default=None)


def no_hold_back_behind_older_leases(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(key_fences, "no_earlier_message", lambda *_: True)


def no_wait_for_the_member_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fetch_choice, "held_by_others", lambda *_: False)


def new_before_what_came_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fetch_choice._Chooser, "_redeliveries", lambda *_: True)
    patch.setattr(
        delivery._DeliveryBuilder,
        "_is_next_live",
        lambda _self, start, _spot, position: start == position.cursor,
    )


def a_head_is_forgotten_by_a_commit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(key_fences, "settle_head", lambda *_: None)


def a_reboot_takes_reservations(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(consumer_actions, "_settle_ranges", lambda *_, **__: None)


def a_run_ends_behind_what_is_given_back(patch: pytest.MonkeyPatch) -> None:
    add = RunBuilder.add

    def longer(
        self: RunBuilder, base: int, first: int, _rows: int, entry: Any, **more: Any
    ) -> None:
        add(self, base, first, entry.count - first, entry, **more)

    patch.setattr(RunBuilder, "add", longer)


def growth_is_no_barrier(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(topics, "growth_limit", lambda *_: None)


def a_count_is_lost_with_the_power(patch: pytest.MonkeyPatch) -> None:
    def decide(*args: Any) -> Any:
        outcome = delivery.decide_deliver(*args)
        return outcome._replace(early=True) if isinstance(outcome, Outcome) else outcome

    patch.setitem(machine.DECIDERS, Deliver, decide)


def a_flood_goes_through(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(circuit_breaker, "allows", lambda *_: True)


def failures_in_a_flood_count(patch: pytest.MonkeyPatch) -> None:
    action = failures._action
    patch.setattr(
        failures, "_action", lambda group, command: action(replace(group, breaker=None), command)
    )


def followers_stay_in_the_store(patch: pytest.MonkeyPatch) -> None:
    def left(self: FailureChanges, ref: Any, row: Any) -> None:
        self._moves.append(Move(ref[0], ref[1], ref[2], row._replace(kind=FailedKind.LOCAL)))
        self._set_head(ref, row.key_hash, FenceState.RETRYING)

    patch.setattr(FailureChanges, "leave_at_consumer", left)


def a_leave_frees_what_a_store_has(patch: pytest.MonkeyPatch) -> None:
    def freed(state: Any, group: Any, _at: int) -> None:
        for store_id, store in group.stores.items():
            refs = () if group.has_owner(store) else local_stores.messages(state, group, store_id)
            for ref in list(refs):
                row = failed_changes.drop(state, group, ref)
                assert row is not None
                failed_changes.put(
                    state, group, ref, row._replace(kind=FailedKind.RETRY, due=0, store=b"")
                )

    patch.setattr(local_stores, "note_losses", freed)


def a_reset_leaves_messages_at_consumers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(local_stores, "take_back", lambda *_: None)


def adoption_forgets_attempts(patch: pytest.MonkeyPatch) -> None:
    put = failed_changes.put

    def forgetful(state: Any, group: Any, ref: Any, row: Any) -> None:
        adopted = group.group_id in state.groups.adopting
        put(state, group, ref, row._replace(attempt=0) if adopted else row)

    patch.setattr(failed_changes, "put", forgetful)


def an_ack_from_a_store_keeps_its_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        store_reports,
        "leases",
        SimpleNamespace(
            lease_of=leases.lease_of,
            release_row=leases.release_row,
            return_range=leases.return_range,
            release_range=lambda *_: [],
        ),
    )


def a_head_is_forgotten_by_a_store(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        store_reports,
        "key_fences",
        SimpleNamespace(apply_changes=key_fences.apply_changes, settle_head=lambda *_: None),
    )
    patch.setattr(FailureChanges, "processed", lambda *_: None)


def drop_makes_no_letter(patch: pytest.MonkeyPatch) -> None:
    def dropped(self: FailureChanges, ref: Any, row: Any, reason: str) -> None:
        move = Move(ref[0], ref[1], ref[2], row._replace(kind=FailedKind.RETRY, reason=reason))
        self._moves.append(move)

    patch.setattr(FailureChanges, "drop", dropped)


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
    find(bug, monkeypatch, STEPS_OF_ALL)


def find(
    bug: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    weights: dict[str, float],
) -> None:
    bug(monkeypatch)
    first = FIRST_SEEDS.get(bug.__name__, 0)
    for seed in range(first, first + BUG_SEEDS):
        try:
            run(seed, weights)
        except AssertionError:
            return
    pytest.fail("the simulation is blind to this bug")


@pytest.mark.parametrize("seed", range(FLAPPING_SEEDS))
def test_flapping_consumers_with_stores_lose_and_double_nothing(seed: int) -> None:
    run(seed, FLAPPING)


@pytest.mark.parametrize(
    "bug",
    [
        followers_stay_in_the_store,
        a_leave_frees_what_a_store_has,
        a_reset_leaves_messages_at_consumers,
        adoption_forgets_attempts,
        an_ack_from_a_store_keeps_its_lease,
        a_head_is_forgotten_by_a_store,
        drop_makes_no_letter,
    ],
)
def test_a_planted_bug_of_stores_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    find(bug, monkeypatch, FLAPPING)


@pytest.mark.parametrize("seed", range(FLAPPING_SEEDS))
def test_operators_who_touch_what_is_retried_break_no_order_and_lose_nothing(seed: int) -> None:
    run(seed, TOUCHED)


def a_touch_takes_a_message_from_its_member(patch: pytest.MonkeyPatch) -> None:
    refusal = retries.waiting_refusal

    def careless(state: Any, group: Any, ref: Any, row: Any) -> str:
        return "" if ref in group.leased_rows else refusal(state, group, ref, row)

    patch.setattr(retries, "waiting_refusal", careless)


def a_skipped_message_holds_its_key(patch: pytest.MonkeyPatch) -> None:
    def held(self: FailureChanges, ref: Any, row: Any, reason: str) -> None:
        closed = self._numbered(row)._replace(kind=FailedKind.ABANDONED, reason=reason)
        self._moves.append(Move(ref[0], ref[1], ref[2], closed))

    patch.setattr(FailureChanges, "drop", held)


def a_buried_message_lets_its_key_go(patch: pytest.MonkeyPatch) -> None:
    def freed(self: FailureChanges, ref: Any, row: Any) -> None:
        dead = self._numbered(row._replace(kind=FailedKind.LETTER))
        self._moves.append(Move(ref[0], ref[1], ref[2], dead))
        self.processed(ref, row.key_hash)

    class Freeing(FailureChanges):
        dead_letter = freed

    patch.setattr(retries, "FailureChanges", Freeing)


def a_hastened_message_begins_anew(patch: pytest.MonkeyPatch) -> None:
    class Forgetful(FailureChanges):
        def retry(self, ref: Any, row: Any, due: int) -> None:
            super().retry(ref, row._replace(attempt=0), due)

    patch.setattr(retries, "FailureChanges", Forgetful)


def a_store_keeps_what_was_buried(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(retries, "_leave_store", lambda *_: None)


@pytest.mark.parametrize(
    "bug",
    [
        a_touch_takes_a_message_from_its_member,
        a_skipped_message_holds_its_key,
        a_buried_message_lets_its_key_go,
        a_hastened_message_begins_anew,
        a_store_keeps_what_was_buried,
    ],
)
def test_a_planted_bug_of_touched_retries_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    find(bug, monkeypatch, TOUCHED)
