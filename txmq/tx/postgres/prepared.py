"""Two-phase commit: PREPARE with proof that it happened, and the end of branches.

psycopg2's `tpc_prepare()` returns without an error when the server answered ROLLBACK,
because a statement had failed and its error was swallowed. So PREPARE TRANSACTION goes
through a cursor, together with a query for what the server has prepared under that gid:
one query string, one round trip, no second connection. A BEGIN in between keeps
psycopg2, which still thinks the transaction open, in step with the server until `end`
takes both back.

Branches are begun as `CallerBlock`: `commit()` and `rollback()` would tear a branch out
of its transaction. PREPARE gives them their gids.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Final, NamedTuple

import psycopg2
from psycopg2 import extensions, sql

from txmq.errors import (
    DatabaseError,
    InDoubt,
    LocalProtocolError,
    TransactionAborted,
    TwoPhaseFull,
    TwoPhaseOff,
)
from txmq.tx.postgres.caller import end, require_healthy
from txmq.tx.postgres.caller_block import NO_SAVEPOINT, CallerBlock
from txmq.tx.postgres.errors import CONFLICTS, describe, translate, translated
from txmq.tx.postgres.identity import Server, ServerIdentity, parse_lsn
from txmq.tx.postgres.session import Connection, plain_cursor
from txmq.tx.xid import XaBranch

NOT_SUPPORTED: Final = "0A000"
UNKNOWN_GID: Final = "42704"
SWITCHED_OFF: Final = "55000"
FULL: Final = "53200"
SWITCH_ON: Final = (
    "set max_prepared_transactions above the number of connections and restart the server"
)

# The COMMIT of a serializable transaction may be refused, even if it only read: with an
# id it is prepared, which decides that before the vote.
_LOOK: Final = """
SELECT CASE current_setting('transaction_isolation') WHEN 'serializable' THEN pg_current_xact_id()
            ELSE pg_current_xact_id_if_assigned() END::text,
       current_user::text, current_setting('transaction_deferrable'),
       (SELECT system_identifier FROM pg_control_system()),
       left(pg_walfile_name(pg_current_wal_insert_lsn()), 8),
       (SELECT oid::int8 FROM pg_database WHERE datname = current_database()),
       pg_current_wal_insert_lsn()::text,
       to_regprocedure('public.txmq_outbox_waits(uuid, int8[])') IS NOT NULL
"""
_PREPARE: Final = (
    "PREPARE TRANSACTION %(gid)s; BEGIN; SELECT FROM pg_prepared_xact() WHERE gid = %(gid)s"
)


class Work(NamedTuple):
    """The work of a branch.

    `xid` is its transaction id, None where it has nothing to prepare. What it wrote is
    in the write-ahead log of `server` before `position`, and PREPARE behind it.
    `has_outbox`: the database has txmq's tables, which it need not have.
    """

    xid: int | None
    owner: str
    server: ServerIdentity
    position: int
    has_outbox: bool = False


class Ending(Enum):
    """The result of ending a prepared branch."""

    DONE = "by this call"
    FOUND = "somebody else had ended it that way"
    OTHERWISE = "somebody ended it the other way"
    UNKNOWN = "it is not there, and how it ended cannot be told"


BY_OTHERS: Final = (Ending.FOUND, Ending.OTHERWISE)  # told by the status of an id


def require_two_phase(server: Server) -> None:
    """Raises TwoPhaseOff where the server has two-phase commit switched off."""
    if server.max_prepared_transactions == 0:
        raise TwoPhaseOff("the server's max_prepared_transactions is 0", hint=SWITCH_ON)


def look(connection: Connection, block: CallerBlock) -> Work:
    """Return the work of the open branch, which may write nothing from here on.

    It proves in the same round trip that the transaction is still that of `block`, and
    releases its savepoint. Raises TransactionEnded where it is not; as `prepare`.
    """
    block.require_open()
    try:
        with translated("looking at a branch"), plain_cursor(connection) as cursor:
            cursor.execute(block.proof + _LOOK)
            [(xid, owner, mark, system_id, timeline, oid, position, has_outbox)] = cursor.fetchall()
    except DatabaseError as error:
        if error.sqlstate in NO_SAVEPOINT:
            raise block.ended() from None
        raise
    block.require_same(mark)
    server = ServerIdentity(system_id, int(timeline, 16), oid)
    number = None if xid is None else int(xid)
    return Work(number, owner, server, parse_lsn(position), has_outbox)


def prepare(connection: Connection, branch: XaBranch) -> None:
    """Prepare the open branch; return only if it is prepared.

    Afterwards the connection is ready for other work. Raises InDoubt where nobody
    knows. Every other error means that it certainly is not prepared:
    TransactionAborted, DatabaseConflict, TwoPhaseFull, TwoPhaseOff.
    """
    _require_open(connection, branch)
    try:
        with plain_cursor(connection) as cursor:
            cursor.execute(_PREPARE, {"gid": branch.gid})
            prepared = cursor.rowcount == 1
    except psycopg2.Error as error:
        raise _refusal(connection, error, branch) from None
    # what became of PREPARE is known: a connection lost since then shows in its next
    # use
    with suppress(psycopg2.Error):
        end(connection)
    if not prepared:
        raise TransactionAborted(
            "the server answered ROLLBACK to PREPARE: a statement of the transaction had failed"
        )


def commit_prepared(connection: Connection, gid: str, xid: int | None) -> Ending:
    """Commit a prepared branch of this database, over any idle connection of its owner.

    A missing gid proves nothing by itself: the status of the transaction `xid`, as it
    was prepared, does. Raises DatabaseError where the branch stands as before, or
    nobody knows: try again later.
    """
    return _finish(connection, gid, xid, commit=True)


def roll_back_prepared(connection: Connection, gid: str, xid: int | None) -> Ending:
    """Roll back a prepared branch, as `commit_prepared` commits it."""
    return _finish(connection, gid, xid, commit=False)


@contextmanager
def in_role(connection: Connection, owner: str) -> Iterator[None]:
    """Run a block as that role, on one of txmq's own connections.

    Membership alone does not allow a role to end another's branch.
    """
    _set_role(connection, sql.SQL("SET ROLE {}").format(sql.Identifier(owner)))
    try:
        yield
    finally:
        _set_role(connection, sql.SQL("RESET ROLE"))


def _set_role(connection: Connection, statement: sql.Composable) -> None:
    with translated("changing the role"), plain_cursor(connection) as cursor:
        cursor.execute(statement)


def _require_open(connection: Connection, branch: XaBranch) -> None:
    """Guard against PREPARE of a failed transaction, which is a silent rollback."""
    status = connection.info.transaction_status
    if status == extensions.TRANSACTION_STATUS_INTRANS:
        return
    require_healthy(connection)
    if status == extensions.TRANSACTION_STATUS_UNKNOWN:
        raise TransactionAborted("the connection was lost before PREPARE was sent")
    if status == extensions.TRANSACTION_STATUS_IDLE:
        hint = "nobody may commit or roll back inside the block"
        raise InDoubt(
            f"somebody ended branch {branch.number} before its end",
            token=str(branch.token),
            hint=hint,
        )
    raise LocalProtocolError(
        "the connection is busy", hint="use one connection per thread and transaction"
    )


def _refusal(
    connection: Connection, error: psycopg2.Error, branch: XaBranch
) -> DatabaseError | TransactionAborted | InDoubt:
    """Return the error to raise for a failed PREPARE.

    An ERROR with the server idle again is PREPARE's own; the query after it fails
    inside a transaction.
    """
    idle = connection.info.transaction_status == extensions.TRANSACTION_STATUS_IDLE
    certain = not connection.closed and idle and error.diag.severity_nonlocalized == "ERROR"
    with suppress(psycopg2.Error):
        end(connection)
    text = f"PREPARE of branch {branch.number}: {describe(error)}"
    if not certain:
        return InDoubt(
            f"{text}: it was sent and not answered",
            token=str(branch.token),
            hint="recovery finds out",
        )
    if error.pgcode == SWITCHED_OFF:
        return TwoPhaseOff(text, hint=SWITCH_ON, sqlstate=error.pgcode)
    if error.pgcode == FULL:
        return TwoPhaseFull(
            text, hint="raise max_prepared_transactions, or look for orphans", sqlstate=error.pgcode
        )
    if error.pgcode in CONFLICTS:
        return translate(error, "PREPARE")
    if error.pgcode == NOT_SUPPORTED:
        hint = "use no temporary tables, LISTEN, NOTIFY, WITH HOLD cursors or exported snapshots"
        return TransactionAborted(f"{text}: such work cannot be prepared", hint=hint)
    return TransactionAborted(f"the server refused: {text}")


def _finish(connection: Connection, gid: str, xid: int | None, *, commit: bool) -> Ending:
    try:
        (connection.tpc_commit if commit else connection.tpc_rollback)(gid)
    except psycopg2.Error as error:
        if error.pgcode != UNKNOWN_GID:
            raise translate(error, f"{'COMMIT' if commit else 'ROLLBACK'} PREPARED") from None
        return _ended(connection, xid, commit=commit)
    return Ending.DONE


def _ended(connection: Connection, xid: int | None, *, commit: bool) -> Ending:
    """Return the end of a prepared transaction.

    PREPARE wrote its id to disk, so no other transaction has that id.
    """
    if xid is None:
        return Ending.UNKNOWN
    with translated("asking how a branch ended"), plain_cursor(connection) as cursor:
        cursor.execute("SELECT pg_xact_status(%s::text::xid8)", (str(xid),))
        [(status,)] = cursor.fetchall()
        end(connection)
    if status not in ("committed", "aborted"):
        return Ending.UNKNOWN
    return Ending.FOUND if (status == "committed") == commit else Ending.OTHERWISE
