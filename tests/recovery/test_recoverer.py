"""Recovery follows the home broker's log, and touches nothing that the log does not
speak of.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from uuid import uuid4

import pytest
from psycopg2.extensions import parse_dsn
from structlog.testing import capture_logs

from tests.client.real import RealBroker
from tests.postgres.orphans import end_by_hand, gid_of, leave, login_role
from tests.postgres.support import new_token as old_token
from tests.postgres.support import rows
from tests.recovery.world import SAFETY_S, World
from txmq.client.blocking.client import Client
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import RequestRejected
from txmq.model.message import COMMIT, ROLLBACK
from txmq.recover.by_hand import ByHand, force
from txmq.recover.findings import Report
from txmq.testing.postgres import OwnServer
from txmq.tx.orphans import Action, Word


def actions(report: Report, world: World) -> list[tuple[str, Action, bool]]:
    """Where what was found of the world's own transactions, and whether it is done."""
    tokens = set(world.tokens)
    return [(one.where, one.action, one.done) for one in report.findings if one.token in tokens]


def pass_after_safety(world: World, recoverer: object) -> Report:
    world.clock.now += SAFETY_S
    report: Report = recoverer.go()  # type: ignore[attr-defined]
    return report


@pytest.mark.parametrize("outcome", [COMMIT, ROLLBACK])
def test_what_is_decided_is_finished_everywhere_in_the_first_pass(
    world: World, outcome: object
) -> None:
    token = world.begin()
    world.decide(token, COMMIT if outcome is COMMIT else ROLLBACK)
    report = world.recoverer().go()
    action = Action.COMMIT if outcome is COMMIT else Action.ROLL_BACK
    assert actions(report, world) == [
        ("a", action, True),
        ("b", action, True),
        (world.brokers[1].url, action, True),
    ]
    assert world.effects("a") == ({token.hex} if outcome is COMMIT else set())
    world.audit()


@pytest.mark.parametrize("stored", [0, 1, 2])
def test_what_is_undecided_is_left_until_the_safety_interval_is_over_and_then_rolled_back(
    world: World, stored: int
) -> None:
    token = world.begin(stored=stored)
    recoverer = world.recoverer()
    first = recoverer.go()
    assert {(action, done) for _, action, done in actions(first, world)} == {(Action.WAIT, False)}
    assert len(world.standing("a")) == 1
    assert first.waiting
    second = pass_after_safety(world, recoverer)
    assert {(action, done) for _, action, done in actions(second, world)} == {
        (Action.ROLL_BACK, True)
    }
    assert world.state(token) == "ROLLED_BACK"
    world.audit()


def test_after_recovery_a_late_coordinator_can_neither_store_nor_commit(world: World) -> None:
    token = world.begin(stored=0)
    recoverer = world.recoverer()
    recoverer.go()
    pass_after_safety(world, recoverer)
    with pytest.raises(RequestRejected):
        world.decide(token, COMMIT)
    world.store(world.clients[0], token)
    assert world.state(token) == "ROLLED_BACK"
    world.audit()


def test_a_decision_that_comes_within_the_safety_interval_is_followed(world: World) -> None:
    token = world.begin()
    recoverer = world.recoverer()
    recoverer.go()
    world.decide(token, COMMIT)
    pass_after_safety(world, recoverer)
    assert world.effects("a") == world.effects("b") == {token.hex}
    world.audit()


def test_a_branch_that_was_not_prepared_is_missed_by_the_doctor_alone(world: World) -> None:
    token = world.begin(prepared=("b",))
    recoverer = world.recoverer()
    gid = world.gid(token, "a")
    [missing] = [one for one in recoverer.look().findings if one.what == gid]
    assert (missing.token, missing.action, missing.prepared, missing.needs_hand) == (
        token,
        Action.WAIT,
        None,
        False,
    )
    assert "not prepared" in missing.reason
    recoverer.go()
    pass_after_safety(world, recoverer)
    world.audit()


FOREIGN = (
    "131075_Z3RyaWQ=_YnF1YWw=",  # another manager's
    'it\'s "quoted"; DROP TABLE effects; --',
    "x" * 199,
    "1954049393_b3JkZXJzOjAwMDAwMDAwMDAwMDp4eA==_MQ==",  # our format, no token
)


@pytest.mark.parametrize("gid", FOREIGN)
def test_foreign_branches_are_left_alone_for_ever(world: World, gid: str) -> None:
    leave(world.dsns["a"], gid, "INSERT INTO effects VALUES ('foreign')")
    recoverer = world.recoverer(alarm_s=0.001)
    recoverer.go()
    with capture_logs() as logs:
        report = pass_after_safety(world, recoverer)
    [finding] = [one for one in report.findings if one.where == "a"]
    assert (finding.what, finding.action, finding.done, finding.token) == (
        gid,
        Action.LEAVE,
        False,
        None,
    )
    assert world.standing("a") == [gid]
    assert not report.needs_hand
    assert [log["event"] for log in logs if log.get("what") == gid] == []


def test_a_branch_of_a_log_that_nobody_has_is_left_alone_with_an_alarm(world: World) -> None:
    lost, token = uuid4(), new_token()
    gid = gid_of(lost, token)
    leave(world.dsns["a"], gid, "INSERT INTO effects VALUES ('lost')")
    recoverer = world.recoverer()
    recoverer.go()
    with capture_logs() as logs:
        report = pass_after_safety(world, recoverer)
        world.clock.now += 60
        recoverer.go()
    [finding] = [one for one in report.findings if one.where == "a"]
    assert (finding.word, finding.action, finding.needs_hand) == (
        Word.UNKNOWN_LOG,
        Action.LEAVE,
        True,
    )
    assert world.standing("a") == [gid]
    assert [log["event"] for log in logs if log.get("what") == gid] == ["xa.needs_operator"]
    for client in world.clients:  # nobody was made to decide it
        with pytest.raises(RequestRejected, match="never stored"):
            client.call("tx.show", token=token.hex)


def test_a_branch_older_than_any_outcome_is_for_a_person_to_decide(world: World) -> None:
    week_ago_ms = int((time.time() - 8 * 86_400) * 1_000)
    gid = gid_of(world.clients[0].log_id, old_token(week_ago_ms))
    leave(world.dsns["a"], gid, "INSERT INTO effects VALUES ('old')")
    recoverer = world.recoverer()
    recoverer.go()
    report = pass_after_safety(world, recoverer)
    [finding] = [one for one in report.findings if one.where == "a"]
    assert (finding.word, finding.action, finding.needs_hand) == (
        Word.FORGOTTEN,
        Action.HEURISTIC,
        True,
    )
    assert world.standing("a") == [gid]
    forced = force(recoverer, ByHand(gid, ROLLBACK, "ada", "nobody remembers it"))
    assert (forced.ending, forced.journal) == (
        "DONE",
        "",
    )  # no broker takes a note of what it cannot know


def test_a_branch_whose_group_has_another_decider_is_left_to_it(world: World) -> None:
    token = new_token()
    world.store(world.clients[0], token, ("checker", "orders"))
    gid = world.prepare("a", token)
    recoverer = world.recoverer()
    recoverer.go()
    report = pass_after_safety(world, recoverer)
    [finding] = [one for one in report.findings if one.where == "a"]
    assert (finding.word, finding.action, finding.needs_hand) == (Word.REFUSED, Action.LEAVE, True)
    assert (world.standing("a"), world.state(token)) == ([gid], "UNDECIDED")
    world.clients[0].call(
        "tx.decide", token=token.hex, outcome="ROLLBACK", operator="ada", reason="test"
    )
    recoverer.go()
    assert world.standing("a") == []


def test_the_same_token_under_two_logs_is_two_transactions(world: World) -> None:
    token = world.begin()
    world.decide(token, COMMIT)
    stranger = gid_of(uuid4(), token, 1)
    leave(world.dsns["b"], stranger, "INSERT INTO effects VALUES ('stranger')")
    world.recoverer().go()
    assert world.standing("b") == [stranger]
    end_by_hand(world.dsns["b"], stranger, commit=False)
    world.audit()


def test_without_its_home_broker_a_branch_waits_however_old_it_is(world: World) -> None:
    token = world.begin()
    world.decide(token, COMMIT)
    recoverer = world.recoverer(patience_s=1.0)
    world.brokers[0].kill()
    try:
        recoverer.go()
        report = pass_after_safety(world, recoverer)
        found = {one.word for one in report.findings if one.token == token}
        assert found == {Word.SILENT}
        assert [where for where, _ in report.troubles] == [world.brokers[0].url]
        assert len(world.standing("a")) == 1
    finally:
        world.brokers[0].start()
    recoverer.go()
    assert world.effects("a") == {token.hex}
    world.audit()


def test_a_branch_of_another_owner_is_finished_by_a_member_of_the_role(world: World) -> None:
    dsn = world.dsns["a"]
    rows(dsn, "GRANT ALL ON effects TO public")
    with login_role(dsn, "shop") as (owner, owned), login_role(dsn, "keeper") as (keeper, keeping):
        token = world.begin(prepared=("b",))
        gid = world.prepare("a", token, owned)
        world.decide(token, COMMIT)
        recoverer = world.recoverer(dsns={"a": keeping})
        with capture_logs() as logs:
            report = recoverer.go()
        [finding] = [one for one in report.findings if one.what == gid]
        assert not finding.done
        assert finding.needs_hand
        assert f'GRANT "{owner}" TO "{keeper}"' in finding.reason
        assert [(log["event"], log["owner"]) for log in logs if log.get("what") == gid] == [
            ("xa.needs_operator", owner)
        ]
        rows(dsn, f"GRANT {owner} TO {keeper}")
        assert [one.done for one in recoverer.go().findings if one.what == gid] == [True]
        assert world.effects("a") == {token.hex}
    world.recoverer().go()
    world.audit()


def test_a_branch_of_another_database_is_finished_there_or_told_of(world: World) -> None:
    token = world.begin()
    world.decide(token, COMMIT)
    report = world.recoverer("a").go()
    name = parse_dsn(world.dsns["b"])["dbname"]
    elsewhere = [one for one in report.findings if one.where == f"a/{name}"]
    assert [(one.what, one.action, one.needs_hand) for one in elsewhere] == [
        (world.gid(token, "b"), Action.LEAVE, True)
    ]
    assert name in elsewhere[0].reason
    assert world.standing("b") == [world.gid(token, "b")]
    report = world.recoverer("a", "b").go()
    assert [one for one in report.findings if "/" in one.where.removeprefix("txmq://")] == []
    world.audit()


def test_a_database_that_is_away_keeps_nobody_else_waiting(world: World) -> None:
    token = world.begin()
    world.decide(token, COMMIT)
    away = {"a": "host=127.0.0.1 port=1 connect_timeout=1 password=hunter2", "b": world.dsns["b"]}
    report = world.recoverer(dsns=away).go()
    assert [where for where, _ in report.troubles] == ["a"]
    assert "hunter2" not in report.troubles[0][1]
    assert world.effects("b") == {token.hex}
    world.recoverer().go()
    world.audit()


def test_branches_that_survive_a_crash_of_their_server_are_finished(
    brokers: Sequence[RealBroker],
    clients: Sequence[Client],
    crashable_postgres: OwnServer,
    crashable_database: str,
) -> None:
    world = World(brokers, clients, {"a": crashable_database})
    recoverer = world.recoverer()
    committed, undecided = world.begin(prepared=("a",)), world.begin(prepared=("a",))
    recoverer.go()
    world.decide(committed, COMMIT)
    crashable_postgres.kill_server()
    crashable_postgres.start()
    for _ in range(2):  # the first pass finds its connection broken
        pass_after_safety(world, recoverer)
    assert world.effects("a") == {committed.hex}
    assert world.state(undecided) == "ROLLED_BACK"
    world.audit()
    world.close()


def test_an_orphan_is_told_of_with_its_locks_once_it_is_old(world: World) -> None:
    token = world.begin()
    with closing(world.recoverer(alarm_s=3_600.0)) as patient, capture_logs() as logs:
        patient.go()
    assert [log for log in logs if log["event"] == "xa.orphan"] == []
    recoverer = world.recoverer(alarm_s=0.001)
    with capture_logs() as logs:
        recoverer.go()
    [told] = [
        log for log in logs if log["event"] == "xa.orphan" and log["what"] == world.gid(token, "a")
    ]
    assert told["action"] == "wait"
    assert told["locks"] == ["effects RowExclusiveLock"]
    assert told["age_s"] >= 0
    pass_after_safety(world, recoverer)
    world.audit()


def test_an_alarm_is_repeated_after_its_time_and_not_in_each_pass(world: World) -> None:
    leave(world.dsns["a"], gid_of(uuid4(), new_token()), "INSERT INTO effects VALUES ('lost')")
    recoverer = world.recoverer(alarm_s=60.0)
    with capture_logs() as logs:
        for _ in range(7):
            recoverer.go()
            world.clock.now += 10
    assert [log["event"] for log in logs if log["event"].startswith("xa.")] == [
        "xa.needs_operator"
    ] * 2


def test_all_brokers_list_what_needs_an_operator_until_it_is_over(world: World) -> None:
    lost = gid_of(uuid4(), new_token())  # of a log that nobody has
    leave(world.dsns["a"], lost, "INSERT INTO effects VALUES ('lost')")
    recoverer = world.recoverer(alarm_s=0.001)
    for told in (True, False):
        recoverer.tell_brokers(recoverer.go())
        for client in world.clients:
            listed = client.call("broker.alarms")["alarms"]
            # What recoverers of other tests told these brokers is listed for a while,
            # too.
            alarms = [alarm for alarm in listed if lost in alarm["text"]]
            assert [alarm["name"] for alarm in alarms] == ["xa.needs_operator"] * told
            assert all("locks effects RowExclusiveLock" in alarm["text"] for alarm in alarms)
        if told:
            end_by_hand(world.dsns["a"], lost, commit=False)
