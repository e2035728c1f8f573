"""A copy of a database from before a PREPARE takes its place, on the same timeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from psycopg2.extensions import parse_dsn

from tests.cli.test_xa import txmq
from tests.client.real import RealBroker
from tests.fixtures_postgres import copied
from tests.recover.test_lost_branches import A_DAY_AGO, Failover, about
from tests.recover.world import RecoveryWorld
from tests.tx.postgres.prepared_branches import roll_back_all_prepared
from tests.tx.postgres.support import rows
from txmq.client.blocking.connect import connect
from txmq.client.protocol.transaction.tokens import first_token_at
from txmq.testing.postgres_server import OwnServer
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.tx.orphans import BranchAction

REPORTS = "SELECT coalesce(sum(reports), 0)::int FROM txmq_broker"
POSITION = "SELECT (pg_current_wal_flush_lsn() - '0/0')::int8"
FILLER = "SELECT pg_logical_emit_message(false, 'filler', repeat('x', 100000))"


@pytest.fixture
def broker(crashable_database: str, tmp_path: Path) -> Iterator[RealBroker]:
    """A broker with a resolver of database `a`."""
    running = RealBroker(tmp_path / "home", [crashable_database])
    yield running
    running.stop()


@pytest.fixture
def site(
    broker: RealBroker,
    crashable_postgres: OwnServer,
    crashable_database: str,
    two_dsns: dict[str, str],
) -> Iterator[Failover]:
    dsns = {"a": crashable_database, "b": two_dsns["b"]}
    with connect(broker.url, service="orders", timeout=PATIENCE_S) as client:
        world = RecoveryWorld([broker], [client], dsns)
        name = parse_dsn(crashable_database)["dbname"]
        wait_until(lambda: number(crashable_database, REPORTS), what="the broker has reported")
        yield Failover(world, crashable_postgres, crashable_postgres, name)
        world.close()
    roll_back_all_prepared(crashable_database)


def number(dsn: str, query: str) -> int:
    [(found,)] = rows(dsn, query)
    return int(str(found))


def commit_with_report(site: Failover) -> str:
    """Commit a transaction; return its gid in `a` once a report is behind it there."""
    before = number(site.world.dsns["a"], REPORTS)
    token = site.commit()
    wait_until(lambda: number(site.world.dsns["a"], REPORTS) > before, what="a report behind it")
    return site.branch(token).gid


def write_past(site: Failover, position: int) -> None:
    """Have the copy write its log beyond what the original has written."""
    with closing(site.standby.connect()) as connection, connection.cursor() as cursor:
        end = 0
        while end <= position:
            cursor.execute(FILLER)
            cursor.execute(POSITION)
            [(end,)] = cursor.fetchall()


@pytest.mark.parametrize("its_id", ["used again", "free"])
def test_a_branch_that_a_copy_lacks_is_reported_though_its_log_went_on(
    site: Failover, tmp_path: Path, its_id: str
) -> None:
    kept = commit_with_report(site)
    with copied(site.primary) as copy:
        lost = commit_with_report(site)
        end = number(site.world.dsns["a"], POSITION)
        branch = site.branch(site.world.tokens[-1])
        site = site._replace(standby=copy)
        site.world.dsns["a"] = copy.dsn(site.name)
        if its_id == "used again":
            assert branch.xid is not None
            site.use_again(branch.xid)
        write_past(site, end)
        recoverer = site.world.recoverer()
        report = recoverer.run_pass()
        assert about(report, lost) == [BranchAction.LOST]
        assert about(report, kept) == []
        assert about(recoverer.verify(first_token_at(0)), kept) == []
        config = site.config(tmp_path)
        for command, *since in (["doctor"], ["verify", "--since", A_DAY_AGO], ["recover"]):
            status, output = txmq("xa", command, "--config", config, *since)
            [row] = [row for row in output["branches"] if row["gid"] == lost]
            assert (status, row["action"]) == (1, "lost")
        recoverer.close()


def test_the_original_has_lost_nothing(site: Failover) -> None:
    gids = [commit_with_report(site) for _ in range(2)]
    report = site.world.recoverer().run_pass()
    assert [about(report, gid) for gid in gids] == [[], []]
    site.world.audit(stored=1)
