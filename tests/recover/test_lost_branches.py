"""Fault 101: a failover loses a prepared branch, whose transaction id is used again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

import psycopg2
import pytest

from tests.cli.test_xa import txmq
from tests.client.real import RealBroker
from tests.fixtures_postgres import create_database, cut_off, wait_for_replay
from tests.recover.world import BY_HAND, RecoveryWorld
from tests.tx.postgres.prepared_branches import roll_back_all_prepared
from tests.tx.postgres.support import rows
from txmq.client.blocking.client import Client
from txmq.client.protocol.awaited import database_branch
from txmq.client.protocol.awaited.database_branch import DatabaseBranch
from txmq.client.protocol.transaction.tokens import first_token_at
from txmq.model.decider import BranchPosition, PostgresBranch
from txmq.model.message import Decision
from txmq.recover.branches import LOST
from txmq.recover.databases import RecoveredDatabase
from txmq.recover.findings import PassReport
from txmq.recover.server_log import BranchTrace, ServerLog
from txmq.testing.postgres_server import OwnServer
from txmq.tx.orphans import BranchAction
from txmq.tx.postgres.blocking import prepare
from txmq.tx.postgres.drivers import driver_of
from txmq.tx.postgres.identity import Server, ServerIdentity, TimelineHistory
from txmq.tx.postgres.prepared import Ending
from txmq.tx.postgres.prepared_list import PreparedTransaction
from txmq.tx.postgres.session import Connection, connect
from txmq.tx.xid import XaBranch

A_DAY_AGO = (datetime.now().astimezone() - timedelta(days=1)).isoformat()


class Failover(NamedTuple):
    """A world whose database `a` is on a primary with an asynchronous standby."""

    world: RecoveryWorld
    primary: OwnServer
    standby: OwnServer
    name: str

    def synced(self) -> None:
        wait_for_replay(self.primary, self.standby)

    def cut(self) -> None:
        cut_off(self.primary, self.standby)

    def commit(self) -> UUID:
        """Commit a transaction of rows in both databases and a message."""
        with ExitStack() as stack:
            connections = [
                stack.enter_context(closing(psycopg2.connect(dsn)))
                for dsn in self.world.dsns.values()
            ]
            with self.world.clients[0].xa(*connections) as tx:
                for connection in connections:
                    with connection.cursor() as cursor:
                        cursor.execute("INSERT INTO effects VALUES (%s)", (tx.token.hex,))
                tx.send(self.world.topic, tx.token.hex.encode())
            self.world.tokens.append(tx.token)
            return tx.token

    def promote(self) -> None:
        """Promote the standby; it is database `a` from now on."""
        self.standby.execute("SELECT pg_promote()")
        self.world.dsns["a"] = self.standby.dsn(self.name)

    def branch(self, token: UUID) -> PostgresBranch:
        """Return the branch in database `a`, as the home broker has it."""
        shown = self.world.clients[0].call("tx.show", token=token.hex)["participants"]
        found = [PostgresBranch._make(one) for one in shown]
        return next(one for one in found if one.database == self.name)

    def use_again(self, xid: int) -> None:
        """Commit transactions until the id of the lost one is given again, to one of
        them or of the server's own.
        """
        given = 0
        with closing(connect(self.world.dsns["a"], application_name="test")) as connection:
            while given < xid:
                with connection.cursor() as cursor:
                    cursor.execute("SELECT pg_current_xact_id()::text::int8")
                    [(given,)] = cursor.fetchall()

    def config(self, directory: Path) -> str:
        lines = ["[xa]", "safety_s = 1"]
        for name, dsn in self.world.dsns.items():
            lines += ["[[xa.database]]", f"name = {json.dumps(name)}", f"dsn = {json.dumps(dsn)}"]
        for broker in self.world.brokers:
            lines += ["[[xa.broker]]", f"url = {json.dumps(broker.url)}"]
        path = directory / "xa.toml"
        path.write_text("\n".join(lines))
        return str(path)


@pytest.fixture
def failover(
    brokers: Sequence[RealBroker],
    clients: Sequence[Client],
    crashable_postgres: OwnServer,
    two_dsns: dict[str, str],
    standby: OwnServer,
) -> Iterator[Failover]:
    name = create_database(crashable_postgres)
    dsns = {"a": crashable_postgres.dsn(name), "b": two_dsns["b"]}
    world = RecoveryWorld(brokers, clients, dsns)
    yield Failover(world, crashable_postgres, standby, name)
    world.close()
    roll_back_all_prepared(crashable_postgres.dsn(name))
    crashable_postgres.drop_database(name)


def lose_a_branch(failover: Failover) -> UUID:
    """Commit a transaction whose branch in `a` a failover loses; use its id again."""
    failover.synced()
    failover.cut()
    token = failover.commit()
    branch = failover.branch(token)
    failover.promote()
    assert branch.xid is not None
    failover.use_again(branch.xid)
    status = rows(
        failover.world.dsns["a"], "SELECT pg_xact_status(%s::text::xid8)", str(branch.xid)
    )
    assert status == [("committed",)]
    assert failover.world.effects("a") == set()
    return token


def about(report: PassReport, gid: str) -> list[BranchAction]:
    return [one.action for one in report.findings if gid in (one.name, one.reason.split()[0])]


def test_a_lost_branch_whose_id_is_used_again_is_reported(failover: Failover) -> None:
    token = lose_a_branch(failover)
    gid = failover.branch(token).gid
    recoverer = failover.world.recoverer()
    first = recoverer.run_pass()
    recoverer.report_alarms(first)
    assert about(first, gid) == [BranchAction.LOST]
    assert first.needs_operator
    for home in failover.world.clients:
        alarms = home.call("broker.alarms")["alarms"]
        assert "xa.lost_branch" in [alarm["name"] for alarm in alarms]
    [entry] = failover.world.journal(token)
    assert (entry["branch"], entry["decided"], entry["found"]) == (gid, "COMMIT", LOST)
    assert "a failover lost it" in entry["reason"]
    assert about(recoverer.run_pass(), gid) == [BranchAction.LOST]  # until it is dealt with
    assert about(recoverer.verify(first_token_at(0)), gid) == [BranchAction.LOST]
    failover.world.audit(stored=1)
    failover.world.clients[0].call("xa.forget", token=token.hex, **BY_HAND)
    assert about(recoverer.run_pass(), gid) == []
    assert about(recoverer.verify(first_token_at(0)), gid) == [BranchAction.LEAVE]


def test_a_lost_branch_that_was_compared_before_the_failover_is_reported(
    failover: Failover,
) -> None:
    kept = failover.commit()
    failover.synced()
    failover.cut()
    token, recoverer = failover.commit(), failover.world.recoverer()
    gid = failover.branch(token).gid
    assert about(recoverer.run_pass(), gid) == []
    failover.promote()
    [database] = [one for one in recoverer.databases if one.name == "a"]
    database.close()
    database._connect = lambda: connect(failover.world.dsns["a"], application_name="test")
    report = recoverer.run_pass()
    assert about(report, gid) == [BranchAction.LOST]
    assert about(report, failover.branch(kept).gid) == []
    failover.world.audit(stored=1)


def test_each_command_reports_a_lost_branch(failover: Failover, tmp_path: Path) -> None:
    gid = failover.branch(lose_a_branch(failover)).gid
    config = failover.config(tmp_path)
    for command, *since in (["doctor"], ["verify", "--since", A_DAY_AGO], ["recover"]):
        status, output = txmq("xa", command, "--config", config, *since)
        [row] = [row for row in output["branches"] if row["gid"] == gid]
        assert (status, row["action"], row["needs_hand"]) == (1, "lost", True)
        assert "a failover lost it" in row["reason"]


def test_a_trace_that_is_believed_blindly_would_be_detected(
    failover: Failover, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServerLog, "trace", lambda *_: BranchTrace())
    with pytest.raises(AssertionError):
        test_a_lost_branch_whose_id_is_used_again_is_reported(failover)


def test_a_prepare_that_is_lost_alone_is_reported_as_rolled_back(
    failover: Failover, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cut_before(connection: Connection, branch: XaBranch) -> None:
        if branch.number == 1:  # in database a
            failover.primary.execute("CREATE TABLE flushed ()")  # the branch's work as well
            failover.primary.execute("DROP TABLE flushed")
            failover.synced()
            failover.cut()
        prepare(connection, branch)

    monkeypatch.setattr(database_branch, "prepare", cut_before)
    token = failover.commit()
    failover.promote()
    report = failover.world.recoverer().run_pass()
    assert about(report, failover.branch(token).gid) == [BranchAction.HEURISTIC]
    failover.world.audit(stored=1)


def test_the_status_of_another_timeline_is_not_believed(
    failover: Failover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pooler leads the coordinator's connection to the new primary."""
    finish = DatabaseBranch.finish
    results: list[bool | None] = []

    async def switched_over(branch: DatabaseBranch, decision: Decision) -> bool | None:
        if branch.branch.number == 2:
            return await finish(branch, decision)
        failover.promote()
        assert branch._work.xid is not None
        failover.use_again(branch._work.xid)
        with closing(psycopg2.connect(failover.world.dsns["a"])) as there:
            monkeypatch.setattr(branch, "_driver", driver_of(there))
            results.append(await finish(branch, decision))
            monkeypatch.undo()
        return results[0]

    failover.synced()
    failover.cut()
    monkeypatch.setattr(DatabaseBranch, "finish", switched_over)
    token = failover.commit()
    assert results == [None]
    gid = failover.branch(token).gid
    assert about(failover.world.recoverer().run_pass(), gid) == [BranchAction.LOST]


def test_recovery_does_not_believe_the_status_of_another_timeline(
    failover: Failover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failover comes between the list of branches and the end of one."""
    finish = RecoveredDatabase.finish
    endings: list[Ending] = []

    def switched_over(
        database: RecoveredDatabase, branch: PreparedTransaction, decision: Decision
    ) -> Ending:
        failover.promote()
        failover.use_again(branch.xid)
        database.close()
        there = failover.world.dsns["a"]
        database._connect = lambda: connect(there, application_name="test")
        endings.append(finish(database, branch, decision))
        return endings[0]

    failover.synced()
    failover.cut()

    async def dies(*_: object) -> None:
        return None

    with monkeypatch.context() as patched:
        patched.setattr(DatabaseBranch, "finish", dies)  # the coordinator
        token = failover.commit()
    gid = failover.branch(token).gid
    recoverer = failover.world.recoverer("a")
    with monkeypatch.context() as patched:
        patched.setattr(RecoveredDatabase, "finish", switched_over)
        report = recoverer.run_pass()
    assert endings == [Ending.UNKNOWN]
    assert [one.done for one in report.findings if one.name == gid] == [False, False]
    assert about(report, gid) == [BranchAction.COMMIT, BranchAction.LOST]
    assert about(recoverer.run_pass(), gid) == [BranchAction.LOST]


def test_a_branch_that_the_standby_has_is_not_reported(failover: Failover) -> None:
    token = failover.commit()
    failover.synced()
    failover.cut()
    failover.promote()
    report = failover.world.recoverer().run_pass()
    assert about(report, failover.branch(token).gid) == []
    failover.world.audit(stored=1)


def test_a_server_that_was_left_behind_is_a_trouble(failover: Failover) -> None:
    failover.synced()
    failover.cut()
    left = failover.world.dsns["a"]
    failover.promote()
    token = failover.commit()
    gid = failover.branch(token).gid
    report = failover.world.recoverer(dsns={"a": left}).run_pass()
    assert about(report, gid) == []
    assert "left behind by a failover" in dict(report.troubles)["a"]
    failover.world.audit(stored=1)


IDENTITY = ServerIdentity(7, 3, 5)
# The ends of earlier timelines, the position of a branch, and parts of the two answers.
TRACES: dict[str, tuple[dict[int, int] | None, BranchPosition | None, str, str]] = {
    "no position": (None, None, "", ""),
    "still there": (None, BranchPosition(3, 900), "", ""),
    "a restored copy": (None, BranchPosition(3, 1_001), "the server's log ends at", ""),
    "left behind": (None, BranchPosition(4, 1), "", "left behind"),
    "no history": (None, BranchPosition(2, 1), "", "cannot be told"),
    "kept": ({2: 500}, BranchPosition(2, 499), "", ""),
    "begun where it ended": ({2: 500}, BranchPosition(2, 500), "a failover lost it", ""),
    "another line": ({1: 500}, BranchPosition(2, 1), "does not come from", ""),
}


def server_log(ends: dict[int, int] | None) -> ServerLog:
    history = None if ends is None else TimelineHistory(3, ends)
    return ServerLog(
        Server(IDENTITY, in_recovery=False, version=1, max_prepared_transactions=1, position=1_000),
        history,
    )


@pytest.mark.parametrize("case", TRACES)
def test_what_a_log_tells_of_a_branch(case: str) -> None:
    ends, at, lost, untold = TRACES[case]
    trace = server_log(ends).trace(at)
    assert (bool(trace.lost), bool(trace.untold)) == (bool(lost), bool(untold))
    assert lost in trace.lost
    assert untold in trace.untold
