"""The driver of a connection, chosen by its type.

A driver is loaded when a connection of it comes, and not before.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import lru_cache, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from txmq.errors import LocalProtocolError
from txmq.faces import run
from txmq.tx.postgres.driver import Driver

T = TypeVar("T")
P = ParamSpec("P")


def driver_of(connection: object) -> Driver:
    """Return the driver of a connection; a driver is returned as it is.

    Raises LocalProtocolError for other objects.
    """
    kind: Any = type(connection)  # mypy takes no class for hashable
    return _adapter(kind)(connection)


def blocking_driver(connection: object) -> Driver:
    """Return the driver of a connection that blocks. Raises LocalProtocolError."""
    driver = driver_of(connection)
    if driver.awaits:
        raise LocalProtocolError(
            f"{_name_of(driver)} is a connection of asyncio, and this client blocks",
            hint="use txmq.aio, or a connection that blocks",
        )
    return driver


def async_driver(connection: object) -> Driver:
    """Return the driver of a connection of asyncio. Raises LocalProtocolError."""
    driver = driver_of(connection)
    if not driver.awaits:
        raise LocalProtocolError(
            f"{_name_of(driver)} blocks, and would stop the event loop",
            hint="use psycopg.AsyncConnection or asyncpg.connect()",
        )
    return driver


def driver_in_thread(connection: object, call: Callable[..., Any]) -> Driver:
    """Return the driver of a connection that blocks, for an event loop.

    `call` is a coroutine function that calls a function in a thread, one at a time.
    Raises LocalProtocolError.
    """
    from txmq.tx.postgres.drivers.in_thread import ThreadDriver  # noqa: PLC0415

    _ADAPTED.add(ThreadDriver)
    return cast("Driver", ThreadDriver(blocking_driver(connection), call))


def _name_of(driver: Driver) -> str:
    kind = type(driver.connection)
    return f"{kind.__module__}.{kind.__qualname__}"


@lru_cache
def _adapter(kind: type) -> Callable[[Any], Driver]:
    for base in kind.__mro__:
        if base in _ADAPTED:
            return _itself
        if (load := _ADAPTERS.get((base.__module__, base.__name__))) is not None:
            _ADAPTED.add(adapter := load())
            return adapter
    raise LocalProtocolError(
        f"a connection of psycopg2, psycopg or asyncpg is needed, not a {kind.__name__}",
        hint="with SQLAlchemy: session.connection().connection.driver_connection",
    )


def _psycopg2() -> Callable[[Any], Driver]:
    from txmq.tx.postgres.drivers.psycopg2_driver import Psycopg2Driver  # noqa: PLC0415

    return Psycopg2Driver


def _psycopg() -> Callable[[Any], Driver]:
    from txmq.tx.postgres.drivers.psycopg_driver import PsycopgDriver  # noqa: PLC0415

    return PsycopgDriver


def _asyncpg() -> Callable[[Any], Driver]:
    from txmq.tx.postgres.drivers.asyncpg_driver import AsyncpgDriver  # noqa: PLC0415

    return AsyncpgDriver


_ADAPTED = set[object]()  # the classes of drivers that are loaded
_ADAPTERS: dict[tuple[str, str], Callable[[], Callable[[Any], Driver]]] = {
    ("psycopg2.extensions", "connection"): _psycopg2,
    ("psycopg", "Connection"): _psycopg,
    ("psycopg", "AsyncConnection"): _psycopg,
    ("asyncpg.connection", "Connection"): _asyncpg,
    ("asyncpg.pool", "PoolConnectionProxy"): _asyncpg,
}


def _itself(driver: Driver) -> Driver:
    return driver


def blocking(
    rule: Callable[Concatenate[Driver, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """Return a rule as a function of a driver that blocks, or of its connection."""

    @wraps(rule)
    def call(given: object, *args: P.args, **options: P.kwargs) -> T:
        return run(rule(blocking_driver(given), *args, **options))

    return cast("Callable[Concatenate[Any, P], T]", call)
