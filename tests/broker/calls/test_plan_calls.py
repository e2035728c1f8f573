"""Calls about replay plans, and the timer that makes their steps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from tests.broker.calls.test_letter_calls import Office
from txmq.broker.background import plan_service
from txmq.broker.background.paced_steps import PAUSE_S
from txmq.broker.background.plan_pace import PlanPace
from txmq.broker.calls import plan_checks
from txmq.broker.calls.letters import DeadLetterCalls
from txmq.broker.search import message_view
from txmq.core.consumers.circuit_breaker import open_breaker
from txmq.core.events.base import RecordContext
from txmq.core.events.plans import PlanFrozen, PlanLettersAdded
from txmq.core.replay import abandoning, cleanup
from txmq.core.replay.abandoning import AbandonNextLetters
from txmq.core.replay.building import AddPlanLetters, apply_frozen
from txmq.core.replay.cleanup import SweepPlan
from txmq.core.state.failed_rows import FailedKind
from txmq.errors import (
    BadRequest,
    Conflict,
    RemoteProtocolError,
    RequestRejected,
    Throttled,
    UnknownPlan,
)
from txmq.wire.calls.plans import PlanCheck
from txmq.wire.data_requests import Ack, AckedRange, Fetch, Opcode, pack_ack, pack_fetch
from txmq.wire.json import parse

if TYPE_CHECKING:
    from txmq.core.state.consumer_groups import ConsumerGroup

SETTINGS: dict[str, Any] = {"rate": 0, "ramp_s": 0, "start": True}


class Desk(Office):
    """An operator who makes plans."""

    def __init__(self) -> None:
        super().__init__()
        self.broker.start()

    def plan(self, name: str = "p", **args: Any) -> dict[str, Any]:
        args = {"select": {}, "settings": SETTINGS, "operator": "ada"} | args
        reply: dict[str, Any] = self.ask("plan.create", name=name, group="g", **args)
        self.broker.pass_time(0.2)
        return reply

    def ask(self, call: str, **args: Any) -> Any:
        return self.broker.ask(call, **args)

    def show(self, name: str = "p") -> dict[str, Any]:
        shown: dict[str, Any] = self.ask("plan.show", name=name)
        return shown

    def consume(self) -> int:
        """Ack all that the group gets; return the number."""
        wanted = Fetch(self.joined["generation"], 0, 1 << 22, 10_000, "g", "a")
        return len(self.client.ask(Opcode.FETCH, pack_fetch(wanted)).payload)

    def work(self, poison: Callable[[int], bool]) -> None:
        """Let the group process what it gets, and poison die."""
        self.consume()
        for _topic, _partition, offset in list(self.group().leased_rows):
            if poison(offset):
                self.nack(offset, {"type": "E", "text": "", "fingerprint": "poison"})
            else:
                acked = (AckedRange("t", 0, offset, offset + 1),)
                ack = Ack(self.joined["generation"], "g", "a", acked)
                assert self.client.ask(Opcode.ACK, pack_ack(ack)).status == 0
        self.broker.pass_time(0.2)

    def group(self) -> ConsumerGroup:
        return self.broker.engine.state.groups.by_name["g"]

    def letters(self, name: str = "p", **args: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        more: dict[str, Any] = {}
        while True:
            page = self.ask("plan.letters", name=name, **args, **more)
            found += page["letters"]
            if page["next"] is None:
                return found
            more = {"cursor": page["next"]}


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_plan_over_a_selection_is_frozen_and_puts_its_letters_back(desk: Desk) -> None:
    desk.plan(select={"error_type": "B"})
    shown = desk.show()
    assert (shown["state"], shown["letters"], shown["delivered"]) == ("ramping", 8, 8)
    assert len(shown["digest"]) == 64
    assert desk.ask("dlq.stats", group="g")["letters"] == 32
    letters = desk.letters(limit=3)
    assert [one["offset"] for one in letters] == [at for at in range(40) if at % 10 < 2]
    assert desk.letters(outcome="processed") == []
    [listed] = desk.ask("plan.list")["plans"]
    assert (listed["name"], listed["group"], listed["progress"]) == ("p", "g", 0.0)


def test_the_life_of_a_processed_letter_names_its_plan(desk: Desk) -> None:
    desk.plan(select={"error_type": "B"})
    desk.work(lambda offset: offset == 1)
    while desk.show()["state"] != "done":
        desk.work(lambda _offset: False)
    lives = [desk.ask("message.life", topic="t", partition=0, offset=n) for n in (0, 1, 2)]
    over, died, never = (life["groups"][0] for life in lives)
    assert (over["state"], over["plan"]["plan"]) == ("settled", "p")
    assert over["plan"]["outcome"] == "processed"
    assert (died["state"], died["plan"]["outcome"]) == ("dead", "died_again")
    shown = desk.ask("dlq.show", group="g", topic="t", partition=0, offset=1)
    assert shown["plan"] is None
    assert [one["call"] for one in shown["operations"]] == ["plan.create"]
    assert "plan" not in never


def test_a_plan_has_the_letters_whose_messages_have_a_header(desk: Desk) -> None:
    desk.plan(select={"header": ["tenant", "red"]})
    assert desk.show()["letters"] == 4


def test_a_client_adds_the_letters_itself(desk: Desk) -> None:
    desk.plan(select=None, settings={"rate": 0})
    places = [["t", 0, 7], ["t", 0, 3], ["t", 0, 999]]
    added = desk.ask("plan.add", name="p", letters=places)
    assert added == {"added": 2, "skipped": 0, "refused": (("t", 0, 999),)}
    assert desk.show()["state"] == "building"
    desk.ask("plan.freeze", name="p")
    desk.broker.pass_time(0.2)
    assert desk.show()["state"] == "planned"
    assert desk.ask("plan.check", name="p") == {
        "checked": 2, "edited": 0, "fenced": 0, "out_of_order": 0, "invalid": 0,
        "would_replay": 2, "would_skip": {}, "schema_mistakes": {}, "next": None,
    }  # fmt: skip
    desk.ask("dlq.abandon", group="g", letters=[["t", 0, 3]], reason="x")
    assert desk.ask("plan.check", name="p")["would_skip"] == {"abandoned": 1}


def test_a_letter_that_died_again_since_it_was_judged_is_skipped(desk: Desk) -> None:
    desk.plan(select=None)
    [one, other, *_] = desk.ask("dlq.list", group="g", select={}, limit=2)["letters"]
    places = [["t", 0, letter["offset"]] for letter in (one, other)]
    numbers = [one["number"], other["number"] - 1]
    added = desk.ask("plan.add", name="p", letters=places, numbers=numbers)
    assert (added["added"], added["skipped"]) == (1, 1)
    [skipped] = desk.letters(outcome="skipped")
    assert (skipped["offset"], skipped["why"]) == (
        other["offset"],
        "it was replayed since, and died again",
    )
    with pytest.raises(RemoteProtocolError, match="a number for each letter"):
        desk.ask("plan.add", name="p", letters=places, numbers=[1])


def test_letters_follow_at_the_rate_that_grows(desk: Desk) -> None:
    desk.plan(settings={"rate": 10, "ramp_s": 4, "start": True})
    seen = [desk.show()["delivered"]]
    for _ in range(5):
        desk.broker.pass_time(1)
        seen.append(desk.show()["delivered"])
    steps = [after - before for before, after in pairwise(seen)]
    assert steps == sorted(steps)
    assert steps[0] <= 4
    assert steps[-1] == pytest.approx(10, abs=1)
    assert desk.show()["rate_now"] == 10
    desk.ask("plan.pause", name="p", operator="ada")
    before = desk.show()
    assert (before["state"], before["why"], before["eta_s"]) == ("paused", "by an operator", None)
    desk.broker.pass_time(5)
    assert desk.show()["delivered"] == before["delivered"]
    desk.ask("plan.resume", name="p", operator="ada")
    desk.broker.pass_time(0.1)
    assert desk.show()["rate_now"] < 2


def test_a_plan_tells_how_long_it_takes_by_its_ramp_and_by_what_holds_it_up(desk: Desk) -> None:
    desk.plan(settings={"rate": 10, "ramp_s": 4, "start": True})
    told = desk.show()
    assert told["eta_s"] is not None
    for _ in range(round(told["eta_s"] / 0.1)):
        desk.broker.pass_time(0.1)
    assert desk.show()["planned"] <= 1
    desk.plan("held", select={}, settings=SETTINGS | {"canary": 2, "pause": True})
    assert desk.show("held")["eta_s"] is None


def test_a_plan_whose_group_does_not_answer_does_not_tell_how_long_it_takes(desk: Desk) -> None:
    desk.plan(settings={"rate": 10, "ramp_s": 0, "start": True, "in_flight": 5})
    for _ in range(12):
        desk.broker.pass_time(1)
    shown = desk.show()
    assert (shown["delivered"], shown["rate_now"], shown["eta_s"]) == (5, 10, None)


@pytest.mark.parametrize("rate", [5e-324, 1e-300, 1e9])
def test_a_plan_with_a_strange_rate_can_be_shown(desk: Desk, rate: float) -> None:
    desk.plan(settings={"rate": rate, "ramp_s": 60, "start": True})
    [shown] = desk.ask("plan.list")["plans"]
    assert parse(json.dumps(shown).encode()) == shown
    assert shown["eta_s"] is None or shown["eta_s"] >= 0


def is_poison(offset: int) -> bool:
    return offset % 5 == 0


def test_some_poison_does_not_stop_a_plan_and_a_canary_of_poison_does(desk: Desk) -> None:
    watched = SETTINGS | {"canary": 5, "stop_after": 10, "in_flight": 10}
    desk.plan(settings=watched)
    assert (desk.show()["state"], desk.show()["delivered"]) == ("canary", 5)
    while (shown := desk.show())["state"] != "done":
        assert shown["state"] != "paused", shown["why"]
        desk.work(is_poison)
    assert (shown["processed"], shown["died_again"], shown["progress"]) == (32, 8, 1.0)
    for letter in desk.letters(outcome="died_again"):
        assert is_poison(letter["offset"])
        assert letter["died_as"] > 40
        assert letter["why"] == "poison"
    desk.plan("again", settings=watched | {"canary": 2})
    desk.work(is_poison)
    shown = desk.show("again")
    assert (shown["state"], shown["why"]) == ("paused", "2 of the last 2 failed again: poison")
    desk.ask("plan.resume", name="again", operator="ada")
    while (shown := desk.show("again"))["state"] != "done":
        desk.work(lambda _offset: False)  # it is mended
    assert (shown["processed"], shown["died_again"]) == (6, 2)


def test_a_plan_abandons_its_letters_by_one_order(desk: Desk) -> None:
    desk.plan(settings=SETTINGS | {"start": False})
    assert desk.ask("plan.leave", name="p", letters=[["t", 0, 3]], reason="kept")["left"] == 1
    assert desk.ask("plan.abandon", name="p", reason="sent again", operator="ada")["state"] == (
        "abandoning"
    )
    desk.broker.pass_time(0.5)
    shown = desk.show()
    assert (shown["state"], shown["ended"], shown["skipped"], shown["why"]) == (
        "done", 39, 1, "sent again",
    )  # fmt: skip
    assert {(one["offset"], one["why"]) for one in desk.letters(outcome="skipped")} == {(3, "kept")}
    assert {one["why"] for one in desk.letters(outcome="ended")} == {"abandoned"}
    closed = desk.ask("dlq.list", group="g", select={"states": ["abandoned"]}, limit=100)
    assert len(closed["letters"]) == 39
    assert {one["reason"] for one in closed["letters"]} == {"sent again"}
    assert desk.ask("dlq.stats", group="g", select={})["letters"] == 1
    desk.broker.pass_time(0.5)
    tables = desk.broker.engine.state.tables
    kinds = Counter(row[0] for _key, row in tables["failed"].range(b""))
    assert not desk.show()["cleanup_pending"]
    assert kinds == {FailedKind.ABANDONED: 39, FailedKind.LETTER: 1}, "the rows followed"


def test_plans_that_abandon_and_are_swept_take_turns_with_a_pause_behind_each_step(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleanup, "SWEPT_ABANDONED", 1)
    monkeypatch.setattr(abandoning, "STEP_LETTERS", 2)
    engine, steps = desk.broker.engine, list[tuple[float, int, type]]()
    submit = engine.submit

    def noted(command: Any, *rest: Any) -> Any:
        if isinstance(command, SweepPlan | AbandonNextLetters):
            steps.append((desk.broker.clock.seconds(), command.plan_id, type(command)))
        return submit(command, *rest)

    names = ("A", "B")
    for name in names:
        desk.plan(name, select={"error_type": name}, settings=SETTINGS | {"start": False})
    monkeypatch.setattr(engine, "submit", noted)
    for name in names:
        desk.ask("plan.abandon", name=name, reason="sent again", operator="ada")
    for _ in range(300):
        desk.broker.pass_time(0.01)
    assert not any(plan.has_unswept for plan in engine.state.plans.by_id.values())
    swept = [step for step in steps if step[2] is SweepPlan]
    assert len(swept) > 30
    assert min(after[0] - before[0] for before, after in pairwise(swept)) >= PAUSE_S
    turns = [plan_id for _at, plan_id, _kind in swept[:8]]
    assert turns == turns[:2] * 4
    assert len({*turns}) == 2


def test_plans_say_whether_rows_of_their_letters_are_to_be_cleaned_up(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleanup, "SWEPT_ABANDONED", 1)
    desk.plan(settings=SETTINGS | {"start": False})
    assert not desk.show()["cleanup_pending"]
    desk.ask("plan.abandon", name="p", reason="sent again", operator="ada")
    while desk.show()["state"] != "done":
        desk.broker.pass_time(0.01)
    listed = desk.ask("plan.list")
    assert desk.show()["cleanup_pending"]
    assert listed["plans"][0]["cleanup_pending"]
    assert listed["deleting"] == 0
    desk.ask("plan.delete", name="p", operator="ada")
    listed = desk.ask("plan.list")
    assert (listed["plans"], listed["deleting"]) == ([], 1)
    desk.broker.pass_time(3.0)
    assert desk.ask("plan.list")["deleting"] == 0
    assert not desk.broker.engine.state.plans.by_id


def test_a_cleanup_may_follow_while_letters_of_a_cancelled_plan_are_delivered(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.plan()
    desk.ask("plan.cancel", name="p", operator="ada")
    desk.broker.pass_time(5)
    assert (desk.show()["delivered"], desk.show()["cleanup_pending"]) == (40, False)
    with monkeypatch.context() as patched:
        patched.setattr(plan_service.PlanService, "_sweep", lambda _service, _plan: None)
        desk.work(lambda _offset: False)
        assert (desk.show()["delivered"], desk.show()["cleanup_pending"]) == (0, True)
    desk.broker.pass_time(2)
    assert not desk.show()["cleanup_pending"]


def test_a_deleted_plan_is_gone(desk: Desk) -> None:
    desk.plan()
    desk.ask("plan.cancel", name="p", operator="ada")
    desk.ask("plan.delete", name="p", operator="ada")
    desk.broker.pass_time(0.5)
    assert type(desk.ask("plan.show", name="p")) is UnknownPlan
    assert desk.broker.engine.state.plans.by_id == {}


def test_only_open_letters_can_be_planned(desk: Desk) -> None:
    refused = desk.plan(select={"states": ["open", "abandoned"]})
    assert isinstance(refused, BadRequest)


def test_old_plans_are_deleted_after_a_month(desk: Desk) -> None:
    desk.plan()
    desk.ask("plan.cancel", name="p", operator="ada")
    desk.broker.pass_time(31 * 86_400)
    desk.broker.pass_time(700)
    assert desk.ask("plan.list")["plans"] == []


def test_letters_of_a_deleted_topic_stand_for_none_of_a_new_one(desk: Desk) -> None:
    desk.ask("topic.delete", name="t")
    desk.ask("topic.create", name="t", partitions=1)
    desk.plan()
    assert (desk.show()["letters"], desk.show()["state"]) == (0, "done")
    replayed = desk.ask("dlq.replay", group="g", select={})
    assert (replayed["done"], replayed["refused"]) == ((), ())


def test_nobody_adds_to_a_plan_of_a_selection_or_freezes_it(desk: Desk) -> None:
    desk.ask("plan.create", name="p", group="g", select={}, settings=SETTINGS)
    for call, args in (("plan.add", {"letters": [["t", 0, 1]]}), ("plan.freeze", {})):
        refused = desk.ask(call, name="p", **args)
        assert type(refused) is Conflict
    desk.broker.pass_time(0.2)
    assert desk.show()["letters"] == 40


def test_a_second_approver_has_a_name(desk: Desk) -> None:
    second = SETTINGS | {"second_approver": True}
    refused = desk.plan(settings=second, operator=None, reason="kim")
    assert isinstance(refused, BadRequest)
    desk.plan(settings=second)
    refused = desk.ask("plan.approve", name="p", reason="all is well")
    assert isinstance(refused, RequestRejected)
    assert desk.show()["approved_by"] == ""
    desk.ask("plan.approve", name="p", operator="kim", reason="all is well")
    assert desk.show()["approved_by"] == "kim: all is well"


def test_letters_of_a_cancelled_plan_have_an_outcome_when_their_topic_is_deleted(
    desk: Desk,
) -> None:
    desk.plan()
    desk.ask("plan.cancel", name="p", operator="ada")
    desk.ask("topic.delete", name="t")
    desk.broker.pass_time(20)
    assert (desk.show()["delivered"], desk.show()["ended"]) == (0, 40)


def test_a_plan_whose_step_fails_holds_up_no_other(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = desk.broker.engine.submit

    def fail(command: object, answer: Any) -> None:
        if isinstance(command, AddPlanLetters) and command.name == "p":
            answer(Throttled("full", hint="wait"))
        else:
            submit(command, answer)

    monkeypatch.setattr(desk.broker.engine, "submit", fail)
    desk.plan()
    desk.plan("q")
    desk.broker.pass_time(0.3)
    assert (desk.show("p")["state"], desk.show("q")["delivered"]) == ("building", 40)


def test_a_check_reads_large_batches_in_parts(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_checks, "CHECKED_BYTES", 1_000)
    desk.plan(settings={"rate": 0})
    checked, cursor, pages = 0, None, 0
    while cursor is not None or not pages:
        page = desk.ask("plan.check", name="p", cursor=cursor)
        checked, cursor, pages = checked + page["checked"], page["next"], pages + 1
    assert checked == 40
    assert pages > 2


def test_a_check_lets_others_in_between_two_letters(desk: Desk) -> None:
    desk.plan(settings={"rate": 0})
    letters = DeadLetterCalls(desk.broker.engine, desk.broker.assembly.turns)
    checks = plan_checks.PlanChecks(desk.broker.engine.state, letters)
    assert len(list(checks.check(PlanCheck(name="p")))) == 40


def test_a_plan_says_that_its_group_gets_nothing(desk: Desk) -> None:
    desk.plan()
    assert desk.show()["why"] == ""
    desk.ask("group.pause", group="g")
    assert desk.show()["why"] == "waits for its group, which is paused"
    desk.ask("group.resume", group="g")
    desk.client.call("consumer.leave", group="g", member="a", instance="a")
    assert desk.show()["why"] == "waits for its group, which has no members"
    assert desk.ask("plan.list")["plans"][0]["why"] == desk.show()["why"]


def test_a_list_of_plans_with_long_reasons_has_pages(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_view, "PAGE_BYTES", 10_000)
    names = [f"p{at}" for at in range(9)]
    for name in names:
        desk.ask("plan.create", name=name, group="g", reason="\x00" * 4_096, operator="ada")
    found: list[str] = []
    following = ""
    while following is not None:
        page = desk.ask("plan.list", after=following)
        found += [plan["name"] for plan in page["plans"]]
        assert len(page["plans"]) < len(names)
        following = page["next"]
    assert found == names


def test_a_check_counts_bodies_that_the_topics_schema_does_not_have(desk: Desk) -> None:
    desk.plan(settings={"rate": 0})
    assert desk.ask("plan.check", name="p")["invalid"] == 0
    schema = {"type": "object", "required": ["amount"]}
    desk.ask("topic.schema", name="t", json_schema=json.dumps(schema), operator="ada")
    checked = desk.ask("plan.check", name="p")
    assert (checked["invalid"], checked["would_replay"]) == (40, 40)
    assert all(mistake for mistake in checked["schema_mistakes"])


def test_a_plan_waits_while_too_many_rows_are_not_on_disk(desk: Desk) -> None:
    room = [False]
    desk.broker.assembly.bound_background_work(lambda: room[0])
    desk.plan()
    assert desk.show()["state"] == "building"
    room[0] = True
    desk.broker.pass_time(0.2)
    assert desk.show()["delivered"] == 40
    room[0] = False
    desk.work(lambda _offset: False)
    assert desk.show()["state"] == "ramping", "nobody is stopped but the plan"
    assert desk.show()["processed"] == 40


def test_a_broker_that_drains_leaves_a_plan_to_the_next_start(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_service, "ADDED_AT_ONCE", 5)
    engine = desk.broker.engine
    engine.listen(PlanLettersAdded, lambda _event, _place: desk.broker.assembly.stop())
    desk.plan()
    desk.broker.pass_time(1)
    assert engine.try_drain()
    assert (desk.show()["state"], 0 < desk.show()["letters"] < desk.number) == ("building", True)


def test_what_is_processed_is_swept_though_its_plan_is_through(desk: Desk) -> None:
    desk.plan()
    tables = desk.broker.engine.state.tables
    assert len(list(tables["failed"].range(b""))) > 1
    desk.work(lambda _offset: False)
    desk.broker.pass_time(2)
    assert desk.show()["state"] == "done"
    for name in ("failed", "letters", "letter_index"):
        assert not list(tables[name].range(b"")), name
    assert desk.show()["processed"] == desk.show()["letters"]


def test_what_falls_due_during_a_flush_waits_for_a_tick(desk: Desk) -> None:
    """A record for each letter would make live traffic wait for its flush."""
    desk.plan(settings={"rate": 2_000, "ramp_s": 0})
    pace = PlanPace(desk.broker.engine.state.plans.by_name["p"], 0.0)
    assert pace.allowed(0.1) == 201
    pace.take(201)
    assert not pace.goes_on(0.102)
    assert pace.goes_on(0.36), "there is enough for a step"


def test_a_letter_shows_what_operators_did_to_its_plan(desk: Desk) -> None:
    desk.plan(settings={"rate": 0, "second_approver": True})
    desk.ask("plan.approve", name="p", operator="kim", reason="seen")
    shown = desk.ask("dlq.show", group="g", topic="t", partition=0, offset=3)
    assert [(one["call"], one["operator"]) for one in shown["operations"]] == [
        ("plan.create", "ada"),
        ("plan.approve", "kim"),
    ]


def test_a_plan_that_starts_by_itself_waits_for_the_circuit_breaker(desk: Desk) -> None:
    open_breaker(desk.group(), "f", "E", desk.broker.engine.now())
    desk.plan()
    shown = desk.show()
    assert (shown["state"], shown["why"]) == (
        "planned",
        "waits for its group, whose circuit breaker is open",
    )
    desk.ask("group.resume", group="g", operator="ada")
    desk.broker.pass_time(0.2)
    assert (desk.show()["state"], desk.show()["delivered"]) == ("ramping", 40)


def test_a_plan_starts_though_the_power_failed_once_it_was_frozen(desk: Desk) -> None:
    desk.plan(select=None)
    desk.ask("plan.add", name="p", letters=[["t", 0, 1]])
    desk.ask("plan.freeze", name="p", operator="ada")
    plan = desk.broker.engine.state.plans.by_name["p"]
    place = RecordContext(0, 0, 0, 1, 1)
    apply_frozen(desk.broker.engine.state, PlanFrozen(plan.plan_id, "digest"), place)
    desk.broker.pass_time(0.2)
    assert desk.show()["state"] == "ramping"
