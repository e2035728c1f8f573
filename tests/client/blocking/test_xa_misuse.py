"""Callers of XA who end a branch inside its block, and branches with NOTIFY alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import psycopg2
import pytest
from psycopg2 import extensions

from tests.client.blocking.test_caller_misuse import BEGINNINGS, QUICK
from tests.client.ledgers import Ledgers
from tests.client.world import ApplicationError, fail
from tests.tx.postgres.business_table import run
from txmq.client.protocol.awaited import home_broker, xa
from txmq.client.protocol.awaited.database_branch import DatabaseBranch
from txmq.client.protocol.transaction.home_decision import HomeDecision
from txmq.errors import InDoubt, TransactionAborted, TransactionEnded, TxmqError
from txmq.model.message import UNKNOWN
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.tx.postgres.caller_block import CallerBlock
from txmq.tx.postgres.statement_watch import watch_of

Way = Callable[[Any, Any], object]


def block(connection: Any) -> None:
    with connection:
        run(connection, "SELECT 1")


# What a caller does to a connection, with a cursor that was opened before the block.
WAYS: dict[str, Way] = {
    "commit()": lambda connection, _: connection.commit(),
    "rollback()": lambda connection, _: connection.rollback(),
    "with": lambda connection, _: block(connection),
    "COMMIT": lambda connection, _: run(connection, "COMMIT"),
    "ROLLBACK": lambda connection, _: run(connection, "ROLLBACK"),
    "old COMMIT": lambda _, cursor: cursor.execute("COMMIT"),
    "old COMMIT BEGIN": lambda _, cursor: cursor.execute("COMMIT; BEGIN"),
    "old ROLLBACK BEGIN": lambda _, cursor: cursor.execute("ROLLBACK; BEGIN"),
}
JOINED = ("after a SELECT", "autocommit, isolated", "BEGIN by hand")
BEGUN = ("a fresh one", "autocommit", "ended by SQL")


CASES = [
    (beginning, way, end)
    for beginning in (*JOINED, *BEGUN)
    for way in WAYS
    for end in ("swallowed", "swallowed, then the block raises")
    if (beginning, end) != QUICK
]


@pytest.mark.parametrize("way", WAYS)
def test_branches_and_messages_agree_or_the_caller_is_told(ledgers: Ledgers, way: str) -> None:
    beginning, end = QUICK
    misuse(ledgers, beginning, way, end)


@pytest.mark.parametrize(("beginning", "way", "end"), CASES)
def test_they_agree_however_the_branch_begins_and_ends(
    ledgers: Ledgers, beginning: str, way: str, end: str
) -> None:
    misuse(ledgers, beginning, way, end)


def misuse(ledgers: Ledgers, beginning: str, way: str, end: str) -> None:
    cursor = ledgers.last.cursor()
    BEGINNINGS[beginning](ledgers.last)
    autocommit = ledgers.last.autocommit
    raised: BaseException | None = None
    try:
        with ledgers.client.xa(*ledgers.connections) as tx:
            ledgers.write("o-1")
            tx.send(ledgers.topic, b"o-1")
            with suppress(psycopg2.Error, TxmqError):
                WAYS[way](ledgers.last, cursor)
            if end != "swallowed":
                fail()
    except (TxmqError, ApplicationError) as error:
        raised = error
    if raised is None:
        tx.wait_published(PATIENCE_S)
        assert ledgers.agree("o-1")
    elif isinstance(raised, TransactionEnded):
        assert (ledgers.rows()[0], ledgers.messages(), ledgers.prepared()) == (set(), set(), [])
    else:
        assert ledgers.agree()
    for connection in ledgers.connections:
        assert watch_of(connection) is None
        assert connection.info.transaction_status == extensions.TRANSACTION_STATUS_IDLE
    assert ledgers.last.autocommit == autocommit
    with ledgers.client.xa(*ledgers.connections) as again:
        ledgers.write("o-2")
        again.send(ledgers.topic, b"o-2")
    again.wait_published(PATIENCE_S)
    assert "o-2" in ledgers.rows()[0] & ledgers.rows()[1] & ledgers.messages()


def test_a_check_that_proves_nothing_would_be_detected(
    ledgers: Ledgers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CallerBlock, "require_same", lambda *_: None)
    with pytest.raises(AssertionError):
        misuse(ledgers, "a fresh one", "old COMMIT BEGIN", "swallowed")


def test_a_savepoint_of_a_cursor_withdraws_messages(ledgers: Ledgers) -> None:
    with ledgers.client.xa(*ledgers.connections) as tx:
        ledgers.write("o-1")
        tx.send(ledgers.topic, b"o-1")
        run(ledgers.last, "SAVEPOINT part")
        ledgers.write("o-2", ledgers.last)
        tx.send(ledgers.topic, b"o-2")
        run(ledgers.last, "ROLLBACK TO part")
    tx.wait_published(PATIENCE_S)
    assert ledgers.agree("o-1")


class Ears:
    """A session that listens."""

    def __init__(self, dsn: str) -> None:
        self.connection = psycopg2.connect(dsn)
        self.connection.autocommit = True
        run(self.connection, "LISTEN news")

    def heard(self) -> list[str]:
        run(self.connection, "SELECT 1")  # brings what was sent before
        return [found.payload for found in self.connection.notifies]


@pytest.fixture
def ears(ledgers: Ledgers) -> Iterator[Ears]:
    """A listener in the first database."""
    made = Ears(ledgers.dsns[0])
    with closing(made.connection):
        yield made


def notify(ledgers: Ledgers) -> None:
    """Run NOTIFY on the first connection, and write on the last."""
    run(ledgers.connections[0], "NOTIFY news, 'o-1'")
    ledgers.write("o-1", ledgers.last)


@pytest.mark.parametrize("beginning", BEGUN)
def test_a_notification_goes_out_with_the_decision(
    ledgers: Ledgers, ears: Ears, beginning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_the_decision: list[list[str]] = []

    async def decide(*args: Any) -> HomeDecision:
        at_the_decision.append(ears.heard())
        return await home_broker.request_decision(*args)

    monkeypatch.setattr(xa, "request_decision", decide)
    BEGINNINGS[beginning](ledgers.connections[0])
    with ledgers.client.xa(*ledgers.connections) as tx:
        notify(ledgers)
        tx.send(ledgers.topic, b"o-1")
    assert (at_the_decision, ears.heard()) == ([[]], ["o-1"])
    assert ledgers.rows() == [set(), {"o-1"}]


def test_no_notification_goes_out_of_a_transaction_that_is_rolled_back(
    ledgers: Ledgers, ears: Ears
) -> None:
    tx = ledgers.client.xa(*ledgers.connections)
    tx.__enter__()
    notify(ledgers)
    tx.send(ledgers.topic, b"o-1")
    run(ledgers.last, "INSERT INTO lines VALUES ('no such order')")
    with pytest.raises(TransactionAborted, match="23503"):
        tx.__exit__(None, None, None)
    assert (ears.heard(), ledgers.agree()) == ([], True)


def test_no_notification_goes_out_before_a_commit_in_one_phase(
    ledgers: Ledgers, ears: Ears
) -> None:
    tx = ledgers.client.xa(*ledgers.connections)
    tx.__enter__()
    notify(ledgers)
    run(ledgers.last, "INSERT INTO lines VALUES ('no such order')")
    with pytest.raises(TransactionAborted):
        tx.__exit__(None, None, None)
    assert ears.heard() == []
    with ledgers.client.xa(*ledgers.connections):
        notify(ledgers)
    assert ears.heard() == ["o-1"]


def test_without_an_answer_a_reading_branch_is_rolled_back(
    ledgers: Ledgers, ears: Ears, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(*_args: Any) -> HomeDecision:
        return HomeDecision(UNKNOWN, published=False, why="no answer")

    monkeypatch.setattr(xa, "request_decision", silent)
    tx = ledgers.client.xa(*ledgers.connections)
    tx.__enter__()
    notify(ledgers)
    tx.send(ledgers.topic, b"o-1")
    with pytest.raises(InDoubt):
        tx.__exit__(None, None, None)
    assert ledgers.connections[0].status == extensions.STATUS_READY
    assert (ears.heard(), len(ledgers.prepared())) == ([], 1)
    ledgers.recover()
    wait_until(lambda: not ledgers.undecided())


def test_a_serializable_reader_cannot_notify(ledgers: Ledgers, ears: Ears) -> None:
    ledgers.connections[0].set_session(isolation_level="SERIALIZABLE")
    tx = ledgers.client.xa(*ledgers.connections)
    tx.__enter__()
    notify(ledgers)
    tx.send(ledgers.topic, b"o-1")
    with pytest.raises(TransactionAborted, match="NOTIFY"):
        tx.__exit__(None, None, None)
    assert (ears.heard(), ledgers.agree()) == ([], True)


def test_a_reader_that_is_lost_after_the_decision_is_logged(
    ledgers: Ledgers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader = ledgers.connections[0]
    follow = DatabaseBranch.follow

    async def lost(branch: DatabaseBranch) -> None:
        with psycopg2.connect(ledgers.dsns[0]) as other:
            run(other, f"SELECT pg_terminate_backend({reader.info.backend_pid}, 5000)")
        other.close()
        await follow(branch)

    monkeypatch.setattr(DatabaseBranch, "follow", lost)
    with ledgers.client.xa(*ledgers.connections) as tx:
        notify(ledgers)
        tx.send(ledgers.topic, b"o-1")
    tx.wait_published(PATIENCE_S)
    assert (ledgers.rows(), ledgers.messages()) == ([set(), {"o-1"}], {"o-1"})
    assert "transaction.reader_not_committed" in caplog.text
