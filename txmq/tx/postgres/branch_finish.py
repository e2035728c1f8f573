"""Ending prepared branches of lost coordinators, as their owner where that is needed.

Only a superuser and the role that prepared a branch may end it; a member of that role
has to become it first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from psycopg2 import sql

from txmq.errors import DatabaseError
from txmq.model.message import Decision
from txmq.tx.postgres.blocking import commit_prepared, roll_back_prepared
from txmq.tx.postgres.bounds import bounded
from txmq.tx.postgres.errors import translated
from txmq.tx.postgres.prepared import Ending
from txmq.tx.postgres.prepared_list import PreparedTransaction
from txmq.tx.postgres.session import Connection, plain_cursor

DEADLINE_S: Final = 10.0  # a commit waits for a synchronous standby, too
FORBIDDEN: Final = "42501"
BUSY: Final = "55000"  # another session is ending the branch just now
_ENDS: Final = {Decision.COMMIT: commit_prepared, Decision.ROLLBACK: roll_back_prepared}
NOT_GIVEN: Final = "not given"
# Asking for an id that the server has not given yet is an error. Ids behind the last
# one that has ended may be given or not.
_STATUSES: Final = """
SELECT x, CASE WHEN x::xid8 < pg_snapshot_xmax(pg_current_snapshot())
    THEN coalesce(pg_xact_status(x::xid8), 'unknown') END
FROM unnest(%s::text[]) x
"""
_NEXT: Final = "SELECT pg_current_xact_id()::text::int8"


def finish(connection: Connection, branch: PreparedTransaction, decision: Decision) -> Ending:
    """Commit or roll back a branch of this database, on a connection in autocommit
    mode.

    For FORBIDDEN see `grant_for`. Raises DatabaseError where the branch stands as
    before, or nobody knows.
    """
    with bounded(connection, DEADLINE_S):
        try:
            return _ENDS[decision](connection, branch.gid, branch.xid)
        except DatabaseError as error:
            if error.sqlstate != FORBIDDEN or branch.owner is None:
                raise
        with in_role(connection, branch.owner):
            return _ENDS[decision](connection, branch.gid, branch.xid)


@contextmanager
def in_role(connection: Connection, owner: str) -> Iterator[None]:
    """Run a block as that role, on one of txmq's own connections.

    Membership alone does not allow a role to end another's branch. Raises DatabaseError
    behind a pooler, which could give the session to somebody else in that role.
    """
    _require_own_session(connection)
    _set_role(connection, sql.SQL("SET ROLE {}").format(sql.Identifier(owner)))
    try:
        yield
    finally:
        _set_role(connection, sql.SQL("RESET ROLE"))


def _require_own_session(connection: Connection) -> None:
    """Require that no pooler stands between. A pooler tells clients ids of its own."""
    with translated("looking for a pooler"), plain_cursor(connection) as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        [(pid,)] = cursor.fetchall()
    if pid != connection.info.backend_pid:
        raise DatabaseError(
            "SET ROLE behind a pooler could reach other sessions",
            hint="name the server itself in [[xa.database]], or a DSN of the branch's owner",
        )


def _set_role(connection: Connection, statement: sql.Composable) -> None:
    with translated("changing the role"), plain_cursor(connection) as cursor:
        cursor.execute(statement)


def grant_for(connection: Connection, branch: PreparedTransaction) -> str:
    """Return the advice for a branch that this connection's role may not end."""
    if branch.owner is None:
        return "its owner's role is gone: name a superuser's DSN"
    return f'GRANT "{branch.owner}" TO "{connection.info.user}", or name a DSN of the owner\'s'


def statuses(connection: Connection, xids: Iterable[int]) -> dict[int, str | None]:
    """Return pg_xact_status of transactions: "committed", "aborted", "in progress",
    NOT_GIVEN or None.

    None = the server cannot tell. NOT_GIVEN: it has not given that id yet, so that it
    is a copy from before. Raises DatabaseError.
    """
    doing = "asking for the status of transactions"
    with translated(doing), bounded(connection, DEADLINE_S), connection.cursor() as cursor:
        cursor.execute(_STATUSES, ([str(xid) for xid in xids],))
        found = {int(xid): status for xid, status in cursor.fetchall()}
        if None in found.values():
            cursor.execute(_NEXT)
            [(following,)] = cursor.fetchall()
            behind = [xid for xid, status in found.items() if status is None]
            found |= {xid: "in progress" if xid < following else NOT_GIVEN for xid in behind}
    return {xid: None if status == "unknown" else status for xid, status in found.items()}
