"""Replay plans: their letters, their states, and what becomes of each letter."""

from __future__ import annotations

import hashlib
import json

import pytest

from tests.core.consumers.invariants import moved_rows
from tests.core.consumers.world import rows
from tests.core.replay.world import AT_ONCE, PlansWorld
from txmq.core import machine
from txmq.core.consumers import delivery
from txmq.core.consumers.commands import (
    AbandonLetters,
    AdvanceGroupWork,
    AlterGroup,
    DeleteGroup,
    LeaveGroup,
    NackMessage,
    PauseGroup,
    ReplayLetters,
    ReportStored,
    RequestedSettings,
    ResetPosition,
    StoredEntry,
)
from txmq.core.events.consumers import Acked
from txmq.core.events.plans import PlanLettersAdded, PlanPutBack
from txmq.core.replay import orders
from txmq.core.replay.abandoning import AbandonNextLetters, AbandonPlan, LeavePlan
from txmq.core.replay.building import AddPlanLetters
from txmq.core.replay.cleanup import EndLostLetters, SweepPlan
from txmq.core.replay.policies import FirePolicy, ReplayPolicy, SetPolicy, policy_of
from txmq.core.replay.putting_back import AdvancePlan
from txmq.core.retention.letter_retention import ExpireLetters
from txmq.core.state import failed_changes
from txmq.core.state.failed_rows import FailedKind
from txmq.core.state.plans import FINISHED, LetterOutcome, PlanSettings, PlanState
from txmq.core.state.state import State
from txmq.core.topics.topics import DeleteTopic
from txmq.core.transactions import lost_records
from txmq.errors import BadRequest, Conflict, RequestRejected, UnknownGroup, UnknownPlan
from txmq.model.retry import FailureReport
from txmq.model.units import DAY, SECOND
from txmq.store.tables import MemoryTables


@pytest.fixture
def world() -> PlansWorld:
    return PlansWorld(1)


def process(world: PlansWorld, *, dies: bool = False) -> list[int]:
    """Let the member process all it gets; return the offsets."""
    got = world.fetch("m")
    for one in got:
        if dies:
            world.fail(one.topic, one.partition, one.offset, dead=True)
        else:
            world.ack("m", (one.offset, one.offset + 1), topic=one.topic, partition=one.partition)
    return [one.offset for one in got]


def test_a_plan_puts_its_letters_back_and_knows_the_outcome_of_each(world: PlansWorld) -> None:
    places = world.letters(0, 5, 0)
    assert world.create("p", *reversed(places)).state == "building"
    assert world.plan_of("p").state is PlanState.PLANNED
    assert world.outcomes("p") == {"planned": 3}
    world.run_plan("p", most=2)
    assert world.outcomes("p") == {"delivered": 3}
    got = world.fetch("m")
    assert [one.offset for one in got] == [0, 1, 2]
    world.ack("m", (0, 2), topic="a")
    world.fail("a", 0, 2, dead=True)
    assert world.outcomes("p") == {"processed": 2, "died_again": 1}
    again = world.letters_of("p")[(1, 0, 2)]
    assert (again.number, again.died_as) == (3, 4)
    world.run_plan("p")
    assert world.plan_of("p").state is PlanState.DONE
    # the letter is free again
    assert world.do(ReplayLetters("g", (places[2],))).refused == ()
    process(world)
    assert world.outcomes("p") == {"processed": 2, "died_again": 1}
    world.check_plans()


def test_the_digest_is_that_of_the_places_in_the_order_of_publication(world: PlansWorld) -> None:
    places = [*world.letters(0, 5), *world.letters(1, topic="b"), *world.letters(0)]
    world.create("p", *reversed(places))
    world.do(orders.CancelPlan("p"))
    world.now += SECOND
    world.create("q", *places, by="bob")
    lines = "".join(json.dumps([*place], separators=(",", ":")) + "\n" for place in places)
    assert world.plan_of("p").digest == hashlib.sha256(lines.encode()).hexdigest()
    assert world.plan_of("p").digest == world.plan_of("q").digest


def test_a_letter_is_in_one_unfinished_plan_and_only_that_one_replays_it(
    world: PlansWorld,
) -> None:
    places = world.letters(0, 5, 1)
    world.create("p", *places[:2])
    world.create("q", *places)
    assert world.outcomes("q") == {"planned": 1, "skipped": 2}
    assert {letter.why for letter in world.letters_of("q").values()} == {"", "in plan p"}
    refused = world.do(ReplayLetters("g", tuple(places))).refused
    assert refused == (
        (*places[0], "in plan p"),
        (*places[1], "in plan p"),
        (*places[2], "in plan q"),
    )
    world.run_plan("p")
    world.run_plan("q")
    assert process(world) == [0, 1, 2]
    assert (world.outcomes("p"), world.outcomes("q")) == (
        {"processed": 2},
        {"processed": 1, "skipped": 2},
    )


def test_a_cancelled_plan_frees_what_it_has_not_put_back(world: PlansWorld) -> None:
    places = world.letters(0, 5, 1)
    world.create("p", *places, settings=AT_ONCE._replace(in_flight=1))
    world.run_plan("p")
    assert world.outcomes("p") == {"planned": 2, "delivered": 1}
    world.do(orders.CancelPlan("p", "eve: wrong"))
    assert world.do(AdvancePlan(world.plan_of("p").plan_id, 9)).letters == 0
    assert len(world.do(ReplayLetters("g", tuple(places[1:2]))).done) == 1
    world.create("q", *places[2:])
    world.run_plan("q")
    process(world)
    assert (world.outcomes("p"), world.outcomes("q")) == (
        {"planned": 2, "processed": 1},
        {"processed": 1},
    )
    world.check_plans()


def test_letters_that_change_meanwhile_are_skipped_with_the_reason(world: PlansWorld) -> None:
    places = world.letters(0, 5, 1, None)
    world.create("p", *places, ("a", 0, 99))
    world.do(AbandonLetters("g", (places[0],), "of no use"))
    world.do(ResetPosition("g", "a", "", ((0, 3),)))
    assert {ref[2]: letter.why for ref, letter in world.letters_of("p").items()} == {
        0: "abandoned", 1: "", 2: "", 3: "reset",
    }  # fmt: skip
    world.now += 2 * DAY
    world.do(ExpireLetters(world.group().group_id, 2, DAY))
    world.do(DeleteTopic("a"))
    world.run_plan("p")
    assert world.plan_of("p").state is PlanState.DONE
    assert {ref[2]: letter.why for ref, letter in world.letters_of("p").items()} == {
        0: "abandoned", 1: "its topic was deleted", 2: "expired", 3: "reset",
    }  # fmt: skip
    world.check_plans()


def test_a_plan_that_was_not_started_abandons_its_letters(world: PlansWorld) -> None:
    places = world.letters(0, 5, 1, None)
    world.create("p", *places[:3])
    refused = world.do(AbandonPlan("p", ""))
    assert type(refused) is BadRequest
    assert world.do(LeavePlan("p", tuple(places[2:]), "its message is damaged")).left == 1
    assert world.do(LeavePlan("p", tuple(places[2:]), "again")).left == 0
    for _ in range(2):
        assert world.do(AbandonPlan("p", "sent again", "ada")).state == "abandoning"
    assert world.do(ReplayLetters("g", (places[0],))).refused[0][-1] == "in plan p"
    plan_id = world.plan_of("p").plan_id
    while world.do(AbandonNextLetters(plan_id)).more:
        world.check_plans()
    assert world.plan_of("p").state is PlanState.DONE
    assert world.outcomes("p") == {"skipped": 1, "ended": 2}
    rows = {ref[2]: (row.kind, row.reason, row.plan) for ref, row in world.rows().items()}
    assert rows[0] == rows[1] == (FailedKind.ABANDONED, "sent again", 0)
    assert rows[2][0] == rows[3][0] == FailedKind.LETTER
    assert world.group().letters == 2
    assert world.do(AbandonPlan("p", "sent again", "ada")).state == "done"
    for name, error in (("q", Conflict), ("p2", Conflict), ("none", UnknownPlan)):
        if name == "q":
            world.create("q", places[2])
            world.do(orders.StartPlan("q"))
        elif name == "p2":
            world.do(orders.CreatePlan("p2", "g"))
        assert type(world.do(AbandonPlan(name, "why"))) is error
        assert type(world.do(LeavePlan(name, (places[2],), "why"))) is error
    world.check_plans()


def test_a_reset_ends_letters_that_are_on_their_way(world: PlansWorld) -> None:
    world.create("p", *world.letters(0, 5))
    world.run_plan("p")
    world.do(ResetPosition("g", "a", "first"))
    assert world.outcomes("p") == {"ended": 2}
    world.run_plan("p")
    assert world.plan_of("p").state is PlanState.DONE


def test_letters_on_their_way_end_with_their_topic(world: PlansWorld) -> None:
    world.create("p", *world.letters(0, 5), *world.letters(1, topic="b"))
    world.run_plan("p")
    world.delete_topic("a")
    assert world.outcomes("p") == {"delivered": 1, "ended": 2}
    process(world)
    world.run_plan("p")
    assert world.plan_of("p").state is PlanState.DONE
    world.check_plans()


def test_a_letter_at_a_consumer_whose_topic_is_deleted_was_not_processed(
    world: PlansWorld,
) -> None:
    world.create("p", *world.letters(None))
    world.run_plan("p")
    world.fetch("m")
    entry = StoredEntry("a", 1, 0, 0, "stored", 1, 0, FailureReport("E", "text", "print"))
    report = ReportStored("g", "m", world.generation(), b"s" * 16, "host", (entry,))
    assert world.do(report).verdicts == ("kept",)
    world.delete_topic("a")
    assert world.outcomes("p") == {"ended": 1}
    assert world.do(report).verdicts == ("unknown",), "the store puts it away"
    world.check_plans()


def test_a_deleted_group_ends_its_plans(world: PlansWorld) -> None:
    places = world.letters(0, 5, 1)
    world.create("p", *places, settings=AT_ONCE._replace(in_flight=1))
    world.run_plan("p")
    world.do(LeaveGroup("g", "m", "m"))
    world.do(DeleteGroup("g"))
    while world.do(AdvanceGroupWork()).more:
        pass
    plan = world.plan_of("p")
    assert (plan.state, plan.why) == (PlanState.CANCELLED, "its group was deleted")
    assert world.outcomes("p") == {"planned": 2, "ended": 1}
    world.do(orders.DeletePlan("p"))
    world.tidy(plan.plan_id)
    assert world.state.plans.by_id == {}
    assert not list(world.state.tables["plan_letters"].range(b""))


WATCHED = AT_ONCE._replace(canary=2, stop_after=4, stop_share=0.5)


def test_the_canary_is_watched_before_the_others_follow(world: PlansWorld) -> None:
    world.create("p", *world.letters(0, 5, 1, None), settings=WATCHED)
    world.run_plan("p")
    assert (world.plan_of("p").state, world.outcomes("p")) == (
        PlanState.CANARY,
        {"planned": 2, "delivered": 2},
    )
    process(world)
    world.run_plan("p")
    assert world.plan_of("p").state is PlanState.RAMPING
    assert world.outcomes("p") == {"delivered": 2, "processed": 2}


def test_a_plan_that_holds_waits_behind_its_canary(world: PlansWorld) -> None:
    world.create("p", *world.letters(0, 5, 1), settings=WATCHED._replace(pause=True))
    world.run_plan("p")
    process(world)
    world.run_plan("p")
    plan = world.plan_of("p")
    assert (plan.state, plan.why) == (PlanState.PAUSED, "the canary is through")
    world.do(orders.ResumePlan("p", "ada"))
    world.run_plan("p")
    assert (plan.state, world.outcomes("p")) == (
        PlanState.RAMPING,
        {"delivered": 1, "processed": 2},
    )


def test_a_plan_stops_where_its_letters_die_with_the_same_fingerprint(world: PlansWorld) -> None:
    world.create("p", *world.letters(0, 5, 1, None), settings=WATCHED)
    world.run_plan("p")
    for one in world.fetch("m"):
        world.fail_as(one.offset, "f1")
    world.run_plan("p")
    plan = world.plan_of("p")
    assert (plan.state, plan.why) == (PlanState.PAUSED, "2 of the last 2 failed again: f1")
    world.do(orders.ResumePlan("p"))
    world.run_plan("p")
    for one, fingerprint in zip(world.fetch("m"), ("f1", "f2"), strict=True):
        world.fail_as(one.offset, fingerprint)
    world.run_plan("p")
    assert plan.state is PlanState.DONE
    assert world.outcomes("p") == {"died_again": 4}
    world.check_plans()


def test_the_first_failure_of_a_canary_stops_a_plan_before_its_letters_are_dead(
    world: PlansWorld,
) -> None:
    world.create("p", *world.letters(0, 5, 1, None), settings=WATCHED._replace(canary=3))
    world.run_plan("p")
    plan = world.plan_of("p")
    world.fetch("m")
    for offset in (0, 1, 2):
        assert plan.state is PlanState.CANARY
        world.fail_as(offset, "f1", dead=False)
        world.run_plan("p")
    assert (plan.state, plan.why) == (PlanState.PAUSED, "3 of the last 3 failed again: f1")
    assert world.outcomes("p") == {"planned": 1, "delivered": 3}
    assert {letter.why for letter in world.letters_of("p").values()} == {"f1", ""}
    world.now += 10 * SECOND
    process(world)
    assert world.outcomes("p") == {"planned": 1, "processed": 3}
    assert {letter.why for letter in world.letters_of("p").values()} == {""}
    world.do(orders.ResumePlan("p"))
    world.run_plan("p")
    assert world.outcomes("p") == {"delivered": 1, "processed": 3}


def test_who_resumes_a_plan_that_was_not_begun_is_told_to_start_it(world: PlansWorld) -> None:
    world.create("p", *world.letters(0, 5), settings=AT_ONCE._replace(start=False))
    refused = world.do(orders.ResumePlan("p"))
    assert (type(refused), refused.hint) == (Conflict, "begin it: txmq plan start p")


def test_an_open_circuit_breaker_pauses_a_plan(world: PlansWorld) -> None:
    world.create("p", *world.letters(*range(30)), settings=AT_ONCE._replace(in_flight=20))
    world.run_plan("p")
    for one in world.fetch("m"):
        world.fail_as(one.offset, "away", dead=False)
    plan = world.plan_of("p")
    world.run_plan("p")
    assert (plan.state, plan.why) == (
        PlanState.PAUSED,
        "the group's circuit breaker opened: away",
    )
    refused = world.do(orders.ResumePlan("p"))
    assert (type(refused), refused.hint) == (
        Conflict,
        "remove the cause, then: txmq group resume g",
    )
    world.do(PauseGroup("g", paused=False))
    assert world.do(orders.ResumePlan("p")).state == "ramping"


def test_an_approval_is_given_by_somebody_else(world: PlansWorld) -> None:
    settings = AT_ONCE._replace(second_approver=True, start=True)
    world.do(orders.CreatePlan("p", "g", settings, by="ada: after the fix"))
    early = world.do(orders.ApprovePlan("p", "bob"))
    assert (type(early), early.hint) == (Conflict, "approve it once it is planned: txmq plan show")
    world.create("p", *world.letters(0, 5), settings=settings, by="ada: after the fix")
    assert world.plan_of("p").state is PlanState.PLANNED
    assert type(world.do(orders.StartPlan("p"))) is Conflict
    assert type(world.do(orders.ApprovePlan("p", "ada: again"))) is BadRequest
    assert type(world.do(orders.ApprovePlan("p", ""))) is BadRequest
    assert world.do(orders.ApprovePlan("p", "bob: seen")).state == "ramping"


def test_who_has_set_a_policy_cannot_approve_its_plans(world: PlansWorld) -> None:
    world.letters(0, 5)
    settings = AT_ONCE._replace(second_approver=True)
    policy = ReplayPolicy("{}", 1, on_version=False, max_replays=1, settings=settings)
    world.do(SetPolicy("g", policy, "ada: nightly"))
    world.do(FirePolicy("g", "{}"))
    [plan] = world.state.plans.by_id.values()
    assert plan.by == "policy: ada: nightly"
    world.do(AddPlanLetters(plan.name, (), complete=True))
    world.freeze(plan.name)
    world.do(SetPolicy("g", None, "ada"))
    for name in ("ada", "policy"):
        assert type(world.do(orders.ApprovePlan(plan.name, name))) is BadRequest
    assert world.do(orders.ApprovePlan(plan.name, "bob")).state == "ramping"


def test_a_plan_of_a_policy_is_one_record(world: PlansWorld) -> None:
    world.letters(0)
    policy = ReplayPolicy("{}", 1, on_version=False, max_replays=1, settings=AT_ONCE)
    world.do(SetPolicy("g", policy, "ada"))
    before = len(world.log)
    world.do(FirePolicy("g", "{}", "1"))  # the first version is only noted
    world.do(FirePolicy("g", "{}", "2"))
    assert len(world.log) == before + 2, "power may fail between two"
    found = policy_of(world.state, world.group())
    assert found is not None
    assert (found.versions, found.plan_id) == (("1", "2"), 1)


def test_a_policy_that_was_removed_and_set_again_waits_for_its_plan(world: PlansWorld) -> None:
    places = world.letters(0, 5)
    policy = ReplayPolicy("{}", 1, on_version=False, max_replays=1, settings=AT_ONCE)
    for order in (policy, None, policy):
        world.do(SetPolicy("g", order, "ada"))
        world.do(FirePolicy("g", "{}"))
    [plan] = world.state.plans.by_id.values()
    world.do(SetPolicy("g", None, "ada"))
    assert type(world.do(SetPolicy("g", None, "ada"))) is BadRequest
    world.do(AddPlanLetters(plan.name, tuple(places), complete=True))
    world.freeze(plan.name)
    world.run_plan(plan.name)
    process(world)
    world.run_plan(plan.name)
    world.do(SetPolicy("g", policy, "ada"))
    world.do(FirePolicy("g", "{}"))
    assert [one.state for one in world.state.plans.by_id.values()] == [
        PlanState.DONE,
        PlanState.BUILDING,
    ]


def test_orders_that_make_no_sense_are_refused(world: PlansWorld) -> None:
    places = world.letters(0, 5)
    assert type(world.do(orders.CreatePlan("p", "nobody"))) is UnknownGroup
    assert type(world.do(orders.StartPlan("p"))) is UnknownPlan
    world.create("p", *places)
    assert world.create("p", *places).state == "planned"  # the call is repeated
    assert type(world.do(orders.CreatePlan("p", "g", by="eve"))) is Conflict
    assert world.do(AddPlanLetters("p", tuple(places))).added == 0  # likewise
    assert type(world.do(AddPlanLetters("p", (("a", 0, 99),)))) is Conflict
    for early in (orders.PausePlan, orders.ResumePlan, orders.DeletePlan):
        assert type(world.do(early("p"))) is Conflict
    assert type(world.do(orders.ApprovePlan("p", "bob"))) is Conflict
    world.run_plan("p")
    process(world)
    world.run_plan("p")
    for late in (orders.StartPlan, orders.CancelPlan, orders.PausePlan):
        assert isinstance(world.do(late("p")), RequestRejected), late
    world.do(orders.DeletePlan("p"))
    assert type(world.do(orders.StartPlan("p"))) is UnknownPlan


def test_recovery_and_the_tables_know_the_same_plans(world: PlansWorld) -> None:
    world.create("p", *world.letters(0, 5, 1), settings=WATCHED)
    world.create("q", *world.letters(0), settings=PlanSettings())
    world.run_plan("p")
    process(world)
    world.do(orders.PausePlan("p"))
    again = world.replayed()
    assert again.plans == world.state.plans
    assert rows(again) == rows(world.state)
    machine.save(world.state)
    assert machine.load(world.state.tables).plans == world.state.plans


def skipping_world() -> PlansWorld:
    """An ordered group whose letters hold nothing up, and another group."""
    world = PlansWorld(1)
    world.join("m", "a", group="o", mode="ordered", on_exhausted="skip")
    world.join("m", "a", group="h")
    return world


def letters_in_order(world: PlansWorld, *keys: int) -> list[tuple[str, int, int]]:
    world.publish("a", *keys)
    for _ in keys:
        for one in world.fetch("m", "o"):
            failure = FailureReport("E", "text", "f")
            world.do(
                NackMessage(
                    "o", "m", world.generation("o"), "a", 0, one.offset,
                    world.keys[1, 0, one.offset], None, failure, dead=True,
                )
            )  # fmt: skip
    got = [one.offset for one in world.fetch("m", "h")]
    world.ack("m", *((at, at + 1) for at in got), topic="a", group="h")
    return [("a", 0, at) for at in range(len(keys))]


def test_letters_of_an_ordered_group_go_together_with_their_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Heads of their fences are leased together, without their rows; their acks lift
    the fences, and their rows go later.
    """
    world = PlansWorld(1)
    world.join("m", "a", group="o", mode="ordered")
    world.join("m", "a", group="h")
    places = letters_in_order(world, 5, 6, 7, 6)
    world.create("p", *places[:3], group="o")
    world.run_plan("p")
    with monkeypatch.context() as patch:
        patch.setattr(failed_changes, "put", lambda *_: pytest.fail("a row is written"))
        patch.setattr(delivery._DeliveryBuilder, "_add_row", lambda *_: pytest.fail("one by one"))
        assert [one.offset for one in world.fetch("m", "o")] == [0, 1, 2]
    group = world.group("o")
    assert sorted(group.fences[1]) == [5, 6, 7]
    world.ack("m", (0, 3), topic="a", group="o")
    assert sorted(group.fences[1]) == [6], "the last message waited behind the second"
    assert [ref[2] for ref in moved_rows(world.state, group)] == [3]
    assert [one.offset for one in world.fetch("m", "o")] == [3]
    world.ack("m", (3, 4), topic="a", group="o")
    assert not group.fences
    assert world.outcomes("p") == {"processed": 3}
    assert world.do(SweepPlan(world.plan_of("p").plan_id)).letters == 3
    world.check_plans()


def test_only_the_group_of_a_plan_gets_its_letters_and_keys_stay_in_order() -> None:
    world = skipping_world()
    places = letters_in_order(world, 5, 5, 6)
    world.create("p", *reversed(places), group="o")
    world.run_plan("p")
    world.publish("a", 5)
    assert [one.offset for one in world.fetch("m", "o")] == [0, 2]
    assert [one.offset for one in world.fetch("m", "h")] == [3]
    world.ack("m", (0, 1), (2, 3), topic="a", group="o")
    assert [one.offset for one in world.fetch("m", "o")] == [1]
    world.ack("m", (1, 2), topic="a", group="o")
    assert [one.offset for one in world.fetch("m", "o")] == [3]
    assert world.outcomes("p") == {"processed": 3}


def test_a_cancel_within_a_chain_leaves_the_fence_to_what_was_put_back() -> None:
    world = skipping_world()
    places = letters_in_order(world, 5, 5, 5)
    world.create("p", *places, group="o", settings=AT_ONCE._replace(in_flight=2))
    world.run_plan("p")
    world.do(orders.CancelPlan("p"))
    for offset in (0, 1):
        assert [one.offset for one in world.fetch("m", "o")] == [offset]
        world.ack("m", (offset, offset + 1), topic="a", group="o")
    assert world.fetch("m", "o") == []
    assert not world.group("o").fences
    assert world.outcomes("p") == {"planned": 1, "processed": 2}
    assert len(world.do(ReplayLetters("o", tuple(places[2:]))).done) == 1


def changed_world(*keys: int) -> PlansWorld:
    """Letters of a group that skipped dead letters, and parks their keys since."""
    world = skipping_world()
    letters_in_order(world, *keys)
    world.do(AlterGroup("o", RequestedSettings(on_exhausted="park")))
    world.publish("a", keys[-1])
    [last] = world.fetch("m", "o")
    die(world, last.offset)
    return world


def die(world: PlansWorld, offset: int) -> None:
    key, failure = world.keys[1, 0, offset], FailureReport("E", "text", "f")
    generation = world.generation("o")
    world.do(NackMessage("o", "m", generation, "a", 0, offset, key, None, failure, dead=True))


def drain(world: PlansWorld) -> list[int]:
    """Process all that the group gets, in the order of its deliveries."""
    done: list[int] = []
    while got := world.fetch("m", "o"):
        for one in got:
            world.ack("m", (one.offset, one.offset + 1), topic="a", group="o")
            done.append(one.offset)
    return done


def test_a_letter_behind_a_dead_one_that_is_not_replayed_stays_where_it_is() -> None:
    world = changed_world(5, 5, 6, 5)
    behind = "behind dead letter a/0/4 of its key"
    reply = world.do(ReplayLetters("o", (("a", 0, 0), ("a", 0, 2))))
    assert reply.done == (("a", 0, 2),)
    assert reply.refused == (("a", 0, 0, behind),)
    world.create("p", ("a", 0, 0), ("a", 0, 3), group="o")
    world.run_plan("p")
    assert world.plan_of("p").state is PlanState.DONE
    assert {letter.why for letter in world.letters_of("p").values()} == {behind}
    assert drain(world) == [2]
    world.check_plans()


def test_a_dead_head_goes_back_with_the_letters_before_it_in_their_order() -> None:
    world = changed_world(5, 5, 5)
    world.create("p", *(("a", 0, at) for at in (0, 1, 3)), group="o")
    world.run_plan("p", most=1)
    assert world.outcomes("p") == {"delivered": 3}
    world.publish("a", 5)
    assert drain(world) == [0, 1, 3, 4]
    assert (world.outcomes("p"), world.group("o").fences) == ({"processed": 3}, {})

    world = changed_world(5, 5, 5)
    named = tuple(("a", 0, at) for at in (3, 2, 0))
    assert len(world.do(ReplayLetters("o", named)).done) == 3
    assert drain(world) == [0, 2, 3]


def test_a_letter_ends_in_its_plan_once_it_waits_for_a_letter_that_died_again() -> None:
    world = changed_world(5, 5)
    world.create("p", ("a", 0, 0), ("a", 0, 2), group="o")
    world.run_plan("p")
    assert [one.offset for one in world.fetch("m", "o")] == [0]
    die(world, 0)
    plan_id = world.plan_of("p").plan_id
    world.do(EndLostLetters(plan_id))
    assert world.outcomes("p") == {"died_again": 1, "ended": 1}
    assert world.letters_of("p")[1, 0, 2].why == "behind dead letter a/0/0 of its key"
    world.run_plan("p")
    assert world.plan_of("p").state is PlanState.DONE
    assert len(world.do(ReplayLetters("o", (("a", 0, 0),))).done) == 1
    assert drain(world) == [0, 2]
    world.check_plans()


def test_letters_of_a_cancelled_plan_end_with_their_topic(world: PlansWorld) -> None:
    world.create("p", *world.letters(0, 5))
    world.run_plan("p")
    world.do(orders.CancelPlan("p"))
    world.delete_topic("a")
    assert world.outcomes("p") == {"ended": 2}


def lose(world: PlansWorld, first: type, last: type) -> State:
    """Return the state of a broker whose log has lost the records from one event to
    another.
    """
    state = State(MemoryTables())
    events = [type(event) for _context, event in world.log]
    lost = range(events.index(first), events.index(last) + 1)
    for number, (context, event) in enumerate(world.log):
        if number in lost:
            lost_records.apply_lost(state, context.end)
        else:
            machine.apply_after_loss(state, event, context)
    return state


@pytest.mark.parametrize(
    ("first", "last"),
    [(PlanPutBack, Acked), (PlanLettersAdded, PlanLettersAdded), (Acked, Acked)],
)
def test_a_plan_ends_though_the_log_has_lost_records_of_it(
    world: PlansWorld, first: type, last: type
) -> None:
    world.create("p", *world.letters(0, 5), settings=AT_ONCE._replace(canary=1))
    world.run_plan("p")
    process(world)
    world.run_plan("p")
    world.state = lose(world, first, last)
    world.expire()  # what was leased comes again
    for _ in range(9):
        world.run_plan("p")
        world.do(EndLostLetters(world.plan_of("p").plan_id))
        process(world)
    assert world.plan_of("p").state in FINISHED
    assert not world.plan_of("p").count(LetterOutcome.DELIVERED)


def test_failures_that_are_told_before_acks_do_not_stop_a_plan(world: PlansWorld) -> None:
    settings = AT_ONCE._replace(stop_after=4)
    world.create("p", *world.letters(*range(10)), settings=settings)
    world.run_plan("p")
    world.fetch("m")
    for offset in (0, 1, 2, 3):
        world.fail_as(offset, "f1")
        world.run_plan("p")
    assert world.plan_of("p").state is PlanState.RAMPING
    world.ack("m", (4, 10), topic="a")
    world.run_plan("p")
    assert world.plan_of("p").state is PlanState.DONE
    world.create("q", *world.open_places(), *world.letters(*range(9)), settings=settings)
    world.run_plan("q")
    slow = world.fetch("m")
    world.now += 3 * SECOND
    for one in slow[:4]:
        world.fail_as(one.offset, "f1")
    world.run_plan("q")
    assert world.plan_of("q").why == "4 of the last 4 failed again: f1"
