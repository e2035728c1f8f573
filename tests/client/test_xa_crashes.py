"""Coordinators that die at every step of a two-phase commit, servers that die with
them, and bugs that must be seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg2
import pytest

from tests.client import dying
from tests.client.ledgers import Ledgers, asked
from tests.client.real import RealBroker
from txmq.client.blocking.client import Client
from txmq.client.blocking.transaction import branch, home, xa
from txmq.client.blocking.transaction.broker_part import Share
from txmq.errors import HeuristicMixed, TransactionAborted
from txmq.testing.postgres import OwnServer, PostgresServer
from txmq.tx.postgres import prepared
from txmq.tx.postgres.prepared import Ending
from txmq.tx.xid import Branch
from txmq.wire.group import GroupReceipt

Connect = Callable[..., Client]
ROOT = Path(__file__).parents[2]
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


def die(ledgers: Ledgers, label: str = "") -> None:
    """A coordinator dies at each crash point."""
    plan = dying.Plan(
        [ledgers.broker.url], ledgers.dsns, ledgers.topic, "INSERT INTO orders VALUES (%s)", label
    )
    assert dying.killed(plan, CRASHES).keys() == CRASHES.keys()


def committed(label: str = "") -> list[str]:
    return [label + point for point, done in CRASHES.items() if done]


def test_every_crash_point_of_a_coordinator_has_a_test() -> None:
    sources = [*(ROOT / "txmq/client").rglob("*.py"), *(ROOT / "txmq/tx").rglob("*.py")]
    found = {
        name
        for source in sources
        for name in re.findall(r'crashpoint\("(xa\.[^"]+)"\)', source.read_text())
    }
    assert found == {point.partition(":")[0] for point in CRASHES}


def test_a_coordinator_that_dies_anywhere_leaves_rows_and_messages_that_recovery_makes_agree(
    ledgers: Ledgers,
) -> None:
    die(ledgers)
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
    def killed(*args: Any) -> home.Verdict:
        verdict = home.ask(*args)
        crashable_postgres.kill_server()
        crashable_postgres.start()
        return verdict

    monkeypatch.setattr(xa, "ask", killed)
    tx = ledgers.begin("o-1")
    tx.__exit__(None, None, None)
    assert len(tx.unfinished) == 1
    ledgers.recover()
    ledgers.await_published("o-1")
    assert ledgers.agree("o-1")


def group_after_recovery(monkeypatch: pytest.MonkeyPatch, recover: Callable[[], object]) -> None:
    """The group is late: recovery finds the branches prepared, and the home broker has
    never heard of them.
    """
    send, receipt = Share.send, Share.receipt

    def late(share: Share) -> GroupReceipt:
        recover()
        send(share)
        return receipt(share)

    monkeypatch.setattr(Share, "send", lambda _: None)
    monkeypatch.setattr(Share, "receipt", late)


def test_a_group_that_comes_after_recovery_meets_a_tombstone(
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


def test_a_prepare_that_is_believed_as_psycopg2_tells_it_would_be_seen(
    ledgers: Ledgers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def believed(connection: Any, name: Branch) -> None:
        del name
        connection.tpc_prepare()
        connection.reset()

    monkeypatch.setattr(branch, "look", lambda *_: prepared.Work(7, "postgres"))
    monkeypatch.setattr(branch, "prepare", believed)
    tx = ledgers.begin("o-1")
    with suppress(psycopg2.Error):
        ledgers.write("o-1", ledgers.last)
    with suppress(HeuristicMixed):
        tx.__exit__(None, None, None)
    assert ledgers.rows() == [{"o-1"}, set()]


def test_a_missing_branch_that_is_taken_for_committed_would_be_seen(
    ledgers: Ledgers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_hand(*args: Any) -> home.Verdict:
        verdict = home.ask(*args)
        [(gid,)] = asked(
            ledgers.dsns[1], "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
        )
        asked(ledgers.dsns[1], f"ROLLBACK PREPARED '{gid}'")
        return verdict

    monkeypatch.setattr(xa, "ask", by_hand)
    monkeypatch.setattr(prepared, "_ended", lambda *_, **__: Ending.FOUND)
    ledgers.begin("o-1").__exit__(None, None, None)
    assert not ledgers.agree("o-1")
