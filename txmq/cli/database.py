"""The database that a command reads or changes: its DSN, and its connection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from txmq.tx.postgres.session import Connection

Dsn = Annotated[
    str,
    typer.Argument(
        envvar="TXMQ_DSN",
        metavar="DSN",
        help="Connection string or URI of the database, as for psql.",
    ),
]


@contextmanager
def open_database(dsn: str, command: str) -> Iterator[Connection]:
    """Yield a connection that `pg_stat_activity` shows by the name of the command.

    It is closed with the block. Raises DatabaseError.
    """
    from txmq.tx.postgres.session import connect

    with closing(connect(dsn, application_name=f"txmq {command}")) as connection:
        yield connection
