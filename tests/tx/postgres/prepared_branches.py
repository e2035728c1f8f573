"""Prepared branches without a coordinator, as a killed one leaves them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from uuid import UUID

import psycopg2
from psycopg2 import extensions
from psycopg2.extensions import make_dsn, parse_dsn

from tests.tx.postgres.support import rows, xid_of
from txmq.faces import run
from txmq.tx.postgres.caller import execute, require_usable
from txmq.tx.postgres.drivers import driver_of
from txmq.tx.postgres.session import Connection, connect
from txmq.tx.xid import XaBranch, branches

PREPARED_GIDS = (
    "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() ORDER BY prepared"
)


def begin_branch(connection: Connection, branch: XaBranch) -> None:
    """Begin the transaction of a branch, or take the one that is open."""
    driver = driver_of(connection)
    require_usable(driver)
    if connection.autocommit:
        run(execute(driver, "BEGIN"))
    elif connection.status == extensions.STATUS_READY:
        connection.tpc_begin(branch.gid)


def leave_prepared(dsn: str, gid: str, *statements: str) -> int:
    """Prepare a transaction of these statements, disconnect, and return its xid."""
    with closing(psycopg2.connect(dsn)) as connection, connection.cursor() as cursor:
        connection.tpc_begin(gid)
        for statement in statements:
            cursor.execute(statement)
        xid = xid_of(connection)
        connection.tpc_prepare()
        return xid


def prepared_gids(dsn: str) -> list[str]:
    """Return the gids of the prepared transactions of the database."""
    return [str(gid) for (gid,) in rows(dsn, PREPARED_GIDS)]


def roll_back_all_prepared(dsn: str) -> None:
    """Roll back all prepared transactions, before the database is used again or
    dropped.
    """
    with closing(connect(dsn, application_name="test")) as connection:
        for gid in prepared_gids(dsn):
            connection.tpc_rollback(gid)


def end_manually(dsn: str, gid: str, *, commit: bool) -> None:
    """End a branch as an operator does in psql."""
    rows(dsn, f"{'COMMIT' if commit else 'ROLLBACK'} PREPARED '{gid}'")


@contextmanager
def login_role(dsn: str, suffix: str) -> Iterator[tuple[str, str]]:
    """Create a role that may create tables, and yield its name and a DSN for it."""
    role = f"{parse_dsn(dsn)['dbname']}_{suffix}"
    rows(
        dsn,
        f"CREATE ROLE {role} LOGIN PASSWORD 'x'; GRANT CREATE, USAGE ON SCHEMA public TO {role}",
    )
    try:
        yield role, make_dsn(dsn, user=role, password="x")
    finally:
        roll_back_all_prepared(dsn)
        rows(dsn, f"DROP OWNED BY {role}; DROP ROLE {role}")


def gid_of(log_id: UUID, token: UUID, number: int = 1, node: str = "orders") -> str:
    return branches(node, log_id, token, number)[number - 1].gid
