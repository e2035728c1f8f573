"""The driver of a connection, chosen by its type.

A driver is loaded when a connection of it comes, and not before.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import lru_cache, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from txmq.errors import LocalProtocolError
from txmq.tx.postgres.driver import Driver, run

T = TypeVar("T")
P = ParamSpec("P")


def driver_of(connection: object) -> Driver:
    """Return the driver of a connection; a driver is returned as it is.

    Raises LocalProtocolError for other objects.
    """
    kind: Any = type(connection)  # mypy takes no class for hashable
    return _adapter(kind)(connection)


@lru_cache
def _adapter(kind: Any) -> Callable[[Any], Driver]:  # noqa: ANN401  # mypy takes no class for hashable
    for base in kind.__mro__:
        if base.__name__ == "Psycopg2Driver":
            return _itself
        if base.__module__ == "psycopg2.extensions" and base.__name__ == "connection":
            from txmq.tx.postgres.drivers.psycopg2_driver import Psycopg2Driver  # noqa: PLC0415

            return Psycopg2Driver
    raise LocalProtocolError(
        f"a psycopg2 connection is needed, not a {kind.__name__}",
        hint="with SQLAlchemy: session.connection().connection.dbapi_connection",
    )


def _itself(driver: Driver) -> Driver:
    return driver


def blocking(
    rule: Callable[Concatenate[Driver, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """Return a rule as a function of a driver that blocks, or of its connection."""

    @wraps(rule)
    def call(given: object, *args: P.args, **options: P.kwargs) -> T:
        return run(rule(driver_of(given), *args, **options))

    return cast("Callable[Concatenate[Any, P], T]", call)
