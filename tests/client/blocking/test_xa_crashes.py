"""Crashes of coordinators and servers at every step of a two-phase commit.

Planted bugs have to be detected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg2
import pytest

from tests.client import killed_coordinators
from tests.client.kept_sessions import asked
from tests.client.ledgers import Ledgers
from tests.client.real import RealBroker
from txmq.client.blocking.client import Client
from txmq.client.blocking.transaction.broker_bundle import BrokerBundle
from txmq.client.protocol.awaited import database_branch, home_broker, xa
from txmq.client.protocol.transaction.home_decision import HomeDecision
from txmq.errors import HeuristicMixed, TransactionAborted
from txmq.model.bundle import BundleReceipt
from txmq.testing.postgres_server import OwnServer, PostgresServer
from txmq.tx.postgres import identity, prepared
from txmq.tx.postgres.driver import Driver
from txmq.tx.postgres.prepared import Ending
from txmq.tx.xid import XaBranch

Connect = Callable[..., Client]
ROOT = Path(__file__).parents[3]
CRASHES = {  # whether the transaction is committed there
    "xa.before_group": False,
    "xa.before_prepare": False,
    "xa.between_prepares": False,
    "xa.between_prepares:2": False,
    "xa.after_prepares": False,
    "xa.after_group": False,
    "xa.before_decision": False,
    "xa.after_decision": True,
    "xa.between_commits": True,
    "xa.between_commits:2": True,
    "xa.after_commits": True,
}


@pytest.fixture
def ledgers(
    postgres: PostgresServer,
    crashable_postgres: OwnServer,
    shared_broker: RealBroker,
    connect: Connect,
) -> Iterator[Ledgers]:
    names = [postgres.create_database(), crashable_postgres.create_database()]
    dsns = [postgres.dsn(names[0]), crashable_postgres.dsn(names[1])]
    ledgers = Ledgers(dsns, shared_broker, connect(shared_broker.url))
    ledgers.reset()
    yield ledgers
    ledgers.recover()
    ledgers.close()
    postgres.drop_database(names[0])
    crashable_postgres.drop_database(names[1])


def die(ledgers: Ledgers, label: str = "", driver: str | None = None) -> None:
    """Kill a coordinator at each crash point."""
    plan = killed_coordinators.Plan(
        [ledgers.broker.url],
        ledgers.dsns,
        ledgers.topic,
        "INSERT INTO orders VALUES (%s)",
        label,
        driver,
    )
    assert killed_coordinators.killed(plan, CRASHES).keys() == CRASHES.keys()


def committed(label: str = "") -> list[str]:
    return [label + point for point, done in CRASHES.items() if done]


@pytest.mark.parametrize("face", ["blocking", "aio"])
def test_every_crash_point_of_a_coordinator_has_a_test(face: str) -> None:
    folders = (f"txmq/client/{face}", "txmq/client/protocol/awaited", "txmq/tx")
    sources = [source for folder in folders for source in (ROOT / folder).rglob("*.py")]
    found = {
        name
        for source in sources
        for name in re.findall(r'crashpoint\("(xa\.[^"]+)"\)', source.read_text())
    }
    assert found == {point.partition(":")[0] for point in CRASHES}


@pytest.mark.parametrize("driver", [None, "psycopg", "asyncpg"])
def test_a_coordinator_that_dies_anywhere_leaves_rows_and_messages_that_recovery_makes_agree(
    ledgers: Ledgers, driver: str | None
) -> None:
    die(ledgers, driver=driver)
    assert ledgers.prepared(), "they died for nothing"
    ledgers.recover()
    ledgers.await_published(*committed())
    assert ledgers.rows() == [set(committed()), set(committed())]
    assert ledgers.prepared() == []


def test_a_server_that_dies_with_them_changes_nothing(
    ledgers: Ledgers, crashable_postgres: OwnServer
) -> None:
    for label in ("first ", "second "):
        die(ledgers, label)
        crashable_postgres.kill_server()
        crashable_postgres.start()
    ledgers.recover()
    expected = [*committed("first "), *committed("second ")]
    ledgers.await_published(*expected)
    assert ledgers.rows() == [set(expected), set(expected)]
    assert ledgers.prepared() == []


def test_a_server_that_dies_after_the_decision_finds_it_carried_out(
    ledgers: Ledgers, crashable_postgres: OwnServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def killed(*args: Any) -> HomeDecision:
        verdict = await home_broker.request_decision(*args)
        crashable_postgres.kill_server()
        crashable_postgres.start()
        return verdict

    monkeypatch.setattr(xa, "request_decision", killed)
    tx = ledgers.begin("o-1")
    tx.__exit__(None, None, None)
    assert len(tx.unfinished) == 1
    ledgers.recover()
    ledgers.await_published("o-1")
    assert ledgers.agree("o-1")


def group_after_recovery(monkeypatch: pytest.MonkeyPatch, recover: Callable[[], object]) -> None:
    """Store a bundle late: recovery has found its branches, and no bundle at home."""
    send, receipt = BrokerBundle.send, BrokerBundle.await_receipt

    async def late(bundle: BrokerBundle) -> BundleReceipt:
        recover()
        await send(bundle)
        return await receipt(bundle)

    async def nothing(_bundle: BrokerBundle) -> None:
        return None

    monkeypatch.setattr(BrokerBundle, "send", nothing)
    monkeypatch.setattr(BrokerBundle, "await_receipt", late)


def test_a_bundle_that_comes_after_recovery_meets_a_tombstone(
    ledgers: Ledgers, monkeypatch: pytest.MonkeyPatch
) -> None:
    group_after_recovery(monkeypatch, ledgers.recover)
    with pytest.raises(TransactionAborted):
        ledgers.begin("o-1").__exit__(None, None, None)
    assert ledgers.agree()


def test_recovery_that_reads_absence_as_a_rollback_would_be_seen(
    ledgers: Ledgers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def from_absence() -> None:
        for dsn in ledgers.dsns:
            for (gid,) in asked(
                dsn, "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
            ):
                asked(dsn, f"ROLLBACK PREPARED '{gid}'")

    group_after_recovery(monkeypatch, from_absence)
    with pytest.raises(HeuristicMixed):
        ledgers.begin("o-1").__exit__(None, None, None)
    assert not ledgers.agree("o-1")
    assert not ledgers.agree()


def test_a_prepare_that_is_believed_as_psycopg2_reports_it_would_be_detected(
    ledgers: Ledgers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def believed(driver: Driver, name: XaBranch) -> None:
        with driver.connection.cursor() as cursor:
            cursor.execute("PREPARE TRANSACTION %s", (name.gid,))
        driver.connection.reset()

    server = identity.ServerIdentity(1, 1, 1)
    work = prepared.Work(7, "postgres", server, 1)

    async def looked(_driver: Driver, block: Any) -> Any:
        return block.require_same("on") or work

    monkeypatch.setattr(database_branch, "look", looked)
    monkeypatch.setattr(database_branch, "prepare", believed)
    tx = ledgers.begin("o-1")
    with suppress(psycopg2.Error):
        ledgers.write("o-1", ledgers.last)
    with suppress(HeuristicMixed):
        tx.__exit__(None, None, None)
    assert ledgers.rows() == [{"o-1"}, set()]


def test_a_missing_branch_that_counts_as_committed_would_be_detected(
    ledgers: Ledgers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def by_hand(*args: Any) -> HomeDecision:
        verdict = await home_broker.request_decision(*args)
        [(gid,)] = asked(
            ledgers.dsns[1], "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
        )
        asked(ledgers.dsns[1], f"ROLLBACK PREPARED '{gid}'")
        return verdict

    monkeypatch.setattr(xa, "request_decision", by_hand)

    async def found(*_driver: Any, **_wanted: Any) -> Ending:
        return Ending.FOUND

    monkeypatch.setattr(prepared, "_ended", found)
    ledgers.begin("o-1").__exit__(None, None, None)
    assert not ledgers.agree("o-1")
