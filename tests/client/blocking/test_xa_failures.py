"""XA transactions with failures of brokers, databases and connections.

Votes of no and decisions of operators are among them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.client.kept_sessions import asked
from tests.client.ledgers import Ledgers
from tests.client.proxy import Proxy
from tests.client.real import RealBroker
from tests.client.scripted_broker import FakeBroker
from tests.tx.postgres.business_table import run
from txmq.client.blocking.client import Client
from txmq.client.protocol.awaited import database_branch, home_broker, xa
from txmq.client.protocol.transaction.home_decision import HomeDecision
from txmq.client.protocol.transaction.prepared_slots import SlotDemand, prepared_slots
from txmq.errors import (
    BrokerUnavailable,
    DatabaseUnavailable,
    HeuristicMixed,
    InDoubt,
    TransactionAborted,
    TwoPhaseFull,
    TwoPhaseOff,
)
from txmq.faces import run as driver_run
from txmq.testing.wait import PATIENCE_S
from txmq.tx.postgres.blocking import prepare, server_of
from txmq.tx.postgres.identity import Server
from txmq.tx.postgres.prepared import NotReplicated
from txmq.tx.xid import XaBranch
from txmq.wire.data_requests import Opcode

Connect = Callable[..., Client]


DIES_IN_PREPARE = """
CREATE OR REPLACE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER dies AFTER INSERT ON lines DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION die()
"""


def before_the_decision(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Run a function when all have voted."""

    async def asked(*args: Any) -> HomeDecision:
        happens()
        return await home_broker.request_decision(*args)

    monkeypatch.setattr(xa, "request_decision", asked)


def after_the_decision(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Run a function after the decision, before the branches get it."""

    async def asked(*args: Any) -> HomeDecision:
        verdict = await home_broker.request_decision(*args)
        happens()
        return verdict

    monkeypatch.setattr(xa, "request_decision", asked)


def test_a_broker_that_is_gone_stops_it_before_anything_is_prepared(
    ledgers: Ledgers, fake: FakeBroker, connect: Connect
) -> None:
    url = fake.url
    client = connect(url, timeout=2.0)
    assert client.log_id  # it knows the broker
    tx = ledgers.begin("o-1", client, timeout=2.0)
    fake.close()
    with pytest.raises(BrokerUnavailable) as caught:
        tx.__exit__(None, None, None)
    assert (caught.value.outcome, caught.value.retriable) == ("not done", True)
    assert (ledgers.rows(), ledgers.prepared()) == ([set(), set()], [])
    with pytest.raises(BrokerUnavailable):
        connect(url, timeout=0.3).xa(*ledgers.connections).__enter__()


def test_a_bundle_that_is_not_confirmed_rolls_back_what_is_prepared(
    ledgers: Ledgers, connect: Connect
) -> None:
    with Proxy(ledgers.broker.url) as proxy:
        client = connect(proxy.url)
        client.send(ledgers.topic, b"first")
        proxy.hold.add(Opcode.GROUP)
        tx = ledgers.begin("o-1", client, timeout=2.0)
        with pytest.raises(BrokerUnavailable, match="rolled back") as caught:
            tx.__exit__(None, None, None)
        assert caught.value.outcome == "not done"
    assert ledgers.state(tx) == "ROLLED_BACK"
    assert (ledgers.rows(), ledgers.messages(), ledgers.prepared()) == (
        [set(), set()],
        {"first"},
        [],
    )


@pytest.mark.parametrize("lost", [Opcode.GROUP, Opcode.DECIDE])
def test_a_lost_answer_changes_nothing(ledgers: Ledgers, connect: Connect, lost: Opcode) -> None:
    with Proxy(ledgers.broker.url) as proxy:
        client = connect(proxy.url)
        tx = ledgers.begin("o-1", client)
        proxy.lose[lost] = 1
        tx.__exit__(None, None, None)
        tx.wait_published(PATIENCE_S)
    assert ledgers.agree("o-1")


def test_without_an_answer_to_the_decision_nothing_is_touched(
    either: Ledgers, connect: Connect
) -> None:
    ledgers = either
    with Proxy(ledgers.broker.url) as proxy:
        client = connect(proxy.url, timeout=6.0)
        client.send(ledgers.topic, b"first")
        proxy.hold |= {Opcode.DECIDE, Opcode.CALL}
        tx = ledgers.begin("o-1", client, timeout=2.0)
        with pytest.raises(InDoubt) as caught:
            tx.__exit__(None, None, None)
    assert caught.value.token == str(tx.token)
    assert sorted(tx.unfinished) == sorted(ledgers.prepared())
    assert len(tx.unfinished) == 2
    ledgers.write("o-2")  # the connections are free
    for connection in ledgers.connections:
        connection.commit()
    ledgers.recover()
    ledgers.await_published("first", "o-1")
    assert ledgers.rows() == [{"o-1", "o-2"}, {"o-1", "o-2"}]


def test_without_an_answer_to_the_rollback_what_is_prepared_stays(
    ledgers: Ledgers, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy(ledgers.broker.url) as proxy:
        client = connect(proxy.url, timeout=6.0)
        client.send(ledgers.topic, b"first")
        tx = ledgers.begin("o-1", client, timeout=2.0)
        run(ledgers.last, "INSERT INTO lines VALUES ('no such order')")
        before_the_decision(monkeypatch, lambda: proxy.hold.add(Opcode.CALL))
        with pytest.raises(InDoubt):
            tx.__exit__(None, None, None)
    assert list(tx.unfinished) == ledgers.prepared()
    assert len(tx.unfinished) == 1
    ledgers.recover()
    assert (ledgers.rows(), ledgers.messages(), ledgers.prepared()) == (
        [set(), set()],
        {"first"},
        [],
    )


def test_a_home_broker_that_was_killed_is_asked_again(
    ledgers: Ledgers, own_broker: RealBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed() -> None:
        own_broker.kill()
        own_broker.start()

    client = connect(own_broker.url, timeout=PATIENCE_S)
    before_the_decision(monkeypatch, killed)
    tx = ledgers.begin("o-1", client)
    tx.__exit__(None, None, None)
    tx.wait_published(PATIENCE_S)
    assert ledgers.rows() == [{"o-1"}, {"o-1"}]
    assert [found.body for found in own_broker.read(ledgers.topic)] == [b"o-1"]


def test_an_earlier_rollback_of_another_process_is_followed(
    ledgers: Ledgers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tx = ledgers.begin("o-1")
    decided = {"token": tx.token.hex, "outcome": "ROLLBACK", "operator": "me", "reason": "it hangs"}
    before_the_decision(monkeypatch, lambda: ledgers.client.call("tx.decide", **decided))
    with pytest.raises(TransactionAborted, match="home broker"):
        tx.__exit__(None, None, None)
    assert ledgers.agree()


def test_an_earlier_commit_is_followed_too_and_branches_that_cannot_follow_are_reported(
    ledgers: Ledgers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tx = ledgers.begin("o-1")
    run(ledgers.last, "INSERT INTO lines VALUES ('no such order')")
    decided = {"token": tx.token.hex, "outcome": "COMMIT", "operator": "me", "reason": "a mistake"}
    before_the_decision(monkeypatch, lambda: ledgers.client.call("tx.decide", **decided))
    with pytest.raises(HeuristicMixed) as caught:
        tx.__exit__(None, None, None)
    assert (caught.value.decision, len(caught.value.branches)) == ("COMMIT", 1)
    assert ledgers.rows() == [{"o-1"}, set()]
    assert ledgers.prepared() == []


def test_a_database_that_is_lost_after_the_decision_is_left_to_recovery(
    either: Ledgers, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledgers = either
    after_the_decision(monkeypatch, lambda: ledgers.cut(1))
    tx = ledgers.begin("o-1")
    tx.__exit__(None, None, None)
    assert ledgers.rows() == [{"o-1"}, set()]
    assert list(tx.unfinished) == ledgers.prepared()
    tx.wait_published(PATIENCE_S)
    ledgers.recover()
    assert ledgers.agree("o-1")


def test_a_connection_that_is_lost_in_prepare_rolls_everything_back(
    ledgers: Ledgers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(connection: Any, name: XaBranch) -> None:
        prepare(connection, name)
        if name.number == 2:
            raise InDoubt("the connection broke", token=str(name.token))

    monkeypatch.setattr(database_branch, "prepare", lost)
    tx = ledgers.begin("o-1")
    with pytest.raises(
        TransactionAborted, match="the connection broke; the transaction was rolled back"
    ):
        tx.__exit__(None, None, None)
    assert ledgers.agree()


def test_a_branch_that_no_standby_has_confirmed_rolls_everything_back(
    ledgers: Ledgers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failover to a standby would lose the branch, after a decision to commit."""

    async def not_replicated(connection: Any, name: XaBranch) -> None:
        prepare(connection, name)
        if name.number == 1:
            raise NotReplicated("no synchronous standby has confirmed it", token=str(name.token))

    monkeypatch.setattr(database_branch, "prepare", not_replicated)
    tx = ledgers.begin("o-1")
    with pytest.raises(TransactionAborted, match="no synchronous standby has confirmed it"):
        tx.__exit__(None, None, None)
    assert ledgers.prepared() == []
    assert ledgers.agree()


def test_a_backend_that_dies_in_prepare_rolls_everything_back(ledgers: Ledgers) -> None:
    asked(ledgers.dsns[1], DIES_IN_PREPARE)
    tx = ledgers.begin("o-1")
    run(ledgers.last, "INSERT INTO lines VALUES ('o-1')")
    with pytest.raises(
        TransactionAborted, match="sent and not answered; the transaction was rolled back"
    ):
        tx.__exit__(None, None, None)
    assert [name.number for name in map(XaBranch.parse, tx.unfinished) if name is not None] == [2]
    assert ledgers.agree()


def test_a_connection_that_is_lost_before_prepare_rolls_everything_back(ledgers: Ledgers) -> None:
    tx = ledgers.begin("o-1")
    ledgers.cut(1)
    with pytest.raises(DatabaseUnavailable):
        tx.__exit__(None, None, None)
    assert ledgers.agree()


def test_a_branch_rolled_back_by_hand_is_reported_and_journalled(
    ledgers: Ledgers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tx = ledgers.begin("o-1")
    gid = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"

    def by_hand() -> None:
        [(found,)] = asked(ledgers.dsns[1], gid)
        asked(ledgers.dsns[1], f"ROLLBACK PREPARED '{found}'")

    after_the_decision(monkeypatch, by_hand)
    with pytest.raises(HeuristicMixed) as caught:
        tx.__exit__(None, None, None)
    assert (caught.value.decision, caught.value.outcome) == ("COMMIT", "unknown")
    assert ledgers.rows() == [{"o-1"}, set()]
    found = ledgers.client.call("xa.list", heuristic=True, owner="orders")["transactions"]
    [entry] = [one for row in found if row["token"] == tx.token.hex for one in row["heuristics"]]
    assert (entry["branch"], entry["decided"], entry["found"]) == (
        *caught.value.branches,
        "COMMIT",
        "rolled back",
    )
    assert entry["operator"] == "orders"


def test_a_branch_that_recovery_was_quicker_with_is_done(
    ledgers: Ledgers, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_the_decision(monkeypatch, ledgers.recover)
    tx = ledgers.begin("o-1")
    tx.__exit__(None, None, None)
    tx.wait_published(PATIENCE_S)
    assert ledgers.agree("o-1")
    assert tx.unfinished == ()


def test_an_interrupt_while_branches_are_prepared_rolls_back(
    ledgers: Ledgers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(connection: Any, name: XaBranch) -> None:
        prepare(connection, name)
        if name.number == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(database_branch, "prepare", interrupted)
    tx = ledgers.begin("o-1")
    with pytest.raises(KeyboardInterrupt):
        tx.__exit__(None, None, None)
    assert ledgers.state(tx) == "ROLLED_BACK"
    assert ledgers.agree()


def test_a_server_that_prepares_nothing_is_refused_at_the_beginning(
    ledgers: Ledgers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def switched_off(driver: Any) -> Server:
        allowed = 64 * (driver.connection is not ledgers.last)
        return replace(server_of(driver), max_prepared_transactions=allowed)

    monkeypatch.setattr(database_branch, "server_of", switched_off)
    with pytest.raises(TwoPhaseOff, match="max_prepared_transactions"):
        ledgers.client.xa(*ledgers.connections).__enter__()
    ledgers.write("o-1")
    for connection in ledgers.connections:
        connection.commit()


def test_a_server_without_a_free_slot_rolls_everything_back(
    ledgers: Ledgers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(connection: Any, name: XaBranch) -> None:
        if name.number == 2:
            connection.connection.tpc_rollback()
            raise TwoPhaseFull("53200")
        prepare(connection, name)

    monkeypatch.setattr(database_branch, "prepare", full)
    tx = ledgers.begin("o-1")
    with pytest.raises(TwoPhaseFull):
        tx.__exit__(None, None, None)
    assert ledgers.agree()


def test_a_transaction_without_a_free_slot_waits_and_is_rolled_back_in_the_end(
    ledgers: Ledgers,
) -> None:
    tx = ledgers.begin("o-1", timeout=0.2)
    for one in tx._branches:
        driver_run(one.inspect())
    demand = driver_run(tx._slot_demand())
    places = {server: SlotDemand(room, room) for server, (_, room) in demand.items()}
    with prepared_slots().reserve(places, 0.0), pytest.raises(TwoPhaseFull, match="allows"):
        tx.__exit__(None, None, None)
    assert ledgers.agree()
    ledgers.begin("o-2").__exit__(None, None, None)
    ledgers.await_published("o-2")
    assert ledgers.agree("o-2")
