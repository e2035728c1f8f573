"""Threaded transactions on Twisted, with a database or a checker."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import psycopg
import psycopg2
import pytest
from twisted.internet.defer import Deferred, gatherResults, succeed

import txmq.twisted
from tests.client.reactor_thread import InReactor
from tests.client.real import RealBroker
from tests.client.scripted_member import fresh
from tests.client.world import ApplicationError, World, fail
from txmq.client.protocol.transaction.checks import Half
from txmq.client.protocol.transaction.open_work import REASON, end_work
from txmq.errors import ConfigError, LocalProtocolError, TransactionAborted, TransactionEnded
from txmq.model.message import COMMIT, Decision
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.twisted import Client

COUNT_UP = "UPDATE orders SET id = (id::int + 1)::text RETURNING id"


@pytest.fixture
def client(reactor: Any, deciding: RealBroker, in_reactor: InReactor) -> Iterator[Client]:
    client = txmq.twisted.connect(
        reactor, deciding.url, service="tests", timeout=PATIENCE_S, connections=2
    )
    yield client

    async def close() -> None:
        await client.close()

    in_reactor(close)


def test_rows_messages_and_acks_are_one_decision(
    world: World, client: Client, in_reactor: InReactor
) -> None:
    async def story() -> None:
        source = fresh("t")
        await client.send(source, b"in")
        group = fresh("g")
        consumer = await client.consumer(group, [source])
        message = await consumer.receive()
        async with client.transaction(world.connection) as tx:
            await tx.run(world.insert, "o-1")
            tx.send(world.topic, b"o-1", key="o-1")
            tx.ack(message)
        await tx.wait_published(PATIENCE_S)
        assert [receipt.offset for receipt in await tx.receipts()] == [0]
        await consumer.close()
        shown = await client.call("group.show", group=group)
        assert [
            position["unsettled"] for position in shown["positions"] if position["unsettled"]
        ] == []

    in_reactor(story)
    assert world.orders() == world.messages() == {"o-1"}


def test_a_block_that_raises_leaves_nothing_and_gives_its_message_back(
    world: World, client: Client, in_reactor: InReactor
) -> None:
    async def story() -> None:
        source = fresh("t")
        await client.send(source, b"in")
        consumer = await client.consumer(fresh("g"), [source])
        message = await consumer.receive()
        assert message is not None
        tx = client.transaction(world.connection)
        with suppress(ApplicationError):
            async with tx:
                await tx.run(world.insert, "o-1")
                tx.send(world.topic, b"o-1")
                tx.ack(message)
                fail()
        consumer.ack(message)  # raises if it were not in hand again
        await consumer.close()

    in_reactor(story)
    assert (world.orders(), world.messages()) == (set(), set())


@pytest.mark.parametrize("driver", [psycopg2, psycopg])
def test_a_savepoint_takes_back_rows_and_messages(
    world: World, client: Client, in_reactor: InReactor, driver: Any
) -> None:
    world.connection.close()
    world.connection = driver.connect(world.dsn)

    async def story() -> None:
        async with client.transaction(world.connection) as tx:
            await tx.run(world.insert, "o-1")
            tx.send(world.topic, b"o-1")
            with suppress(ApplicationError):
                async with tx.savepoint():
                    await tx.run(world.insert, "o-2")
                    tx.send(world.topic, b"o-2")
                    fail()
            async with tx.savepoint():
                await tx.run(world.insert, "o-3")
                tx.send(world.topic, b"o-3")
        await tx.wait_published(PATIENCE_S)

    in_reactor(story)
    assert world.orders() == world.messages() == {"o-1", "o-3"}


def test_a_swallowed_error_of_a_statement_aborts(
    world: World, client: Client, in_reactor: InReactor
) -> None:
    async def story() -> None:
        async with client.transaction(world.connection) as tx:
            await tx.run(world.insert, "o-1")
            with suppress(psycopg2.IntegrityError):
                await tx.run(world.insert, "o-1")
            tx.send(world.topic, b"o-1")

    with pytest.raises(TransactionAborted):
        in_reactor(story)
    assert (world.orders(), world.messages()) == (set(), set())


def test_more_transactions_than_threads_wait_for_one_row_and_all_commit(
    world: World, client: Client, in_reactor: InReactor
) -> None:
    """Two threads: were places not kept, those that wait for the row would leave none
    to commit in.
    """
    world.insert("0")
    world.connection.commit()

    def count_up(connection: Any) -> str:
        with connection.cursor() as cursor:
            cursor.execute(COUNT_UP)
            return str(cursor.fetchone()[0])

    async def one() -> None:
        with closing(psycopg2.connect(world.dsn)) as connection:
            async with client.transaction(connection, timeout=PATIENCE_S) as tx:
                version = await tx.run(count_up, connection)
                tx.send(world.topic, version.encode(), key="k")

    async def story() -> None:
        await gatherResults([Deferred.fromCoroutine(one()) for _ in range(8)])

    in_reactor(story)
    wait_until(lambda: len(world.messages()) == 8, what="all messages")
    assert [found.body for found in world.stored()] == [b"%d" % version for version in range(1, 9)]


def test_steps_leave_the_reactor_alone_and_never_overlap(
    world: World, client: Client, in_reactor: InReactor
) -> None:
    here, running, overlaps = set[int](), list[int](), list[int]()

    def step(number: int) -> None:
        running.append(number)
        overlaps.append(len(running))
        here.add(threading.get_ident())
        running.remove(number)

    async def story() -> None:
        async with client.transaction(world.connection) as tx:
            await gatherResults([tx.run(step, number) for number in range(20)])
        assert threading.get_ident() not in here

    in_reactor(story)
    assert overlaps == [1] * 20


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("way", ["commit", "rollback"])
def test_a_caller_who_ends_the_transaction_is_told(
    client: Client, world: World, in_reactor: InReactor, way: str, *, joined: bool
) -> None:
    async def story() -> None:
        if joined:
            world.connection.cursor().execute("SELECT 1")
        async with client.transaction(world.connection) as tx:
            await tx.run(world.insert, "o-1")
            tx.send(world.topic, b"o-1")
            await tx.run(getattr(world.connection, way))

    with pytest.raises(TransactionEnded if joined else LocalProtocolError):
        in_reactor(story)
    assert world.messages() == set()
    assert world.orders() == ({"o-1"} if joined and way == "commit" else set())


def test_a_half_message_is_decided_by_its_block_or_by_a_checker(
    client: Client, world: World, in_reactor: InReactor
) -> None:
    asked, open_blocks = list[Half](), list[Any]()

    def checker(half: Half) -> Deferred[Decision]:
        asked.append(half)
        return succeed(COMMIT)

    async def story() -> None:
        client.register_checker("billing", checker)
        async with client.transaction(checker="billing") as tx:
            tx.send(world.topic, b"told")
            await tx.prepare()
            with pytest.raises(LocalProtocolError):
                tx.send(world.topic, b"too late")
        left = client.transaction(checker="billing", check_after=0.1)
        await left.__aenter__()
        left.send(world.topic, b"asked")
        await left.prepare()
        open_blocks.append(left)

    in_reactor(story)
    token = open_blocks[0].token
    wait_until(lambda: world.client.call("tx.show", token=token.hex)["check_reason"] == REASON)
    assert asked == []
    end_work(token)  # as if its process had died
    world.client.call("tx.check", token=token.hex)
    wait_until(lambda: world.messages() == {"told", "asked"}, what="both messages")
    assert [message.body for half in asked for message in half.messages] == [b"asked"]


def test_a_transaction_reaches_another_broker(
    world: World, client: Client, also_deciding: RealBroker, reactor: Any, in_reactor: InReactor
) -> None:
    other = txmq.twisted.connect(reactor, also_deciding.url, service="tests", timeout=PATIENCE_S)

    async def story() -> None:
        async with client.transaction(world.connection) as tx:
            await tx.run(world.insert, "o-1")
            tx.send(world.topic, b"o-1")
            (await tx.at(other)).send(world.topic, b"o-1")
        await tx.wait_published(PATIENCE_S)
        await other.close()

    in_reactor(story)
    assert (
        world.orders()
        == world.messages()
        == {found.body.decode() for found in also_deciding.read(world.topic)}
    )


def test_a_connection_and_a_checker_are_refused_together(world: World, client: Client) -> None:
    with pytest.raises(LocalProtocolError):
        client.transaction(world.connection, checker="billing")  # type: ignore[call-overload]
    with pytest.raises(LocalProtocolError, match="None is no connection"):
        client.transaction(None)  # type: ignore[call-overload]
    with pytest.raises(ConfigError):
        client.transaction(world.connection, timeout=-1.0)
