"""Rows and messages as one decision, with real servers and producers that die."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import ref

import psycopg2
import pytest

from tests.client.blocking.test_several_brokers import BETWEEN
from tests.client.proxy import Proxy
from tests.client.real import RealBroker
from tests.client.scripted_broker import FakeBroker
from tests.client.world import ApplicationError, World, fail
from txmq.client.blocking.client import Client
from txmq.client.protocol.awaited import postgres
from txmq.crashpoints import VARIABLE
from txmq.errors import (
    BrokerUnavailable,
    DatabaseUnavailable,
    InDoubt,
    LocalProtocolError,
    NoResolver,
    SynchronousCommitOff,
    TransactionAborted,
)
from txmq.testing.forked import run_source
from txmq.testing.processes import ENVIRONMENT, Running
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.tx.postgres.blocking import guarded_commit
from txmq.wire.data_requests import Opcode

Connect = Callable[..., Client]
ROOT = Path(__file__).parents[3]


def test_rows_and_messages_exist_together(world: World) -> None:
    with world.client.transaction(world.connection) as tx:
        world.insert("o-1")
        tx.send(world.topic, b"o-1", key="o-1")
        assert world.messages() == set()
    tx.wait_published(PATIENCE_S)
    assert world.orders() == world.messages() == {"o-1"}
    shown = world.client.call("tx.show", token=tx.token.hex)
    assert (shown["state"], shown["by"], shown["decider"][0]) == (
        "PUBLISHED",
        "producer orders",
        "postgres",
    )
    assert [got.offset for got in tx.receipts()] == [0]
    assert not world.connection.closed


def test_a_connection_serves_one_transaction_after_the_other(world: World) -> None:
    for n in range(5):
        with world.client.transaction(world.connection) as tx:
            world.insert(f"o-{n}")
            tx.send(world.topic, f"o-{n}".encode(), key="k")
    tx.wait_published(PATIENCE_S)
    assert world.orders() == world.messages() == {f"o-{n}" for n in range(5)}
    assert [found.body for found in world.stored()] == [f"o-{n}".encode() for n in range(5)]


@pytest.mark.parametrize("committed", [True, False])
def test_a_transaction_that_is_over_leaves_nothing_to_the_garbage_collector(
    world: World, *, committed: bool
) -> None:
    tx = world.client.transaction(world.connection)
    gc.disable()
    try:
        with suppress(ApplicationError), tx:
            world.insert("o-1")
            tx.send(world.topic, b"o-1")
            if not committed:
                fail()
        over = ref(tx)
        del tx
        assert over() is None
    finally:
        gc.enable()


def test_a_block_that_raises_leaves_neither_rows_nor_messages(world: World) -> None:
    tx = world.client.transaction(world.connection)
    with suppress(ApplicationError), tx:
        world.insert("o-1")
        tx.send(world.topic, b"o-1")
        fail()
    assert (world.orders(), world.messages()) == (set(), set())
    assert world.settled()


def test_a_swallowed_sql_error_is_an_abort_and_nothing_is_sent(world: World) -> None:
    tx = world.client.transaction(world.connection)
    tx.__enter__()
    world.insert("o-1")
    with suppress(psycopg2.Error):
        world.insert("o-1")
    tx.send(world.topic, b"o-1")
    with pytest.raises(TransactionAborted, match="failed earlier"):
        tx.__exit__(None, None, None)
    assert (world.orders(), world.messages()) == (set(), set())


def test_a_commit_that_the_database_refuses_rolls_the_messages_back(world: World) -> None:
    tx = world.client.transaction(world.connection)
    tx.__enter__()
    world.insert("o-1")
    with world.connection.cursor() as cursor:
        cursor.execute("INSERT INTO lines VALUES (1, 'no such order')")
    tx.send(world.topic, b"o-1")
    with pytest.raises(TransactionAborted):
        tx.__exit__(None, None, None)
    wait_until(lambda: world.state(tx.token) == "ROLLED_BACK")
    assert (world.orders(), world.messages()) == (set(), set())
    world.insert("o-2")
    world.connection.commit()


def test_a_commit_that_no_standby_has_confirmed_is_left_to_the_resolver(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unconfirmed(driver: Any, token: Any) -> bool:
        guarded_commit(driver, token)
        return False

    monkeypatch.setattr(postgres, "guarded_commit", unconfirmed)
    with world.client.transaction(world.connection, check_after=0.2) as tx:
        world.insert("o-1")
        tx.send(world.topic, b"o-1")
    tx.wait_published(PATIENCE_S)
    assert world.orders() == world.messages() == {"o-1"}
    assert "producer" not in world.client.call("tx.show", token=tx.token.hex)["by"]


def test_without_messages_it_is_an_ordinary_commit(
    fake: FakeBroker, connect: Connect, world: World
) -> None:
    client = connect(fake.url)
    with client.transaction(world.connection) as tx:
        world.insert("o-1")
    with client.transaction(world.connection):
        pass
    tx.wait_published(PATIENCE_S)
    assert world.orders() == {"o-1"}
    assert fake.accepted == 0


def test_messages_without_rows_are_a_transaction_too(world: World) -> None:
    with world.client.transaction(world.connection) as tx:
        tx.send(world.topic, b"lonely")
    tx.wait_published(PATIENCE_S)
    assert world.messages() == {"lonely"}


def test_a_connection_in_autocommit_mode_gets_a_transaction(world: World) -> None:
    world.connection.autocommit = True
    with world.client.transaction(world.connection) as tx:
        world.insert("o-1")
        tx.send(world.topic, b"o-1")
        assert world.orders() == set()
    tx.wait_published(PATIENCE_S)
    with suppress(ApplicationError), world.client.transaction(world.connection):
        world.insert("o-2")
        fail()
    assert world.orders() == world.messages() == {"o-1"}


def test_a_savepoint_withdraws_rows_and_messages_together(world: World) -> None:
    with world.client.transaction(world.connection) as tx:
        with tx.savepoint():
            world.insert("o-1")
            tx.send(world.topic, b"o-1")
        with suppress(ApplicationError), tx.savepoint():
            world.insert("o-2")
            tx.send(world.topic, b"o-2")
            fail()
        with suppress(psycopg2.Error), tx.savepoint():
            world.insert("o-1")
    tx.wait_published(PATIENCE_S)
    assert world.orders() == world.messages() == {"o-1"}


def test_without_the_broker_the_rows_are_rolled_back(
    world: World, fake: FakeBroker, connect: Connect
) -> None:
    client = connect(fake.url)
    fake.close()
    tx = client.transaction(world.connection, timeout=0.2)
    tx.__enter__()
    world.insert("o-1")
    tx.send(world.topic, b"o-1")
    with pytest.raises(BrokerUnavailable) as caught:
        tx.__exit__(None, None, None)
    assert (caught.value.outcome, caught.value.retriable) == ("not done", True)
    assert world.orders() == set()


def test_a_broker_that_does_not_answer_holds_the_row_locks_no_longer_than_asked(
    world: World, connect: Connect
) -> None:
    with Proxy(world.broker.url) as proxy:
        proxy.hold.add(Opcode.GROUP)
        client = connect(proxy.url)
        client.send(world.topic, b"first")
        tx = client.transaction(world.connection, timeout=2.0)
        tx.__enter__()
        world.insert("o-1")
        tx.send(world.topic, b"o-1")
        with pytest.raises(BrokerUnavailable, match="rolled back"):
            tx.__exit__(None, None, None)
        assert world.orders() == set()
        wait_until(lambda: world.state(tx.token) == "ROLLED_BACK")


@pytest.mark.parametrize("lost", [Opcode.GROUP, Opcode.DECIDE])
def test_a_lost_answer_changes_nothing(world: World, connect: Connect, lost: Opcode) -> None:
    with Proxy(world.broker.url) as proxy:
        proxy.lose[lost] = 1
        with connect(proxy.url).transaction(world.connection) as tx:
            world.insert("o-1")
            tx.send(world.topic, b"o-1")
        tx.wait_published(PATIENCE_S)
    assert world.orders() == world.messages() == {"o-1"}
    assert len(world.stored()) == 1


def test_a_database_that_no_resolver_of_the_broker_knows_is_refused(
    world: World, own_broker: RealBroker, connect: Connect
) -> None:
    tx = connect(own_broker.url).transaction(world.connection)
    tx.__enter__()
    world.insert("o-1")
    tx.send(world.topic, b"o-1")
    with pytest.raises(NoResolver, match="resolver"):
        tx.__exit__(None, None, None)
    assert world.orders() == set()


def test_a_commit_that_would_not_wait_for_the_disk_is_refused_unless_allowed(world: World) -> None:
    for allowed in (False, True):
        tx = world.client.transaction(world.connection, allow_weak_commit=allowed)
        tx.__enter__()
        with world.connection.cursor() as cursor:
            cursor.execute("SET LOCAL synchronous_commit = off")
        world.insert(f"o-{allowed}")
        tx.send(world.topic, f"o-{allowed}".encode())
        if allowed:
            tx.__exit__(None, None, None)
        else:
            with pytest.raises(SynchronousCommitOff):
                tx.__exit__(None, None, None)
    tx.wait_published(PATIENCE_S)
    assert world.orders() == world.messages() == {"o-True"}


def test_a_commit_whose_answer_is_lost_is_found_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def committed_and_lost(driver: Any, token: Any) -> None:
        guarded_commit(driver, token)
        driver.connection.close()
        raise InDoubt("the connection broke", token=str(token))

    monkeypatch.setattr(postgres, "guarded_commit", committed_and_lost)
    with world.client.transaction(world.connection) as tx:
        world.insert("o-1")
        tx.send(world.topic, b"o-1")
    tx.wait_published(PATIENCE_S)
    assert world.orders() == world.messages() == {"o-1"}
    assert world.client.call("tx.show", token=tx.token.hex)["by"].startswith("resolver")


def test_a_commit_that_was_lost_on_the_way_is_found_out_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(driver: Any, token: Any) -> None:
        driver.connection.close()
        raise InDoubt("the connection broke", token=str(token))

    monkeypatch.setattr(postgres, "guarded_commit", lost)
    tx = world.client.transaction(world.connection)
    tx.__enter__()
    world.insert("o-1")
    tx.send(world.topic, b"o-1")
    with pytest.raises(TransactionAborted, match="rolled the transaction back"):
        tx.__exit__(None, None, None)
    assert (world.orders(), world.messages()) == (set(), set())
    assert world.state(tx.token) == "ROLLED_BACK"


def test_without_an_answer_the_transaction_stays_in_doubt_and_the_resolver_ends_it(
    world: World, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def committed_and_lost(driver: Any, token: Any) -> None:
        guarded_commit(driver, token)
        raise InDoubt("the connection broke", token=str(token))

    monkeypatch.setattr(postgres, "guarded_commit", committed_and_lost)
    with Proxy(world.broker.url) as proxy:
        client = connect(proxy.url, timeout=6.0)
        client.send(world.topic, b"first")
        proxy.hold.add(Opcode.CALL)
        tx = client.transaction(world.connection, timeout=2.0)
        tx.__enter__()
        world.insert("o-1")
        tx.send(world.topic, b"o-1")
        with pytest.raises(InDoubt) as caught:
            tx.__exit__(None, None, None)
    assert caught.value.token == str(tx.token)
    wait_until(lambda: world.state(tx.token) == "PUBLISHED")


def test_connections_that_cannot_be_used_are_refused(world: World) -> None:
    with pytest.raises(LocalProtocolError, match="psycopg2"):
        world.client.transaction("no connection").__enter__()  # type: ignore[call-overload]
    with suppress(psycopg2.Error):
        world.insert("o-1" * 0 or None)  # type: ignore[arg-type]  # violates NOT NULL
    with pytest.raises(TransactionAborted, match="roll back"):
        world.client.transaction(world.connection).__enter__()
    world.connection.close()
    with pytest.raises(DatabaseUnavailable):
        world.client.transaction(world.connection).__enter__()


PRODUCER = """
import sys, psycopg2, txmq
url, dsn, topic, order = sys.argv[1:]
client = txmq.connect(url, service="orders")
connection = psycopg2.connect(dsn)
with client.transaction(connection, check_after=0.2) as tx:
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO orders (id) VALUES (%s)", (order,))
    tx.send(topic, order.encode(), key=order)
tx.wait_published(120)
client.close()
"""
CRASHES = {
    "tx.before_group": False,
    "tx.after_group": False,
    "tx.after_token": False,
    "tx.before_commit": False,
    "tx.after_commit": True,
    "tx.after_decide": True,
}


def test_every_crash_point_of_a_producer_has_a_test() -> None:
    source = (ROOT / "txmq/client/protocol/awaited/postgres.py").read_text("utf-8")
    assert {
        line.split('"')[1] for line in source.splitlines() if "crashpoint(" in line
    } == CRASHES.keys() | BETWEEN.keys()


def test_a_producer_that_dies_anywhere_leaves_rows_and_messages_in_agreement(
    world: World, tmp_path: Path
) -> None:
    world.client.call("topic.create", name=world.topic, partitions=8)
    producers = {
        point: Running(
            tmp_path / point,
            *(PRODUCER, world.broker.url, world.dsn, world.topic, point),
            command=run_source,
            environment=ENVIRONMENT | {VARIABLE: point},
        )
        for point in CRASHES
    }
    for point, producer in producers.items():
        assert producer.status() == -signal.SIGKILL, point
    committed = {point for point, done in CRASHES.items() if done}
    wait_until(lambda: world.settled() and world.messages() >= committed)
    assert world.orders() == world.messages() == committed


def test_a_producer_that_is_not_told_to_die_lives(world: World, tmp_path: Path) -> None:
    arguments = (PRODUCER, world.broker.url, world.dsn, world.topic, "alive")
    environment = ENVIRONMENT | {VARIABLE: "tx.after_commit:2"}
    assert Running(tmp_path, *arguments, command=run_source, environment=environment).status() == 0
    assert world.orders() == world.messages() == {"alive"}


def test_a_broker_killed_between_bundle_and_decision_publishes_what_was_committed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def killed(driver: Any, token: Any) -> Any:
        world.broker.kill()
        outcome = guarded_commit(driver, token)
        world.broker.start()
        return outcome

    monkeypatch.setattr(postgres, "guarded_commit", killed)
    with world.client.transaction(world.connection) as tx:
        world.insert("o-1")
        tx.send(world.topic, b"o-1")
    tx.wait_published(PATIENCE_S)
    assert world.orders() == world.messages() == {"o-1"}
