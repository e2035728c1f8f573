"""Transactions over two brokers by `tx.at`: both have the messages, or neither."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg2
import pytest

from tests.client.proxy import Proxy
from tests.client.real import RealBroker
from tests.client.world import ApplicationError, World, fail, make_tables
from txmq.client.blocking.client import Client
from txmq.client.protocol.awaited import postgres
from txmq.crashpoints import VARIABLE
from txmq.errors import (
    BrokerUnavailable,
    InDoubt,
    LocalProtocolError,
    NoResolver,
    TransactionAborted,
)
from txmq.testing.forked import run_source
from txmq.testing.processes import ENVIRONMENT, Running
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.tx.postgres.blocking import guarded_commit
from txmq.tx.postgres.brokers import registered
from txmq.tx.postgres.session import connect as connect_to
from txmq.wire.data_requests import Opcode

Connect = Callable[..., Client]


class Two(World):
    """A world with another broker, which decides by the same database."""

    other: RealBroker
    there: Client

    def sent_there(self) -> set[str]:
        return {found.body.decode() for found in self.other.read(self.topic)}

    def all_settled(self) -> bool:
        return self.settled() and not self.there.call("tx.list", state="undecided")["transactions"]

    def agree(self, *orders: str) -> bool:
        """True if nothing is undecided, and exactly these orders exist everywhere."""
        return self.all_settled() and self.orders() == self.messages() == self.sent_there() == set(
            orders
        )


@pytest.fixture
def two(
    shared_database: str, deciding: RealBroker, also_deciding: RealBroker, connect: Connect
) -> Iterator[Two]:
    make_tables(shared_database)
    two = Two(shared_database, deciding, connect(deciding.url))
    two.other, two.there = also_deciding, connect(also_deciding.url)
    yield two
    two.connection.close()


def order(two: Two, number: str, **options: Any) -> Any:
    """A transaction that is about to end, with a row and a message at each broker."""
    tx = two.client.transaction(two.connection, **options)
    tx.__enter__()
    two.insert(number)
    tx.send(two.topic, number.encode(), key="k")
    tx.at(two.there).send(two.topic, number.encode(), key="k")
    return tx


def token_rows(two: Two, token: Any) -> int:
    with psycopg2.connect(two.dsn) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM txmq_token WHERE tok = %s", (str(token),))
        [(found,)] = cursor.fetchall()
    connection.close()
    return int(found)


def test_rows_and_messages_at_two_brokers_exist_together(two: Two) -> None:
    with two.client.transaction(two.connection) as tx:
        two.insert("o-1")
        tx.send(two.topic, b"o-1")
        tx.at(two.there).send_many(two.topic, [b"o-1"], ["k"])
        assert two.messages() == two.sent_there() == set()
    tx.wait_published(PATIENCE_S)
    assert two.agree("o-1")
    assert token_rows(two, tx.token) == 2
    assert [got.offset for got in tx.receipts()] == [0]


def test_both_brokers_have_reported_to_the_database(two: Two) -> None:
    def reported() -> set[UUID]:
        with closing(connect_to(two.dsn, application_name="test")) as connection:
            return {broker.log_id for broker in registered(connection)}

    wait_until(lambda: reported() >= {two.client.log_id, two.there.log_id})


def test_the_brokers_of_a_transaction_need_not_include_the_clients_own(two: Two) -> None:
    with two.client.transaction(two.connection) as tx:
        tx.at(two.there).send(two.topic, b"o-1")
    tx.wait_published(PATIENCE_S)
    assert (two.messages(), two.sent_there()) == (set(), {"o-1"})
    assert token_rows(two, tx.token) == 1


def test_two_clients_of_one_broker_are_one_participant(two: Two, connect: Connect) -> None:
    again = connect(two.broker.url)
    with two.client.transaction(two.connection) as tx:
        for n, client in enumerate((two.client, again, two.client, again)):
            tx.at(client).send(two.topic, str(n).encode(), key="k")
    tx.wait_published(PATIENCE_S)
    assert [found.body for found in two.stored()] == [b"0", b"1", b"2", b"3"]
    assert token_rows(two, tx.token) == 1


def test_a_block_that_raises_leaves_nothing_at_either_broker(two: Two) -> None:
    with suppress(ApplicationError), two.client.transaction(two.connection) as tx:
        two.insert("o-1")
        tx.send(two.topic, b"o-1")
        tx.at(two.there).send(two.topic, b"o-1")
        fail()
    assert two.agree()


def test_a_savepoint_takes_back_what_was_sent_to_either_broker(two: Two) -> None:
    with two.client.transaction(two.connection) as tx:
        two.insert("o-1")
        tx.send(two.topic, b"o-1")
        with suppress(ApplicationError), tx.savepoint():
            tx.send(two.topic, b"o-2")
            tx.at(two.there).send(two.topic, b"o-2")
            fail()
        tx.at(two.there).send(two.topic, b"o-1")
    tx.wait_published(PATIENCE_S)
    assert two.agree("o-1")


def test_a_refused_commit_takes_back_both_bundles(two: Two) -> None:
    tx = order(two, "o-1")
    with two.connection.cursor() as cursor:
        cursor.execute("INSERT INTO lines VALUES (1, 'no such order')")
    with pytest.raises(TransactionAborted):
        tx.__exit__(None, None, None)
    wait_until(lambda: two.state(tx.token) == "ROLLED_BACK")
    wait_until(two.agree)


@pytest.mark.parametrize("holding", [False, True])
def test_with_one_broker_away_there_is_nothing_anywhere(
    two: Two,
    connect: Connect,
    holding: bool,  # noqa: FBT001
) -> None:
    with Proxy(two.other.url) as proxy:
        two.there = connect(proxy.url)
        two.there.send(two.topic, b"first")
        tx = order(two, "o-1", timeout=2.0)
        if holding:
            proxy.hold.add(Opcode.GROUP)
        else:
            proxy.cut()
        with pytest.raises(BrokerUnavailable):
            tx.__exit__(None, None, None)
        assert two.orders() == set()
    two.there.close(0.1)
    two.there = connect(two.other.url)
    wait_until(two.all_settled)
    assert (two.messages(), two.sent_there()) == (set(), {"first"})


def test_a_broker_that_was_never_met_and_is_away_ends_the_block(two: Two, connect: Connect) -> None:
    nobody = connect("txmq://127.0.0.1:1", timeout=0.1)
    with suppress(BrokerUnavailable), two.client.transaction(two.connection) as tx:
        two.insert("o-1")
        tx.send(two.topic, b"o-1")
        tx.at(nobody)
    with pytest.raises(LocalProtocolError, match="not been committed"):
        tx.wait_published(PATIENCE_S)
    assert two.agree()


def test_a_broker_that_cannot_ask_the_database_refuses_for_all(
    two: Two, own_broker: RealBroker, connect: Connect
) -> None:
    two.there, there = connect(own_broker.url), two.there
    tx = order(two, "o-1")
    with pytest.raises(NoResolver):
        tx.__exit__(None, None, None)
    two.there = there
    wait_until(two.agree)


def test_the_answer_to_a_lost_commit_comes_from_the_broker_that_is_there(
    two: Two, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def committed_and_lost(driver: Any, token: Any) -> None:
        guarded_commit(driver, token)
        raise InDoubt("the connection broke", token=str(token))

    monkeypatch.setattr(postgres, "guarded_commit", committed_and_lost)
    with Proxy(two.broker.url) as proxy:
        direct, two.client = two.client, connect(proxy.url, timeout=2.0)
        two.client.send(two.topic, b"o-1")
        proxy.hold.add(Opcode.CALL)
        tx = order(two, "o-1")
        tx.__exit__(None, None, None)
        two.client.close(0.1)
    two.client = direct
    wait_until(lambda: two.agree("o-1"))


@pytest.mark.parametrize("checker", [None, "orders"])
def test_without_a_database_there_is_one_broker(
    two: Two, connect: Connect, checker: str | None
) -> None:
    tx = two.client.transaction(checker=checker) if checker else two.client.transaction()
    with tx:
        tx.at(connect(two.broker.url)).send(two.topic, b"o-1")
        with pytest.raises(
            LocalProtocolError, match=r"second broker .*client\.transaction\(connection\)"
        ):
            tx.at(two.there)
    tx.wait_published(PATIENCE_S)
    assert two.messages() == {"o-1"}


def test_messages_are_acked_at_the_broker_that_delivered_them(two: Two) -> None:
    two.there.send("asked", b"question")
    with two.there.consumer("askers", ["asked"]) as consumer:
        message = consumer.receive(PATIENCE_S)
        with two.client.transaction(two.connection) as tx:
            with pytest.raises(LocalProtocolError, match="another broker"):
                tx.ack(message)
            tx.at(two.there).ack(message)
            tx.send(two.topic, b"answer")
        tx.wait_published(PATIENCE_S)
        wait_until(
            lambda: two.there.call("tx.show", token=tx.token.hex)["state"] == "PUBLISHED",
        )
    assert two.messages() == {"answer"}


PRODUCER = """
import sys, psycopg2, txmq
here, there, dsn, topic, order = sys.argv[1:]
connection = psycopg2.connect(dsn)
with txmq.connect(here, service="orders") as a, txmq.connect(there, service="orders") as b:
    with a.transaction(connection, check_after=0.2) as tx:
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO orders (id) VALUES (%s)", (order,))
        tx.send(topic, order.encode(), key=order)
        tx.at(b).send(topic, order.encode(), key=order)
    tx.wait_published(PATIENCE_S)
"""
BETWEEN = {
    "tx.between_groups": False,
    "tx.between_decides": True,
}  # crash points that one broker has not
CRASHES = {"tx.after_group": False, "tx.after_token": False, "tx.after_commit": True, **BETWEEN}


def test_a_producer_that_dies_anywhere_leaves_both_brokers_and_the_rows_in_agreement(
    two: Two, tmp_path: Path
) -> None:
    for client in (two.client, two.there):
        client.call("topic.create", name=two.topic, partitions=8)
    producers = {
        point: Running(
            tmp_path / point,
            *(PRODUCER, two.broker.url, two.other.url, two.dsn, two.topic, point),
            command=run_source,
            environment=ENVIRONMENT | {VARIABLE: point},
        )
        for point in CRASHES
    }
    for point, producer in producers.items():
        assert producer.status() == -signal.SIGKILL, point
    committed = [point for point, done in CRASHES.items() if done]
    wait_until(lambda: two.agree(*committed))


def test_a_broker_killed_before_the_decision_publishes_what_was_committed(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def killed(driver: Any, token: Any) -> Any:
        two.other.kill()
        outcome = guarded_commit(driver, token)
        two.other.start()
        return outcome

    monkeypatch.setattr(postgres, "guarded_commit", killed)
    tx = order(two, "o-1")
    tx.__exit__(None, None, None)
    tx.wait_published(PATIENCE_S)
    assert two.agree("o-1")
