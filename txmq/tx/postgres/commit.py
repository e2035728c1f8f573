"""COMMIT with proof that it happened.

psycopg2's `commit()` returns without an error when the server answered ROLLBACK,
because a statement had failed and its error was swallowed. The server answers ROLLBACK
to COMMIT for one reason only: the transaction had failed before (EndTransactionBlock in
its xact.c). It says so with the answer to every statement, and between two statements
nothing can fail a transaction and leave the connection alive: time-outs and
terminations close it, a cancellation finds nothing to cancel, and failures in COMMIT
itself (deferred constraints and triggers, serialization) are errors. So the status of
the last answer, read just before `commit()`, is proof enough, and saves the round trips
that the command tag would cost (tests/tx/postgres/test_commit.py tries each of these).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple, TypeVar
from uuid import UUID

import psycopg2
from psycopg2 import extensions

from txmq.errors import (
    DatabaseConflict,
    DatabaseError,
    InDoubt,
    LocalProtocolError,
    TransactionAborted,
)
from txmq.tx.postgres.caller import end
from txmq.tx.postgres.caller_block import block_of
from txmq.tx.postgres.errors import CONFLICTS, describe, translate
from txmq.tx.postgres.session import BEGIN, Connection, Cursor, plain_cursor

# The server's text where lc_messages is English. In another language the warning is
# missed, and the commit stands.
_NOT_REPLICATED: Final = "synchronous replication"
T = TypeVar("T")


class CommitOutcome(NamedTuple):
    """The transaction is committed.

    `replicated` is False where the wait for a synchronous standby was cancelled.
    """

    replicated: bool


def send_commit(connection: Connection) -> None:
    """Send COMMIT and wait for its answer. Raises psycopg2.Error."""
    block = block_of(connection)
    if block is not None and block.begun:
        try:
            connection.tpc_commit()
        except psycopg2.ProgrammingError as error:
            if error.pgcode is not None:
                raise
            raise block.ended() from None  # psycopg2 has another open; nothing was sent
        return
    if connection.status == extensions.STATUS_BEGIN:
        try:
            connection.commit()
        except psycopg2.ProgrammingError as error:
            if error.pgcode is not None:
                raise
            connection.tpc_commit()  # begun by tpc_begin, which forbids commit(); nothing was sent
        return
    # A BEGIN that psycopg2 does not know of: its commit() would do nothing.
    with plain_cursor(connection) as cursor:
        cursor.execute("COMMIT")
        tag = cursor.statusmessage
    _end_open_transaction(connection)
    if tag != "COMMIT":
        raise TransactionAborted(
            f"the server answered {tag} to COMMIT: a statement of the transaction had failed"
        )


def guarded_commit(
    connection: Connection, token: UUID, commit: Callable[[Connection], None] = send_commit
) -> CommitOutcome:
    """Commit the open transaction by `commit`; return only if it is committed.

    Raises TransactionAborted or DatabaseConflict where it certainly is not, and
    TransactionEnded where it is not the caller's block's any more. Raises InDoubt with
    the token where the outcome is unknown: then no decision may be sent, and a resolver
    finds the outcome. The connection is ready for the next transaction, or broken.
    """
    _require_healthy(connection, token)
    try:
        with noted(connection) as notices:
            commit(connection)
    except psycopg2.Error as error:
        raise _failure(connection, error, token) from None
    if connection.get_transaction_status() != extensions.TRANSACTION_STATUS_IDLE:
        raise InDoubt(
            "COMMIT was sent, but the transaction is open",
            token=str(token),
            hint="the resolver finds out",
        )
    return CommitOutcome(replicated=not any(_NOT_REPLICATED in notice for notice in notices))


def commit_and(connection: Connection, token: UUID, begin_next: Callable[[Cursor, str], T]) -> T:
    """Commit the open transaction and begin the next one in the same round trip.

    The connection is in autocommit mode. `begin_next` executes the first statement of
    the next transaction behind the text that it is given; its result is returned.
    Returns only if the first transaction is committed and the second is open. Raises as
    `guarded_commit` before anything is sent. After that every DatabaseError is InDoubt,
    because a cancellation may strike on either side of COMMIT.
    """
    _require_healthy(connection, token)
    try:
        with connection.cursor() as cursor:
            result = begin_next(cursor, f"COMMIT; {BEGIN}")
    except DatabaseError as error:
        raise InDoubt(
            f"COMMIT was sent, and then {error}",
            token=str(token),
            hint="read what the statement behind it left",
        ) from None
    if connection.get_transaction_status() != extensions.TRANSACTION_STATUS_INTRANS:
        raise InDoubt("COMMIT was sent, but no transaction is open after it", token=str(token))
    return result


@contextmanager
def noted(connection: Connection) -> Iterator[list[str]]:
    """Collect the server's notices of the block; they are in the connection's own list,
    too.
    """
    before, notices = connection.notices, list[str]()
    connection.notices = notices
    try:
        yield notices
    finally:
        for notice in notices:
            before.append(notice)  # psycopg2 takes anything that appends
        connection.notices = before


def _require_healthy(connection: Connection, token: UUID) -> None:
    status = connection.get_transaction_status()
    if status == extensions.TRANSACTION_STATUS_INTRANS:
        return
    if status == extensions.TRANSACTION_STATUS_INERROR:
        _end_open_transaction(connection)
        raise TransactionAborted("a statement of the transaction failed earlier")
    if status == extensions.TRANSACTION_STATUS_UNKNOWN:
        raise TransactionAborted("the connection was lost before COMMIT was sent")
    if status == extensions.TRANSACTION_STATUS_IDLE:
        raise InDoubt("the transaction was ended before its COMMIT", token=str(token))
    raise LocalProtocolError(
        "the connection is busy", hint="use one connection per thread and transaction"
    )


def _failure(
    connection: Connection, error: psycopg2.Error, token: UUID
) -> TransactionAborted | DatabaseConflict | InDoubt:
    """Return the error to raise for a failed COMMIT.

    An ERROR with the server idle again means an abort. Everything else, above all a
    broken connection, proves nothing.
    """
    idle = connection.get_transaction_status() == extensions.TRANSACTION_STATUS_IDLE
    if connection.closed or not idle or error.diag.severity_nonlocalized != "ERROR":
        return InDoubt(
            f"COMMIT was sent and not answered: {describe(error)}",
            token=str(token),
            hint="the resolver finds out",
        )
    _end_open_transaction(connection)
    if error.pgcode in CONFLICTS and isinstance(
        conflict := translate(error, "COMMIT"), DatabaseConflict
    ):
        return conflict
    return TransactionAborted(f"the server refused COMMIT: {describe(error)}")


def _end_open_transaction(connection: Connection) -> None:
    """End what is still open.

    The outcome of COMMIT is known: a connection lost since then shows in its next use.
    """
    with suppress(psycopg2.Error):
        end(connection)
