"""Requests of FastAPI and Starlette: rows and messages are decided before an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
import psycopg2
import pytest
from fastapi import Depends, FastAPI, HTTPException
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import txmq
from txmq.aio import Client
from txmq.errors import LocalProtocolError, Throttled, TransactionAborted
from txmq.starlette import Messaging, Work
from txmq.testing.broker_thread import BrokerThread
from txmq.testing.postgres_server import postgres_url
from txmq.testing.wait import PATIENCE_S, wait_until

TABLE = """
CREATE TABLE orders
    (id int PRIMARY KEY, of int REFERENCES orders DEFERRABLE INITIALLY DEFERRED)
"""
NEVER_S = 86_400.0  # of a wait that would outlast the test


class Answer(NamedTuple):
    """The answer of an application to a request."""

    status: int
    headers: dict[bytes, bytes]


class Shop(NamedTuple):
    """A database with a table of orders, and the broker that may ask it."""

    broker: BrokerThread
    dsn: str

    def orders(self) -> list[int]:
        return [order for (order,) in self.rows("SELECT id FROM orders ORDER BY id")]

    def rows(self, statement: str) -> list[Any]:
        with closing(psycopg2.connect(self.dsn)) as connection, connection.cursor() as cursor:
            connection.autocommit = True
            cursor.execute(statement)
            return list(cursor.fetchall()) if cursor.description else []

    def messages(self) -> list[int]:
        with txmq.connect(self.broker.url, timeout=PATIENCE_S) as client:
            return sorted(int(found.body) for found in client.find("orders"))


@pytest.fixture
def shop(tmp_path: Path, database: str) -> Iterator[Shop]:
    with BrokerThread(tmp_path / "data", databases={"shop": database}) as broker:
        shop = Shop(broker, postgres_url(database))
        shop.rows(TABLE)
        with txmq.connect(broker.url, timeout=PATIENCE_S) as client:
            client.call("topic.create", name="orders", partitions=1)
        wait_until(lambda: shop.rows("SELECT 1 FROM txmq_broker"), what="the broker is registered")
        yield shop


async def ask(app: Any, path: str, query: str = "") -> Answer:
    """Post a request as a server of ASGI does."""
    sent = list[dict[str, Any]]()
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": path, "raw_path": path.encode(), "root_path": "",
        "query_string": query.encode(), "headers": [], "client": ("c", 1), "server": ("s", 80),
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return Answer(sent[0]["status"], dict(sent[0]["headers"]))


def make(shop: Shop, **options: Any) -> tuple[FastAPI, Messaging]:
    settings = {"timeout": PATIENCE_S} | options
    messaging = Messaging(
        shop.broker.url,
        service="shop",
        connect=lambda: app.state.pool.acquire(),  # noqa: PLW0108  # the pool comes later
        **settings,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with (
            asyncpg.create_pool(shop.dsn, min_size=1) as app.state.pool,
            messaging.lifespan(app),
        ):
            yield

    app = FastAPI(lifespan=lifespan, exception_handlers=messaging.exception_handlers)
    begun = Depends(messaging.transaction, scope="function")

    async def place(order: int, of: int | None = None, status: int = 0, work: Work = begun) -> None:
        await work.connection.execute("INSERT INTO orders VALUES ($1, $2)", order, of)
        work.tx.send("orders", str(order).encode(), key="k")
        if status:
            raise HTTPException(status)

    async def visit(client: Client = Depends(messaging.available)) -> None:  # noqa: B008  # FastAPI's way
        await client.send("visits", b"/")

    app.post("/orders", status_code=201)(place)
    app.post("/visits", status_code=202)(visit)
    return app, messaging


def run(app: Any, work: Callable[[], Any]) -> Any:
    """Run a coroutine during the application's life."""

    async def live() -> Any:
        async with asyncio.timeout(2 * PATIENCE_S), app.router.lifespan_context(app):
            return await work()

    return asyncio.run(live())


def test_an_answer_comes_behind_the_commit_of_rows_and_messages(shop: Shop) -> None:
    app, _messaging = make(shop)

    async def requests() -> list[int]:
        placed = await ask(app, "/orders", "order=1")
        assert shop.orders() == [1]
        refused = await ask(app, "/orders", "order=2&status=409")
        with pytest.raises(TransactionAborted):  # the commit fails, for a server: 500
            await ask(app, "/orders", "order=3&of=99")
        visited = await ask(app, "/visits")
        return [placed.status, refused.status, visited.status]

    assert run(app, requests) == [201, 409, 202]
    assert (shop.orders(), shop.messages()) == ([1], [1])


async def known_away(messaging: Messaging) -> None:
    connection = messaging.client._core.connection()
    await asyncio.to_thread(wait_until, lambda: connection.error is not None)


def test_while_the_broker_is_away_requests_are_refused_at_once(shop: Shop) -> None:
    app, messaging = make(shop, timeout=NEVER_S)

    async def requests() -> None:
        assert (await ask(app, "/visits")).status == 202
        await asyncio.to_thread(shop.broker.stop)
        await known_away(messaging)
        for path, query in (("/orders", "order=1"), ("/visits", "")):
            answer = await ask(app, path, query)
            assert (answer.status, answer.headers[b"retry-after"]) == (503, b"2")

    run(app, requests)
    assert shop.orders() == []


def test_with_the_outbox_requests_go_on_without_a_broker(shop: Shop) -> None:
    shop.broker.stop()
    transaction = {"on_unavailable": "outbox", "timeout": 0.3}
    app, messaging = make(shop, timeout=0.3, transaction=transaction)

    async def requests() -> list[int]:
        await known_away(messaging)
        return [(await ask(app, "/orders", f"order={order}")).status for order in (1, 2)]

    assert run(app, requests) == [201, 201]
    assert (shop.orders(), len(shop.rows("SELECT 1 FROM txmq_outbox"))) == ([1, 2], 2)


def test_starlette_begins_in_its_handler(shop: Shop) -> None:
    @asynccontextmanager
    async def connect() -> AsyncIterator[Any]:
        connection = await asyncpg.connect(shop.dsn)
        try:
            yield connection
        finally:
            await connection.close()

    messaging = Messaging(shop.broker.url, connect=connect, timeout=PATIENCE_S)

    async def place(request: Request) -> PlainTextResponse:
        del request
        async with messaging.begin() as work:
            await work.connection.execute("INSERT INTO orders VALUES (7)")
            work.tx.send("orders", b"7")
        return PlainTextResponse("placed")

    async def throttled(request: Request) -> PlainTextResponse:
        raise Throttled.after(7.2, "a disk is behind")

    routes = [Route("/o", place, methods=["POST"]), Route("/t", throttled, methods=["POST"])]
    app = Starlette(
        routes=routes,
        lifespan=messaging.lifespan,
        exception_handlers=messaging.exception_handlers,
    )

    async def requests() -> tuple[Answer, Answer]:
        return await ask(app, "/o"), await ask(app, "/t")

    placed, refused = run(app, requests)
    assert (placed.status, refused.status, refused.headers[b"retry-after"]) == (200, 503, b"8")
    assert (shop.orders(), shop.messages()) == ([7], [7])
    with pytest.raises(LocalProtocolError, match="the application has not started, or has ended"):
        _ = messaging.client
