"""Rows and messages as one decision on asyncio, with real servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import psycopg
import pytest

import txmq.aio
from tests.client.aio.databases import DATABASES, Database
from tests.client.aio.interrupting import Interrupter
from tests.client.aio.running import run
from tests.client.faces.face import AioFace
from tests.client.ledgers import Ledgers
from tests.client.scripted_member import fresh
from tests.client.world import ApplicationError, World
from txmq.aio import Client, EnlistedTransaction, outcome_of
from txmq.errors import (
    BrokerUnavailable,
    LocalProtocolError,
    TransactionAborted,
    TransactionEnded,
)
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.tx.postgres.driver import Status
from txmq.tx.postgres.drivers import driver_of


class Scene:
    """A client with connections of one driver, in the world of the blocking tests."""

    def __init__(self, world: World, database: Database, client: Client) -> None:
        self.world, self.database, self.client = world, database, client
        self._open: list[Any] = []

    async def connect(self) -> Any:
        """Open a connection that ends with the test."""
        self._open.append(await self.database.connect(self.world.dsn))
        return self._open[-1]

    async def insert(self, connection: Any, order: str) -> None:
        """Insert the row of an order."""
        await self.database.execute(connection, f"INSERT INTO orders (id) VALUES ('{order}')")

    async def order(self, connection: Any, order: str) -> txmq.aio.PostgresTransaction:
        """Insert a row and send its message in one transaction."""
        async with self.client.transaction(connection) as tx:
            await self.insert(connection, order)
            tx.send(self.world.topic, order.encode(), key=order)
        return tx

    async def agrees(self) -> set[str]:
        """Return the orders, once all is decided, with a message each and no other."""

        def settled() -> set[str]:
            wait_until(self.world.settled)
            orders = self.world.orders()
            found = [message.body.decode() for message in self.world.stored()]
            assert sorted(found) == sorted(orders), "rows and messages differ"
            return orders

        return await asyncio.to_thread(settled)

    async def close(self) -> None:
        for connection in self._open:
            await self.database.close(connection)


Scenes = Callable[[], Any]


@pytest.fixture(params=DATABASES)
def scenes(world: World, request: pytest.FixtureRequest) -> Scenes:
    """Make the scene of a test, in its loop, for each driver."""

    @asynccontextmanager
    async def scene(**options: Any) -> AsyncIterator[Scene]:
        settings = {"service": "orders", "timeout": 5, **options}
        async with txmq.aio.connect(world.broker.url, **settings) as client:
            made = Scene(world, DATABASES[request.param], client)
            try:
                yield made
            finally:
                await made.close()

    return scene


def test_rows_and_messages_exist_together(scenes: Scenes) -> None:
    async def story() -> None:
        async with scenes() as scene:
            connection = await scene.connect()
            tx = await scene.order(connection, "o-1")
            await tx.wait_published(PATIENCE_S)
            assert await scene.agrees() == {"o-1"}
            [receipt] = await tx.receipts()
            assert receipt.offset is not None
            with pytest.raises(ValueError, match="no"):  # noqa: PT012
                async with scene.client.transaction(connection) as tx:
                    await scene.insert(connection, "o-2")
                    tx.send(scene.world.topic, b"o-2", key="o-2")
                    raise ValueError("no")
            await scene.order(connection, "o-3")  # the connection is as it was
            assert await scene.agrees() == {"o-1", "o-3"}

    run(story())


def test_a_swallowed_error_publishes_nothing(scenes: Scenes) -> None:
    async def story() -> None:
        async with scenes() as scene:
            connection = await scene.connect()
            with pytest.raises(TransactionAborted):  # noqa: PT012
                async with scene.client.transaction(connection) as tx:
                    tx.send(scene.world.topic, b"phantom", key="o")
                    await scene.insert(connection, "o-1")
                    with suppress(Exception):
                        await scene.insert(connection, "o-1")
            assert await scene.agrees() == set()

    run(story())


def test_a_savepoint_takes_its_sends_back(scenes: Scenes) -> None:
    async def story() -> None:
        async with scenes() as scene:
            connection = await scene.connect()
            async with scene.client.transaction(connection) as tx:
                await scene.insert(connection, "o-1")
                tx.send(scene.world.topic, b"o-1", key="o-1")
                with suppress(ValueError):
                    async with tx.savepoint():
                        await scene.insert(connection, "o-2")
                        tx.send(scene.world.topic, b"o-2", key="o-2")
                        raise ValueError
            assert await scene.agrees() == {"o-1"}

    run(story())


def test_many_tasks_commit_at_once(scenes: Scenes) -> None:
    async def story() -> None:
        async with scenes() as scene:

            async def work(worker: int) -> None:
                connection = await scene.connect()
                for n in range(5):
                    await scene.order(connection, f"o-{worker}-{n}")

            await asyncio.gather(*(work(worker) for worker in range(6)))
            assert len(await scene.agrees()) == 30

    run(story())


def test_acks_are_part_of_it(scenes: Scenes) -> None:
    async def story() -> None:
        async with scenes() as scene:
            connection, topic = await scene.connect(), fresh("in")
            await scene.client.send(topic, b"o-1")
            group = fresh("g")
            async with await scene.client.consumer(group, [topic]) as consumer:
                message = await consumer.receive()
                assert message is not None
                with suppress(ValueError):
                    async with scene.client.transaction(connection) as tx:
                        tx.ack(message)
                        raise ValueError
                async with scene.client.transaction(connection) as tx:
                    await scene.insert(connection, "o-1")
                    tx.send(scene.world.topic, b"o-1", key="o-1")
                    tx.ack(message)
            async with await scene.client.consumer(group, [topic]) as consumer:
                assert await consumer.receive(0.2) is None
            assert await scene.agrees() == {"o-1"}

    run(story())


def test_without_a_broker_the_rows_are_rolled_back(scenes: Scenes) -> None:
    async def story() -> None:
        async with scenes() as scene:
            connection = await scene.connect()
            async with txmq.aio.connect("txmq://127.0.0.1:1", timeout=0.2) as lost:
                with pytest.raises(BrokerUnavailable):  # noqa: PT012
                    async with lost.transaction(connection, timeout=0.2) as tx:
                        await scene.insert(connection, "o-1")
                        tx.send(scene.world.topic, b"o-1")
            await scene.order(connection, "o-2")
            assert await scene.agrees() == {"o-2"}

    run(story())


def test_messages_wait_in_the_outbox_while_the_broker_is_away(scenes: Scenes) -> None:
    async def story() -> None:
        async with scenes() as scene:
            connection = await scene.connect()
            await scene.order(connection, "o-1")
            log_id = await scene.client.log_id()
            async with (
                txmq.aio.connect(
                    "txmq://127.0.0.1:1", timeout=0.2, log_id=log_id, service="orders"
                ) as away,
                away.transaction(connection, on_unavailable="outbox", timeout=0.2) as tx,
            ):
                await scene.insert(connection, "o-2")
                tx.send(scene.world.topic, b"o-2", key="o-2")

            def fetched() -> bool:
                return {found.body for found in scene.world.stored()} == {b"o-1", b"o-2"}

            await asyncio.to_thread(wait_until, fetched, PATIENCE_S)

    run(story())


def test_who_ends_it_inside_is_told(scenes: Scenes) -> None:
    async def story() -> None:
        async with scenes() as scene:
            connection = await scene.connect()
            with pytest.raises((TransactionEnded, LocalProtocolError)):  # noqa: PT012
                async with scene.client.transaction(connection) as tx:
                    await scene.insert(connection, "o-1")
                    tx.send(scene.world.topic, b"o-1", key="o-1")
                    await scene.database.execute(connection, "ROLLBACK")
                    await scene.insert(connection, "o-2")
            assert not scene.world.stored()

    run(story())


def test_an_inbox_applies_each_message_once(scenes: Scenes) -> None:
    async def story() -> None:
        async with scenes() as scene:
            topic, group = fresh("in"), fresh("g")
            world, database = scene.world, scene.database
            for n in range(12):
                await scene.client.send(topic, b"o-%d" % n, key=f"k{n % 3}")
            calls: list[bytes] = []

            async def connect() -> Any:
                return await database.connect(world.dsn)

            async def handle(message: Any, connection: Any) -> None:
                calls.append(message.body)
                await scene.insert(connection, message.body.decode())
                if message.body == b"o-3" and calls.count(b"o-3") == 1:
                    raise ValueError("its row is rolled back")

            retry = txmq.RetryPolicy((0.01,), retries=5)
            async with await scene.client.consumer(
                group, [topic], retry=retry, mode="ordered"
            ) as consumer:
                work = asyncio.create_task(consumer.run(handle, inbox=connect, workers=3))
                await asyncio.to_thread(wait_until, lambda: len(world.orders()) == 12, PATIENCE_S)
                work.cancel()
                with suppress(asyncio.CancelledError):
                    await work
            assert world.orders() == {f"o-{n}" for n in range(12)}
            assert calls.count(b"o-3") == 2
            # What was applied counts as applied, wherever the group begins again.
            await scene.client.call("group.reset", group=group, topic=topic, to="first")
            calls.clear()
            async with await scene.client.consumer(group, [topic], mode="ordered") as consumer:
                work = asyncio.create_task(consumer.run(handle, inbox=connect, batch=4))
                await asyncio.to_thread(
                    wait_until, lambda: consumer.stats.duplicates == 12, PATIENCE_S
                )
                await consumer.close()
                await work
            assert not calls

    run(story())


@pytest.mark.parametrize("alone", [False, True])
def test_a_list_that_fails_is_applied_one_by_one_without_later_ones_of_a_nacked_key(
    scenes: Scenes, *, alone: bool
) -> None:
    """Its handler nacks a message with the others, or when it gets it alone."""

    async def story() -> None:
        async with scenes() as scene:
            topic, group, world = fresh("in"), fresh("g"), scene.world
            messages = [txmq.Message(b"o-%d" % n, key=f"k{n % 3}") for n in range(6)]
            await scene.client.send_batch(topic, messages)

            async def connect() -> Any:
                return await scene.database.connect(world.dsn)

            consumer = await scene.client.consumer(
                group, [topic], mode="ordered", on_exhausted="park"
            )

            async def handle(found: list[Any], connection: Any) -> None:
                for message in found:
                    await scene.insert(connection, message.body.decode())
                    if message.body == b"o-2" and alone is (len(found) == 1):
                        consumer.dead_letter(message, "poison")
                if len(found) > 1:
                    raise ApplicationError

            await AioFace().drain(
                scene.client,
                consumer,
                handle,
                lambda: len(world.orders()) >= 4,
                inbox=connect,
                batch=6,
                batch_wait=PATIENCE_S,
            )
            # both are of key k2
            assert world.orders() == {"o-0", "o-1", "o-3", "o-4"}
            assert (await scene.client.call("group.show", group=group))["parked"] == 1

    run(story())


def test_a_cancelled_inbox_loses_and_doubles_nothing(scenes: Scenes) -> None:
    async def story() -> None:
        async with scenes() as scene:
            topic, group, world = fresh("in"), fresh("g"), scene.world
            await scene.client.send_batch(topic, [txmq.Message(b"o-%d" % n) for n in range(40)])

            async def connect() -> Any:
                return await scene.database.connect(world.dsn)

            async def handle(message: Any, connection: Any) -> None:
                await scene.insert(connection, message.body.decode())

            async with await scene.client.consumer(group, [topic]) as consumer:
                for step in range(6):
                    work = asyncio.create_task(consumer.run(handle, inbox=connect, workers=2))
                    await asyncio.sleep(0.02 + 0.007 * step)
                    work.cancel()
                    with suppress(asyncio.CancelledError):
                        await work
                work = asyncio.create_task(consumer.run(handle, inbox=connect, workers=2))
                await asyncio.to_thread(wait_until, lambda: len(world.orders()) == 40, PATIENCE_S)
                await consumer.close()
                await work
            assert world.orders() == {f"o-{n}" for n in range(40)}

    run(story())


def test_none_is_no_connection(scenes: Scenes) -> None:
    async def story() -> None:
        async with scenes() as scene:
            for begin in (scene.client.transaction, scene.client.enlist):
                with pytest.raises(LocalProtocolError, match="None is no connection"):
                    begin(None)

    run(story())


def test_a_connection_whose_commit_would_leave_the_messages_is_refused(scenes: Scenes) -> None:
    async def story() -> None:
        async with scenes() as scene:
            connection = await scene.database.connect(scene.world.dsn)
            async with scene.database.transaction(connection):
                with pytest.raises(LocalProtocolError, match="takes no messages along"):
                    scene.client.enlist(connection)
            await scene.database.close(connection)

    run(story())


def test_messages_are_enlisted_in_the_drivers_own_transaction(scenes: Scenes) -> None:
    async def story() -> None:
        async with scenes() as scene:
            database = scene.database
            connection = await database.connect_enlisting(scene.world.dsn)
            try:
                for order, committed in (("o-1", True), ("o-2", False), ("o-3", True)):
                    with suppress(ValueError):
                        async with database.transaction(connection):
                            tx = scene.client.enlist(connection)
                            await scene.insert(connection, order)
                            tx.send(scene.world.topic, order.encode(), key=order)
                            assert [one.message.key for one in tx.pending()] == [order]
                            if not committed:
                                raise ValueError
                assert await scene.agrees() == {"o-1", "o-3"}
            finally:
                await database.close(connection)

    run(story())


@pytest.mark.parametrize("database", DATABASES.values(), ids=list(DATABASES))
def test_two_databases_and_their_messages(either: Ledgers, database: Database) -> None:
    async def story() -> None:
        async with txmq.aio.connect(either.broker.url, service="orders") as client:
            connections = [await database.connect(dsn) for dsn in either.dsns]

            async def order(name: str, *, fail: bool = False) -> None:
                async with client.xa(*connections) as tx:
                    for connection in connections:
                        await database.execute(connection, f"INSERT INTO orders VALUES ('{name}')")
                    tx.send(either.topic, name.encode(), key="k")
                    if fail:
                        raise ApplicationError
                assert not tx.unfinished

            try:
                await order("o-1")
                with pytest.raises(ApplicationError):
                    await order("o-2", fail=True)
                with pytest.raises(database.error):
                    await order("o-1")
                await order("o-3")
            finally:
                for connection in connections:
                    await database.close(connection)
        await asyncio.to_thread(either.await_published, "o-1", "o-3")
        assert either.agree("o-1", "o-3")

    run(story())


def test_a_half_message_in_a_block(world: World) -> None:
    async def story() -> None:
        async with txmq.aio.connect(world.broker.url, service="orders") as client:
            async with client.transaction(checker="c") as tx:
                tx.send(world.topic, b"o-1", key="o-1")
                await tx.prepare()
                assert not world.stored()
            await tx.wait_published(PATIENCE_S)
            with suppress(ValueError):
                async with client.transaction(checker="c") as tx:
                    tx.send(world.topic, b"o-2", key="o-1")
                    await tx.prepare()
                    raise ValueError
            assert world.messages() == {"o-1"}

    run(story())


def test_a_cancellation_at_any_await_leaves_no_doubt_unnamed(scenes: Scenes) -> None:
    async def story() -> None:
        outcomes: dict[str | None, int] = {}
        committed: set[str] = set()
        async with scenes() as scene:
            interrupter, ended, step = Interrupter(), False, 0
            while not ended:
                step += 1
                order = f"o-{step}"
                connection = await scene.connect()
                try:
                    ended = await interrupter.run(scene.order(connection, order), step)
                    outcome: str | None = "committed"
                    committed.add(order)
                except asyncio.CancelledError as error:
                    outcome = outcome_of(error)
                    assert outcome is not None, f"the outcome at await {step} is not named"
                outcomes[outcome] = outcomes.get(outcome, 0) + 1
                if outcome == "not done":
                    await asyncio.to_thread(wait_until, scene.world.settled, PATIENCE_S)
                    assert order not in scene.world.orders()
                    assert order not in scene.world.messages()
            orders = await scene.agrees()
            assert committed <= orders
        assert outcomes["not done"] > 4
        assert outcomes["unknown"] > 0

    run(story())


def test_a_cancellation_at_any_await_of_an_enlisted_transaction_is_named(scenes: Scenes) -> None:
    """What is said to be "not done" is not done by a later commit, either."""

    async def story() -> None:
        outcomes: list[str | None] = []
        committed: set[str] = set()
        async with scenes() as scene:
            interrupter, ended, step = Interrupter(), False, 0

            async def order(connection: Any, name: str) -> None:
                async with scene.database.transaction(connection):
                    await scene.insert(connection, name)
                    tx = scene.client.enlist(connection)
                    tx.send(scene.world.topic, name.encode(), key=name)

            while not ended:
                step += 1
                name = f"o-{step}"
                connection = await scene.database.connect_enlisting(scene.world.dsn)
                try:
                    ended = await interrupter.run(order(connection, name), step)
                    committed.add(name)
                except asyncio.CancelledError as error:
                    outcomes.append(outcome_of(error))
                    if outcomes[-1] == "not done" and hasattr(connection, "commit"):
                        with suppress(scene.database.error):
                            await connection.commit()
                    if outcomes[-1] == "not done":
                        await asyncio.to_thread(wait_until, scene.world.settled, PATIENCE_S)
                        assert name not in scene.world.orders() | scene.world.messages()
                finally:
                    await scene.database.close(connection)
            assert committed <= await scene.agrees()
        assert outcomes.count("not done") > 2

    run(story())


@pytest.mark.parametrize("by", ["hook", "commit"])
def test_a_cancellation_that_comes_when_all_is_stored(
    scenes: Scenes, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """The hook rolls back; where COMMIT follows at once its answer is waited for."""

    async def story() -> None:
        async with scenes() as scene:
            connection = await scene.database.connect_enlisting(scene.world.dsn)
            caller, store_all = asyncio.current_task(), EnlistedTransaction._store_all
            assert caller is not None

            async def cancelled(self: EnlistedTransaction) -> None:
                await store_all(self)
                caller.cancel()

            monkeypatch.setattr(EnlistedTransaction, "_store_all", cancelled)
            own = connection.transaction() if scene.database is DATABASES["asyncpg"] else None
            if own is not None:
                await own.start()
            await scene.insert(connection, "o-1")
            tx = scene.client.enlist(connection)
            tx.send(scene.world.topic, b"o-1")
            end = tx.before_commit if by == "hook" else (own or connection).commit
            with pytest.raises(asyncio.CancelledError) as raised:
                await end()
            caller.uncancel()
            assert outcome_of(raised.value) == {"hook": "not done", "commit": "unknown"}[by]
            assert driver_of(connection).status is Status.IDLE
            if own is None:
                await connection.commit()
            await scene.database.close(connection)
            assert await scene.agrees() == {"hook": set(), "commit": {"o-1"}}[by]

    run(story())


def test_an_exit_behind_a_refused_rollback_is_the_callers_own(world: World) -> None:
    """It is raised in his task: of another one it would end the loop."""
    own = SystemExit("mine")

    async def story() -> None:
        async with _with_psycopg(world) as (client, connection):
            with pytest.raises(SystemExit) as raised:  # noqa: PT012
                async with client.transaction(connection):
                    await connection.execute("INSERT INTO orders (id) VALUES ('o-1')")
                    try:
                        raise own
                    finally:
                        await connection.rollback()
            assert raised.value is own

    run(story())
    assert world.orders() == set()


@pytest.mark.parametrize("cancellations", [1, 2])
def test_a_cancelled_block_whose_caller_committed_is_of_unknown_outcome(
    world: World, cancellations: int
) -> None:
    async def story() -> None:
        async with _with_psycopg(world) as (client, connection):
            inside = asyncio.Event()

            async def work() -> None:
                async with client.transaction(connection):
                    await connection.execute("INSERT INTO orders (id) VALUES ('o-1')")
                    connection.pgconn.exec_(b"COMMIT")  # past the watch
                    inside.set()
                    await asyncio.Event().wait()

            task = asyncio.create_task(work())
            await inside.wait()
            for _ in range(cancellations):
                task.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError) as cancelled:
                await task
            assert outcome_of(cancelled.value) == "unknown"

    run(story())
    assert world.orders() == {"o-1"}


@asynccontextmanager
async def _with_psycopg(world: World) -> AsyncIterator[tuple[Client, psycopg.AsyncConnection]]:
    async with (
        txmq.aio.connect(world.broker.url, service="orders") as client,
        await psycopg.AsyncConnection.connect(world.dsn) as connection,
    ):
        yield client, connection
