"""Replay policies: plans that begin by themselves."""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker.calls.test_plan_calls import Desk
from txmq.broker.calls.letters import SelectedLetters
from txmq.core.consumers.circuit_breaker import open_breaker
from txmq.core.consumers.commands import AlterGroup, RequestedSettings
from txmq.core.replay import orders
from txmq.errors import BadRequest
from txmq.model.message import Message
from txmq.wire.data_requests import Fetch, Opcode, pack_fetch

QUICK = {"rate": 0, "ramp_s": 0, "stop_after": 0}


class PolicyDesk(Desk):
    """An operator who sets policies."""

    def policy(self, **args: Any) -> Any:
        return self.ask("policy.set", group="g", **{"settings": QUICK, "operator": "ada"} | args)

    def plans(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("plan.list")["plans"]
        return found

    def die_again(self) -> int:
        """Let all that the group gets die; return the number."""
        self.joined = self.client.call(
            "consumer.join", group="g", member="a", instance="a", topics=["t"]
        )  # it was silent for too long
        self.consume()
        leased = self.broker.engine.state.groups.by_name["g"].leased_rows
        offsets = [ref[2] for ref in leased]
        for offset in offsets:
            self.nack(offset, {"type": "E", "text": "", "fingerprint": f"f{offset}"})
        return len(offsets)

    def join(self, version: str) -> None:
        self.client.call(
            "consumer.join", group="g", member="b", instance="b", topics=["t"], version=version
        )
        self.client.call("consumer.leave", group="g", member="b", instance="b")
        self.broker.pass_time(6)


@pytest.fixture
def desk() -> PolicyDesk:
    return PolicyDesk()


def test_letters_are_replayed_after_a_time_and_not_for_ever(desk: PolicyDesk) -> None:
    desk.policy(after_s=5_000, max_replays=2, select={"error_type": "B"})
    desk.broker.pass_time(10)
    assert desk.plans() == []  # the oldest has been dead for 2,400 s
    desk.broker.pass_time(1)
    desk.policy(after_s=1, max_replays=2, select={"error_type": "B"})
    for count in (1, 2):
        desk.broker.pass_time(10)
        *_old, plan = sorted(desk.plans(), key=lambda plan: plan["made_at"])
        assert (len(desk.plans()), plan["by"], plan["state"]) == (count, "policy: ada", "ramping")
        assert plan["delivered"] == 8
        [policy] = desk.ask("policy.list")["policies"]
        assert policy["plan"] == plan["name"]
        desk.policy(after_s=5_000, max_replays=2, select={"error_type": "E"})
        assert desk.die_again() == 8
        desk.policy(after_s=1, max_replays=2, select={"error_type": "E"})
    desk.broker.pass_time(100)
    assert len(desk.plans()) == 2
    desk.policy(select={})
    assert desk.ask("policy.list")["policies"] == []


def test_a_new_version_of_the_consumers_begins_a_replay(desk: PolicyDesk) -> None:
    desk.policy(on_version=True, settings=QUICK | {"most": 7})
    desk.join("4.1")
    desk.join("4.1")
    assert desk.plans() == []
    desk.join("4.2")
    [plan] = desk.plans()
    assert (plan["letters"], plan["delivered"]) == (7, 7)
    desk.join("4.1")
    assert len(desk.plans()) == 1


def test_a_policy_that_makes_no_sense_is_refused(desk: PolicyDesk) -> None:
    for args in ({"select": {"states": ["abandoned"]}, "after_s": 9}, {}):
        refused = desk.policy(**args)
        assert type(refused) is BadRequest


def test_a_policy_leaves_the_letters_of_unfinished_plans_alone(desk: PolicyDesk) -> None:
    desk.plan(settings={"rate": 0}, select={"error_type": "B"})  # waits to be started
    desk.policy(after_s=1, select={"error_type": "B"})
    desk.broker.pass_time(20)
    assert [plan["name"] for plan in desk.plans()] == ["p"]
    desk.ask("plan.cancel", name="p", operator="ada")
    desk.broker.pass_time(6)
    assert [plan["letters"] for plan in desk.plans() if plan["by"] == "policy: ada"] == [8]


def test_a_policy_that_has_no_room_for_a_plan_says_so_and_goes_on_later(
    desk: PolicyDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "MAX_UNFINISHED", 1)
    desk.plan(settings={"rate": 0}, select={"error_type": "A"})
    desk.policy(after_s=1, select={"error_type": "B"})
    desk.broker.pass_time(20)
    [policy] = desk.ask("policy.list")["policies"]
    assert "room for its plan" in policy["waits_for"]
    assert "txmq plan list" in policy["waits_for"]
    desk.ask("plan.cancel", name="p", operator="ada")
    desk.broker.pass_time(6)
    [plan] = [plan for plan in desk.plans() if plan["by"] == "policy: ada"]
    [policy] = desk.ask("policy.list")["policies"]
    assert (policy["plan"], policy["waits_for"]) == (plan["name"], "the end of its last plan")


def test_a_policy_makes_no_plans_of_letters_whose_topic_was_deleted(desk: PolicyDesk) -> None:
    desk.policy(after_s=1)
    desk.ask("topic.delete", name="t")
    desk.broker.pass_time(20)
    assert desk.plans() == []


def die_behind_another(desk: PolicyDesk) -> None:
    """Let a letter with error B wait for a younger one, with error C, of its key."""
    joined: Any = desk.client.call(
        "consumer.join", group="o", member="o", instance="o", mode="ordered", topics=["t"]
    )
    for policy, error in (("skip", "B"), ("park", "C")):
        desk.broker.do(AlterGroup("o", RequestedSettings(on_exhausted=policy)))
        offset = desk.broker.engine.state.topics["t"].end_offsets[0]
        desk.send(Message(b"x", "same"))
        wanted = Fetch(joined["generation"], 0, 1 << 22, 10_000, "o", "o")
        assert desk.client.ask(Opcode.FETCH, pack_fetch(wanted)).status == 0
        place = {"topic": "t", "partition": 0, "offset": offset}
        failure = {"type": error, "text": "", "bases": []}
        desk.client.call(
            "consumer.nack", group="o", member="o", generation=joined["generation"], **place,
            error=failure, dead=True,
        )  # fmt: skip


def test_a_policy_makes_no_plans_of_letters_that_wait_for_another_dead_one(
    desk: PolicyDesk,
) -> None:
    """One that its group skipped does so, once another one of its key holds the key."""
    die_behind_another(desk)
    rule = {"group": "o", "after_s": 1, "settings": QUICK, "operator": "ada"}
    desk.ask("policy.set", **rule, select={"error_type": "B"})
    desk.broker.pass_time(20)
    assert desk.plans() == []
    desk.ask("policy.set", **rule)
    desk.broker.pass_time(20)
    [plan] = desk.plans()
    assert (plan["letters"], plan["delivered"]) == (2, 2)


def test_letters_that_wait_fill_no_bounded_plans_of_a_policy(desk: PolicyDesk) -> None:
    die_behind_another(desk)
    settings = QUICK | {"most": 1}
    desk.ask("policy.set", group="o", after_s=1, settings=settings, operator="ada")
    desk.broker.pass_time(20)
    [plan] = desk.plans()
    assert (plan["letters"], plan["delivered"], plan["skipped"]) == (1, 1, 0)


def test_a_search_that_fails_is_repeated(desk: PolicyDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    places = SelectedLetters.places
    failed: list[object] = []

    def fail_once(self: SelectedLetters) -> Any:
        if len(failed) < 2:
            failed.append(self)
            raise OSError("the disk is away")
        return places(self)

    monkeypatch.setattr(SelectedLetters, "places", fail_once)
    desk.policy(after_s=1)
    desk.broker.pass_time(20)
    desk.broker.pass_time(20)
    assert [(plan["by"], plan["delivered"]) for plan in desk.plans()] == [("policy: ada", 40)]


def test_an_operator_whose_plan_or_name_is_like_the_policys_does_not_stop_it(
    desk: PolicyDesk,
) -> None:
    desk.plan("g-auto-2", settings={"rate": 0}, select={"error_type": "B"}, operator="policy")
    desk.policy(after_s=1)
    desk.broker.pass_time(20)
    [taken, own] = sorted(desk.plans(), key=lambda plan: plan["made_at"])
    assert (taken["name"], taken["planned"], own["name"]) == ("g-auto-2", 8, "g-auto-2-2")
    assert own["delivered"] == 32
    desk.plan("later", select={}, operator="policy")  # whose letters are all taken
    assert desk.show("later")["skipped"] == 8


def test_a_policy_waits_while_the_circuit_breaker_is_open(desk: PolicyDesk) -> None:
    group = desk.group()
    open_breaker(group, "f", "E", desk.broker.engine.now())
    desk.policy(after_s=1)
    desk.broker.pass_time(20)
    assert desk.plans() == []
    desk.ask("group.resume", group="g", operator="ada")
    desk.broker.pass_time(10)
    assert [(plan["by"], plan["delivered"]) for plan in desk.plans()] == [("policy: ada", 40)]


def test_a_policy_does_not_widen_its_selection(desk: PolicyDesk) -> None:
    desk.plan(select={})
    assert desk.die_again() == 40
    desk.policy(after_s=1, max_replays=9, select={"max_replays": 0})
    desk.broker.pass_time(20)
    assert [plan["by"] for plan in desk.plans()] == ["ada"]
