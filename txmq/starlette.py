"""Requests of Starlette and FastAPI whose rows and messages are one decision.

    messaging = Messaging("txmq://127.0.0.1:7650", service="shop", connect=connect)
    app = FastAPI(
        lifespan=messaging.lifespan, exception_handlers=messaging.exception_handlers
    )
    Begun = Annotated[Work, Depends(messaging.transaction, scope="function")]

    @app.post("/orders")
    async def place(order: str, work: Begun) -> None:
        await work.connection.execute("INSERT INTO orders (id) VALUES ($1)", order)
        work.tx.send("orders", order.encode())

With `scope="function"` FastAPI commits before it answers. Without it, it answers first:
a client would have its 200 of an order that then fails.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from math import ceil
from typing import Any, NamedTuple, TypeAlias, Unpack

from txmq import aio
from txmq.client.log import get_logger
from txmq.client.protocol.settings import Options
from txmq.client.protocol.transaction.options import TransactionOptions
from txmq.errors import LocalProtocolError, Throttled, TxmqError

RETRY_AFTER_S = 2  # for who is refused, where the error names no time
Connect = Callable[[], AbstractAsyncContextManager[Any]]
AsgiApp: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]
log = get_logger()


class Work(NamedTuple):
    """The transaction of a request: rows by its connection, messages by `tx.send`."""

    connection: Any
    tx: aio.PostgresTransaction


class Messaging:
    """The client of an application, from its start to its end.

    `connect` returns a connection of asyncpg or psycopg 3 for a block, as
    `pool.acquire` and `pool.connection` do. `transaction` are options of
    `client.transaction`, the others those of `txmq.aio.connect`.
    """

    def __init__(
        self,
        url: str,
        *,
        service: str | None = None,
        connect: Connect | None = None,
        transaction: TransactionOptions | None = None,
        **options: Unpack[Options],
    ) -> None:
        self._url, self._service, self._options = url, service, options
        self._connect, self._transaction = connect, transaction or {}
        self._client: aio.Client | None = None

    @asynccontextmanager
    async def lifespan(self, app: object = None) -> AsyncIterator[None]:
        """Keep a client while the application runs, and send all that waits at its
        end. An application with a lifespan of its own enters this one in it.
        """
        del app
        async with aio.connect(self._url, service=self._service, **self._options) as self._client:
            self._require_available()  # it begins to connect
            yield

    @property
    def exception_handlers(self) -> dict[Any, Any]:
        """Handlers for the application: they answer errors that a repetition may avoid
        with 503 and Retry-After. Others stay errors.
        """
        return {TxmqError: _answer}

    @property
    def client(self) -> aio.Client:
        """The client. Raises LocalProtocolError outside the application's life."""
        if self._client is None or self._client._core.closed:  # noqa: SLF001
            raise LocalProtocolError(
                "the application has not started, or has ended",
                hint="give it the lifespan: FastAPI(lifespan=messaging.lifespan)",
            )
        return self._client

    async def available(self) -> aio.Client:
        """Return the client, as a dependency of requests that send without rows. Raises
        BrokerUnavailable at once while the broker is known to be away.
        """
        self._require_available()
        return self.client

    def _require_available(self) -> None:
        core = self.client._core  # noqa: SLF001  # one who waits would have the error after its time-out
        core.connection().require_available()

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Work]:
        """Return a block that commits rows and messages at its end, both or neither.

        Raises BrokerUnavailable at once while the broker is known to be away, unless
        its messages may wait in the outbox.
        """
        if self._connect is None:
            raise LocalProtocolError(
                "there is no database", hint="give connect= to Messaging, as pool.acquire"
            )
        if self._transaction.get("on_unavailable") != "outbox":
            self._require_available()
        async with (
            self._connect() as connection,
            self.client.transaction(connection, **self._transaction) as tx,
        ):
            yield Work(connection, tx)

    async def transaction(self) -> AsyncIterator[Work]:
        """Begin and commit around a request, as a dependency of FastAPI:
        `Depends(messaging.transaction, scope="function")`.
        """
        async with self.begin() as work:
            yield work


async def _answer(request: object, error: TxmqError) -> AsgiApp:
    """Return the answer to a request that failed with an error of txmq, or raise it."""
    del request
    if not error.retriable:
        raise error
    # whoever calls this has it
    from starlette.responses import JSONResponse  # noqa: PLC0415

    log.warning("request.unavailable", error=str(error))
    pause = error.retry_after_s if isinstance(error, Throttled) else 0.0
    headers = {"Retry-After": str(ceil(pause) or RETRY_AFTER_S)}
    answer: AsgiApp = JSONResponse({"detail": "Service Unavailable"}, 503, headers)
    return answer
