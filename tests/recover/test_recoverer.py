"""Recovery follows the home broker's log, and leaves everything else alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from uuid import uuid4

import pytest
from psycopg2.extensions import parse_dsn
from structlog.testing import capture_logs

from tests.client.real import RealBroker
from tests.recover.world import SAFETY_S, RecoveryWorld
from tests.tx.postgres.prepared_branches import end_manually, gid_of, leave_prepared, login_role
from tests.tx.postgres.support import new_token as old_token
from tests.tx.postgres.support import rows
from txmq.client.blocking.client import Client
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import RequestRejected
from txmq.model.decider import ByChecker
from txmq.model.message import COMMIT, ROLLBACK
from txmq.recover.findings import PassReport
from txmq.recover.operator_decision import OperatorDecision, force_branch
from txmq.recover.recoverer import XaRecoverer
from txmq.testing.postgres_server import OwnServer
from txmq.tx.orphans import BranchAction, KnownOutcome


def actions(report: PassReport, world: RecoveryWorld) -> list[tuple[str, BranchAction, bool]]:
    """Return place, action and completion of the findings of the world's
    transactions.
    """
    tokens = set(world.tokens)
    return [(one.place, one.action, one.done) for one in report.findings if one.token in tokens]


def pass_after_safety(world: RecoveryWorld, recoverer: XaRecoverer) -> PassReport:
    world.clock.now += SAFETY_S
    report: PassReport = recoverer.run_pass()
    return report


@pytest.mark.parametrize("outcome", [COMMIT, ROLLBACK])
def test_what_is_decided_is_finished_everywhere_in_the_first_pass(
    world: RecoveryWorld, outcome: object
) -> None:
    token = world.begin()
    world.decide(token, COMMIT if outcome is COMMIT else ROLLBACK)
    report = world.recoverer().run_pass()
    action = BranchAction.COMMIT if outcome is COMMIT else BranchAction.ROLL_BACK
    assert actions(report, world) == [
        ("a", action, True),
        ("b", action, True),
        (world.brokers[1].url, action, True),
    ]
    assert world.effects("a") == ({token.hex} if outcome is COMMIT else set())
    world.audit()


@pytest.mark.parametrize("stored", [0, 1, 2])
def test_what_is_undecided_is_left_until_the_safety_interval_is_over_and_then_rolled_back(
    world: RecoveryWorld, stored: int
) -> None:
    token = world.begin(stored=stored)
    recoverer = world.recoverer()
    first = recoverer.run_pass()
    assert {(action, done) for _, action, done in actions(first, world)} == {
        (BranchAction.WAIT, False)
    }
    assert len(world.standing("a")) == 1
    assert first.waiting
    second = pass_after_safety(world, recoverer)
    assert {(action, done) for _, action, done in actions(second, world)} == {
        (BranchAction.ROLL_BACK, True)
    }
    assert world.state(token) == "ROLLED_BACK"
    world.audit()


def test_after_recovery_a_late_coordinator_can_neither_store_nor_commit(
    world: RecoveryWorld,
) -> None:
    token = world.begin(stored=0)
    recoverer = world.recoverer()
    recoverer.run_pass()
    pass_after_safety(world, recoverer)
    with pytest.raises(RequestRejected):
        world.decide(token, COMMIT)
    world.store(world.clients[0], token)
    assert world.state(token) == "ROLLED_BACK"
    world.audit()


def test_a_decision_that_comes_within_the_safety_interval_is_followed(world: RecoveryWorld) -> None:
    token = world.begin()
    recoverer = world.recoverer()
    recoverer.run_pass()
    world.decide(token, COMMIT)
    pass_after_safety(world, recoverer)
    assert world.effects("a") == world.effects("b") == {token.hex}
    world.audit()


def test_a_branch_that_was_not_prepared_is_missed_by_the_doctor_alone(world: RecoveryWorld) -> None:
    token = world.begin(prepared=("b",))
    recoverer = world.recoverer()
    gid = world.gid(token, "a")
    [missing] = [one for one in recoverer.inspect().findings if one.name == gid]
    assert (missing.token, missing.action, missing.prepared, missing.needs_operator) == (
        token,
        BranchAction.WAIT,
        None,
        False,
    )
    assert "not prepared" in missing.reason
    recoverer.run_pass()
    pass_after_safety(world, recoverer)
    world.audit()


FOREIGN = (
    "131075_Z3RyaWQ=_YnF1YWw=",  # another manager's
    'it\'s "quoted"; DROP TABLE effects; --',
    "x" * 199,
    "1954049393_b3JkZXJzOjAwMDAwMDAwMDAwMDp4eA==_MQ==",  # our format, no token
)


@pytest.mark.parametrize("gid", FOREIGN)
def test_foreign_branches_are_left_alone_for_ever(world: RecoveryWorld, gid: str) -> None:
    leave_prepared(world.dsns["a"], gid, "INSERT INTO effects VALUES ('foreign')")
    recoverer = world.recoverer(alarm_s=0.001)
    recoverer.run_pass()
    with capture_logs() as logs:
        report = pass_after_safety(world, recoverer)
    [finding] = [one for one in report.findings if one.place == "a"]
    assert (finding.name, finding.action, finding.done, finding.token) == (
        gid,
        BranchAction.LEAVE,
        False,
        None,
    )
    assert world.standing("a") == [gid]
    assert not report.needs_operator
    assert [log["event"] for log in logs if log.get("what") == gid] == []


def test_a_branch_of_an_unknown_log_is_left_alone_with_an_alarm(world: RecoveryWorld) -> None:
    lost, token = uuid4(), new_token()
    gid = gid_of(lost, token)
    leave_prepared(world.dsns["a"], gid, "INSERT INTO effects VALUES ('lost')")
    recoverer = world.recoverer()
    recoverer.run_pass()
    with capture_logs() as logs:
        report = pass_after_safety(world, recoverer)
        world.clock.now += 60
        recoverer.run_pass()
    [finding] = [one for one in report.findings if one.place == "a"]
    assert (finding.outcome, finding.action, finding.needs_operator) == (
        KnownOutcome.UNKNOWN_LOG,
        BranchAction.LEAVE,
        True,
    )
    assert world.standing("a") == [gid]
    assert [log["event"] for log in logs if log.get("what") == gid] == ["xa.needs_operator"]
    for client in world.clients:  # nobody was made to decide it
        with pytest.raises(RequestRejected, match="never stored"):
            client.call("tx.show", token=token.hex)


def test_a_branch_older_than_any_outcome_is_for_a_person_to_decide(world: RecoveryWorld) -> None:
    week_ago_ms = int((time.time() - 8 * 86_400) * 1_000)
    gid = gid_of(world.clients[0].log_id, old_token(week_ago_ms))
    leave_prepared(world.dsns["a"], gid, "INSERT INTO effects VALUES ('old')")
    recoverer = world.recoverer()
    recoverer.run_pass()
    report = pass_after_safety(world, recoverer)
    [finding] = [one for one in report.findings if one.place == "a"]
    assert (finding.outcome, finding.action, finding.needs_operator) == (
        KnownOutcome.FORGOTTEN,
        BranchAction.HEURISTIC,
        True,
    )
    assert world.standing("a") == [gid]
    forced = force_branch(recoverer, OperatorDecision(gid, ROLLBACK, "ada", "nobody remembers it"))
    assert (forced.ending, forced.journal) == (
        "DONE",
        "",
    )  # no broker takes a note of what it cannot know


def test_a_branch_whose_bundle_has_another_decider_is_left_to_it(world: RecoveryWorld) -> None:
    token = new_token()
    world.store(world.clients[0], token, ByChecker("orders"))
    gid = world.prepare("a", token)
    recoverer = world.recoverer()
    recoverer.run_pass()
    report = pass_after_safety(world, recoverer)
    [finding] = [one for one in report.findings if one.place == "a"]
    assert (finding.outcome, finding.action, finding.needs_operator) == (
        KnownOutcome.REFUSED,
        BranchAction.LEAVE,
        True,
    )
    assert (world.standing("a"), world.state(token)) == ([gid], "UNDECIDED")
    world.clients[0].call(
        "tx.decide", token=token.hex, outcome="ROLLBACK", operator="ada", reason="test"
    )
    recoverer.run_pass()
    assert world.standing("a") == []


def test_the_same_token_under_two_logs_is_two_transactions(world: RecoveryWorld) -> None:
    token = world.begin()
    world.decide(token, COMMIT)
    stranger = gid_of(uuid4(), token, 1)
    leave_prepared(world.dsns["b"], stranger, "INSERT INTO effects VALUES ('stranger')")
    world.recoverer().run_pass()
    assert world.standing("b") == [stranger]
    end_manually(world.dsns["b"], stranger, commit=False)
    world.audit()


def test_without_its_home_broker_a_branch_waits_however_old_it_is(world: RecoveryWorld) -> None:
    token = world.begin()
    world.decide(token, COMMIT)
    recoverer = world.recoverer(away=world.brokers[0].url)
    world.brokers[0].kill()
    try:
        recoverer.run_pass()
        report = pass_after_safety(world, recoverer)
        found = {one.outcome for one in report.findings if one.token == token}
        assert found == {KnownOutcome.SILENT}
        assert [where for where, _ in report.troubles] == [world.brokers[0].url]
        assert len(world.standing("a")) == 1
    finally:
        world.brokers[0].start()
    world.recoverer().run_pass()
    assert world.effects("a") == {token.hex}
    world.audit()


def test_a_branch_of_another_owner_is_finished_by_a_member_of_the_role(
    world: RecoveryWorld,
) -> None:
    dsn = world.dsns["a"]
    rows(dsn, "GRANT ALL ON effects TO public")
    with login_role(dsn, "shop") as (owner, owned), login_role(dsn, "keeper") as (keeper, keeping):
        token = world.begin(prepared=("b",))
        gid = world.prepare("a", token, owned)
        world.decide(token, COMMIT)
        recoverer = world.recoverer(dsns={"a": keeping})
        with capture_logs() as logs:
            report = recoverer.run_pass()
        [finding] = [one for one in report.findings if one.name == gid]
        assert not finding.done
        assert finding.needs_operator
        assert f'GRANT "{owner}" TO "{keeper}"' in finding.reason
        assert [(log["event"], log["owner"]) for log in logs if log.get("what") == gid] == [
            ("xa.needs_operator", owner)
        ]
        rows(dsn, f"GRANT {owner} TO {keeper}")
        assert [one.done for one in recoverer.run_pass().findings if one.name == gid] == [True]
        assert world.effects("a") == {token.hex}
    world.recoverer().run_pass()
    world.audit()


def test_a_branch_of_another_database_is_finished_there_or_reported(world: RecoveryWorld) -> None:
    token = world.begin()
    world.decide(token, COMMIT)
    report = world.recoverer("a").run_pass()
    name = parse_dsn(world.dsns["b"])["dbname"]
    elsewhere = [one for one in report.findings if one.place == f"a/{name}"]
    assert [(one.name, one.action, one.needs_operator) for one in elsewhere] == [
        (world.gid(token, "b"), BranchAction.LEAVE, True)
    ]
    assert name in elsewhere[0].reason
    assert world.standing("b") == [world.gid(token, "b")]
    report = world.recoverer("a", "b").run_pass()
    assert [one for one in report.findings if "/" in one.place.removeprefix("txmq://")] == []
    world.audit()


def test_a_database_that_is_away_does_not_hold_up_the_others(world: RecoveryWorld) -> None:
    token = world.begin()
    world.decide(token, COMMIT)
    away = {"a": "host=127.0.0.1 port=1 connect_timeout=1 password=hunter2", "b": world.dsns["b"]}
    report = world.recoverer(dsns=away).run_pass()
    assert [where for where, _ in report.troubles] == ["a"]
    assert "hunter2" not in report.troubles[0][1]
    assert world.effects("b") == {token.hex}
    world.recoverer().run_pass()
    world.audit()


def test_branches_that_survive_a_crash_of_their_server_are_finished(
    brokers: Sequence[RealBroker],
    clients: Sequence[Client],
    crashable_postgres: OwnServer,
    crashable_database: str,
) -> None:
    world = RecoveryWorld(brokers, clients, {"a": crashable_database})
    recoverer = world.recoverer()
    committed, undecided = world.begin(prepared=("a",)), world.begin(prepared=("a",))
    recoverer.run_pass()
    world.decide(committed, COMMIT)
    crashable_postgres.kill_server()
    crashable_postgres.start()
    for _ in range(2):  # the first pass finds its connection broken
        pass_after_safety(world, recoverer)
    assert world.effects("a") == {committed.hex}
    assert world.state(undecided) == "ROLLED_BACK"
    world.audit()
    world.close()


def test_an_old_orphan_is_reported_with_its_locks(world: RecoveryWorld) -> None:
    token = world.begin()
    with closing(world.recoverer(alarm_s=3_600.0)) as patient, capture_logs() as logs:
        patient.run_pass()
    assert [log for log in logs if log["event"] == "xa.orphan"] == []
    recoverer = world.recoverer(alarm_s=0.001)
    with capture_logs() as logs:
        recoverer.run_pass()
    [told] = [
        log for log in logs if log["event"] == "xa.orphan" and log["what"] == world.gid(token, "a")
    ]
    assert told["action"] == "wait"
    assert told["locks"] == ["effects RowExclusiveLock"]
    assert told["age_s"] >= 0
    pass_after_safety(world, recoverer)
    world.audit()


def test_an_alarm_is_repeated_after_its_time_and_not_in_each_pass(world: RecoveryWorld) -> None:
    gid = gid_of(uuid4(), new_token())
    leave_prepared(world.dsns["a"], gid, "INSERT INTO effects VALUES ('lost')")
    recoverer = world.recoverer(alarm_s=60.0)
    with capture_logs() as logs:
        for _ in range(7):
            recoverer.run_pass()
            world.clock.now += 10
    assert [log["event"] for log in logs if log["event"].startswith("xa.")] == [
        "xa.needs_operator"
    ] * 2


def test_all_brokers_list_what_needs_an_operator_until_it_is_over(world: RecoveryWorld) -> None:
    lost = gid_of(uuid4(), new_token())  # of a log that nobody has
    leave_prepared(world.dsns["a"], lost, "INSERT INTO effects VALUES ('lost')")
    recoverer = world.recoverer(alarm_s=0.001)
    for told in (True, False):
        recoverer.report_alarms(recoverer.run_pass())
        for client in world.clients:
            listed = client.call("broker.alarms")["alarms"]
            # What recoverers of other tests told these brokers is listed for a while,
            # too.
            alarms = [alarm for alarm in listed if lost in alarm["text"]]
            assert [alarm["name"] for alarm in alarms] == ["xa.needs_operator"] * told
            assert all("locks effects RowExclusiveLock" in alarm["text"] for alarm in alarms)
        if told:
            end_manually(world.dsns["a"], lost, commit=False)
