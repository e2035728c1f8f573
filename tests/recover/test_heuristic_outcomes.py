"""Branches that an operator has ended against the decision are reported.

A branch that is gone never counts as done.
"""

from __future__ import annotations

import time
from typing import Any
from uuid import UUID

import pytest
from structlog.testing import capture_logs

from tests.recover.coordinators import killed
from tests.recover.world import SAFETY_S, RecoveryWorld
from tests.tx.postgres.prepared_branches import end_manually
from txmq.client.protocol.transaction.tokens import first_token_at
from txmq.errors import ConnectionLost, UnknownTransaction
from txmq.model.message import COMMIT, ROLLBACK, Decision
from txmq.recover.databases import RecoveredDatabase
from txmq.recover.home_brokers import HomeBroker
from txmq.tx.orphans import BranchAction
from txmq.tx.postgres.prepared import Ending
from txmq.tx.postgres.prepared_list import PreparedTransaction
from txmq.tx.xid import XaBranch


def mixed(logs: list[Any]) -> list[str]:
    return [log["gid"] for log in logs if log["event"] == "xa.mixed"]


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Any:
    """End a branch by hand just before the recoverer does."""
    finish = RecoveredDatabase.finish

    def once(gid: str, dsn: str, *, commit: bool) -> None:
        def after_operator(
            self: RecoveredDatabase, branch: PreparedTransaction, decision: Decision
        ) -> Ending:
            if branch.gid == gid:
                end_manually(dsn, gid, commit=commit)
            return finish(self, branch, decision)

        monkeypatch.setattr(RecoveredDatabase, "finish", after_operator)

    return once


@pytest.mark.parametrize("outcome", [COMMIT, ROLLBACK])
def test_a_branch_ended_the_other_way_just_before_is_mixed(
    world: RecoveryWorld, hand: Any, outcome: Decision
) -> None:
    token = world.begin()
    world.decide(token, outcome)
    gid = world.gid(token, "a")
    hand(gid, world.dsns["a"], commit=outcome is ROLLBACK)
    with capture_logs() as logs:
        report = world.recoverer().run_pass()
    assert mixed(logs) == [gid]
    [finding] = [one for one in report.findings if one.name == gid]
    assert (finding.action, finding.done, finding.needs_operator) == (
        BranchAction.HEURISTIC,
        False,
        True,
    )
    [entry] = world.journal(token)
    found = {COMMIT: "rolled back", ROLLBACK: "committed"}[outcome]
    assert (entry["branch"], entry["decided"], entry["found"]) == (gid, outcome.name, found)
    world.audit()


def test_a_branch_ended_the_same_way_just_before_is_done(world: RecoveryWorld, hand: Any) -> None:
    token = world.begin()
    world.decide(token, COMMIT)
    hand(world.gid(token, "a"), world.dsns["a"], commit=True)
    with capture_logs() as logs:
        report = world.recoverer().run_pass()
    assert [one.done for one in report.findings if one.name == world.gid(token, "a")] == [True]
    assert (mixed(logs), world.journal(token)) == ([], [])
    world.audit()


@pytest.mark.parametrize("outcome", [COMMIT, ROLLBACK])
def test_a_branch_ended_the_other_way_between_two_passes_is_mixed(
    world: RecoveryWorld, outcome: Decision
) -> None:
    token = world.begin()
    recoverer = world.recoverer()
    recoverer.run_pass()
    gid = world.gid(token, "b")
    end_manually(world.dsns["b"], gid, commit=outcome is ROLLBACK)
    recoverer.run_pass()  # it may yet be decided that way: nothing is said
    assert world.journal(token) == []
    world.decide(token, outcome)
    with capture_logs() as logs:
        recoverer.run_pass()
        recoverer.run_pass()
    assert mixed(logs) == [gid]
    assert [entry["branch"] for entry in world.journal(token)] == [gid]
    world.audit()


def test_two_recoverers_that_find_the_same_journal_it_once(world: RecoveryWorld) -> None:
    token = world.begin()
    recoverers = [world.recoverer(), world.recoverer()]
    for recoverer in recoverers:
        recoverer.run_pass()
    end_manually(world.dsns["a"], world.gid(token, "a"), commit=False)
    world.decide(token, COMMIT)
    for recoverer in recoverers:
        recoverer.run_pass()
    assert len(world.journal(token)) == 1
    world.audit()


def test_it_is_shown_in_each_pass_until_an_operator_forgets_it(world: RecoveryWorld) -> None:
    token = world.begin()
    recoverer = world.recoverer()
    recoverer.run_pass()
    end_manually(world.dsns["a"], world.gid(token, "a"), commit=False)
    world.decide(token, COMMIT)
    recoverer.run_pass()
    home = world.brokers[0].url
    [shown] = [
        one for one in recoverer.run_pass().findings if one.place == home and one.name == token.hex
    ]
    assert shown.needs_operator
    assert world.gid(token, "a") in shown.reason
    world.clients[0].call("xa.forget", token=token.hex, operator="ada", reason="row written again")
    assert [
        one for one in recoverer.run_pass().findings if one.place == home and one.name == token.hex
    ] == []


def test_what_could_not_be_journalled_is_tried_again(
    world: RecoveryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = world.begin()
    recoverer = world.recoverer()
    recoverer.run_pass()
    end_manually(world.dsns["a"], world.gid(token, "a"), commit=False)
    world.decide(token, COMMIT)

    def lost(*args: object, **kwargs: object) -> None:
        raise ConnectionLost("lost")

    with monkeypatch.context() as broken:
        broken.setattr(recoverer.homes, "record_heuristic", lost)
        recoverer.run_pass()
    assert world.journal(token) == []
    recoverer.run_pass()
    assert [entry["branch"] for entry in world.journal(token)] == [world.gid(token, "a")]
    world.audit()


def test_a_bundle_that_an_operator_decided_otherwise_than_its_home_is_reported(
    world: RecoveryWorld,
) -> None:
    token = world.begin(prepared=())
    world.clients[1].call(
        "tx.decide", token=token.hex, outcome="ROLLBACK", operator="ada", reason="disk full"
    )
    world.decide(token, COMMIT)
    report = world.recoverer().run_pass()
    [shown] = [one for one in report.findings if one.place == world.brokers[1].url]
    assert (shown.action, shown.needs_operator) == (BranchAction.HEURISTIC, True)
    assert shown.reason.startswith(
        "mixed, its home: committed; the group rolled back by ada: disk full"
    )


def test_a_bundle_decided_otherwise_at_the_last_moment_is_mixed(
    world: RecoveryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = world.begin(prepared=())
    world.decide(token, COMMIT)
    decide = HomeBroker.decide

    def after_another(self: HomeBroker, of: UUID, outcome: Decision) -> None:
        decide(self, of, ROLLBACK)
        decide(self, of, outcome)

    monkeypatch.setattr(HomeBroker, "decide", after_another)
    with capture_logs() as logs:
        report = world.recoverer().run_pass()
    [finding] = [one for one in report.findings if one.place == world.brokers[1].url]
    assert (finding.action, finding.done, finding.needs_operator) == (
        BranchAction.HEURISTIC,
        False,
        True,
    )
    assert [log["token"] for log in logs if log["event"] == "xa.mixed"] == [token.hex]
    [row] = world.clients[1].call("xa.list", heuristic=True)["transactions"]
    assert [(entry["branch"], entry["decided"]) for entry in row["heuristics"]] == [
        (f"broker {world.clients[1].log_id}", "COMMIT")
    ]


def test_a_bundle_that_the_broker_refuses_to_decide_holds_up_no_other(
    world: RecoveryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = world.begin(), world.begin()
    for token in (first, second):
        world.decide(token, COMMIT)
    decide = HomeBroker.decide

    def refuses(self: HomeBroker, of: UUID, outcome: Decision) -> None:
        if of == first:
            raise UnknownTransaction("forgotten just now")
        decide(self, of, outcome)

    with monkeypatch.context() as broken:
        broken.setattr(HomeBroker, "decide", refuses)
        report = world.recoverer().run_pass()
    done = {
        one.name: (one.done, one.needs_operator)
        for one in report.findings
        if one.place == world.brokers[1].url
    }
    assert done == {first.hex: (False, True), second.hex: (True, False)}
    world.recoverer().run_pass()
    world.audit()


def test_branches_that_their_coordinator_ended_are_forgotten(world: RecoveryWorld) -> None:
    token = world.begin()
    recoverer = world.recoverer()
    recoverer.run_pass()
    world.decide(token, COMMIT)
    for name, dsn in world.dsns.items():
        end_manually(dsn, world.gid(token, name), commit=True)
    world.clock.now += SAFETY_S
    with capture_logs() as logs:
        recoverer.run_pass()
    assert mixed(logs) == []
    assert [
        key
        for key in recoverer._observations._observed
        if key[1] in {token.hex, world.gid(token, "a")}
    ] == []
    world.audit()


def test_a_branch_that_no_recoverer_ever_saw_is_found_by_comparing(world: RecoveryWorld) -> None:
    died = killed(world, ["xa.before_decision", "xa.after_decision", "xa.after_commits"])
    undecided, decided, finished = map(UUID, died.values())
    gids = {name: world.standing(name) for name in ("a", "b")}
    [gid] = [
        gid
        for gid in gids["a"]
        if (branch := XaBranch.parse(gid)) is not None and branch.token == decided
    ]
    end_manually(world.dsns["a"], gid, commit=False)
    recoverer = world.recoverer()
    with capture_logs() as logs:
        found = [one for _ in range(2) for one in recoverer.run_pass().findings if one.name == gid]
    assert (mixed(logs), [one.needs_operator for one in found]) == ([gid], [True])
    with capture_logs() as logs:
        report = recoverer.verify(first_token_at(0))
        assert recoverer.verify(first_token_at(0)).needs_operator
    assert [one.name for one in report.findings] == [gid]
    assert mixed(logs) == [gid] * 2
    assert [entry["branch"] for entry in world.journal(decided)] == [gid]
    assert world.journal(finished) == world.journal(undecided) == []
    world.clients[0].call(
        "xa.forget", token=decided.hex, operator="ada", reason="row written again"
    )
    with capture_logs() as logs:
        # started anew, it finds it again
        again = [one for one in world.recoverer().run_pass().findings if one.name == gid]
    assert ([(one.needs_operator, one.action) for one in again], mixed(logs)) == (
        [(False, BranchAction.LEAVE)],
        [],
    )
    assert world.journal(decided) == []
    later = world.recoverer().verify(first_token_at(time.time_ns() // 1_000 + 1_000_000))
    assert later == ((), ())
    recoverer.run_pass()
    world.clock.now += SAFETY_S
    recoverer.run_pass()
