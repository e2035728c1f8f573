"""COMMIT with proof that it happened.

Drivers return from `commit()` without an error when the server answered ROLLBACK,
because a statement had failed and its error was swallowed. The server answers ROLLBACK
to COMMIT for one reason only: the transaction had failed before (EndTransactionBlock in
its xact.c). It says so with the answer to every statement, and between two statements
nothing can fail a transaction and leave the connection alive: time-outs and
terminations close it, a cancellation finds nothing to cancel, and failures in COMMIT
itself (deferred constraints and triggers, serialization) are errors. So the status of
the last answer, read just before `commit()`, is proof enough, and saves the round trips
that the command tag would cost (tests/tx/postgres/test_commit.py tries each of these).
Where a driver shows the tag it is looked at as well.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar
from uuid import UUID

from txmq.errors import (
    DatabaseConflict,
    DatabaseError,
    InDoubt,
    LocalProtocolError,
    TransactionAborted,
    TransactionEnded,
)
from txmq.tx.postgres.caller import BEGIN, roll_back
from txmq.tx.postgres.driver import Driver, Status, TransactionGone
from txmq.tx.postgres.errors import (
    CONFLICTS,
    FAILED_EARLIER,
    FAILED_TRANSACTION,
    NO_SAVEPOINT,
    DriverError,
    describe,
    driver_error,
    translate,
)
from txmq.tx.postgres.statement_watch import transaction_ended

# The server's text where lc_messages is English. In another language the warning is
# missed, and the commit stands.
NOT_REPLICATED: Final = "synchronous replication"
T = TypeVar("T")


async def guarded_commit(
    driver: Driver,
    token: UUID,
    commit: Callable[[], Awaitable[object]] | None = None,
    *,
    before: str = "",
) -> bool:
    """Commit the open transaction; return only if it is committed: False where the wait
    for a synchronous standby was cancelled, else True.

    `commit` sends COMMIT in the driver's place, and returns the command tag, or None
    where it does not know that. `before` is sent in front of COMMIT: it releases a
    savepoint, which fails in another transaction. Raises TransactionAborted or
    DatabaseConflict where it certainly is not committed, and TransactionEnded where it
    is not the caller's block's any more. Raises InDoubt with the token where the
    outcome is unknown: then no decision may be sent, and a resolver finds the outcome.
    The connection is ready for the next transaction, or broken.
    """
    await _require_healthy(driver, token)
    tag: object = "COMMIT"
    try:
        with driver.noted() as notices:
            if commit is None:
                tag = await driver.commit(before)
            else:
                tag = await commit() or tag
    except TransactionGone:
        raise transaction_ended(token) from None
    except Exception as error:
        known = driver_error(error)
        if known is None:
            raise
        raise await _failure(driver, known, token) from None
    if tag != "COMMIT":
        raise TransactionAborted(
            f"the server answered {tag} to COMMIT: a statement of the transaction had failed"
        )
    if driver.status is not Status.IDLE:
        raise InDoubt(
            "COMMIT was sent, but the transaction is open",
            token=str(token),
            hint="the resolver finds out",
        )
    return NOT_REPLICATED not in "\n".join(notices)


async def commit_and(
    driver: Driver, token: UUID, begin_next: Callable[[str], Awaitable[T]], *, before: str = ""
) -> T:
    """Commit the open transaction and begin the next one in the same round trip.

    The driver begins no transactions by itself. `begin_next` executes the first
    statement of the next transaction behind the text that it is given; its result is
    returned. `before` is as for `guarded_commit`. Returns only if the first transaction
    is committed and the second is open. Raises as `guarded_commit` before anything is
    sent, and where `before` fails. After that every DatabaseError is InDoubt, because a
    cancellation may strike on either side of COMMIT.
    """
    if driver.tells_failed:
        await _require_healthy(driver, token)
        ending = f"{before}COMMIT; "
    else:  # the command tag does; that is a round trip
        await guarded_commit(driver, token, before=before)
        ending = ""
    try:
        result = await begin_next(ending + BEGIN)
    except DatabaseError as error:
        if ending and error.sqlstate in NO_SAVEPOINT:
            raise transaction_ended(token) from None
        raise InDoubt(
            f"COMMIT was sent, and then {error}",
            token=str(token),
            hint="read what the statement behind it left",
        ) from None
    if driver.status is not Status.OPEN:
        raise InDoubt("COMMIT was sent, but no transaction is open after it", token=str(token))
    return result


async def _require_healthy(driver: Driver, token: UUID) -> None:
    status = driver.status
    if status is Status.OPEN:
        return
    if status is Status.FAILED:
        await roll_back(driver)
        raise TransactionAborted("a statement of the transaction failed earlier")
    if status is Status.UNKNOWN:
        raise TransactionAborted("the connection was lost before COMMIT was sent")
    if status is Status.IDLE:
        raise InDoubt("the transaction was ended before its COMMIT", token=str(token))
    raise LocalProtocolError(
        "the connection is busy", hint="use one connection per thread and transaction"
    )


async def _failure(
    driver: Driver, error: DriverError, token: UUID
) -> TransactionAborted | TransactionEnded | DatabaseConflict | InDoubt:
    """Return the error to raise for a failed COMMIT.

    An ERROR with the server idle again means an abort, and so does one of what was sent
    in front of COMMIT. Everything else, above all a broken connection, proves nothing.
    """
    if error.sqlstate in (*NO_SAVEPOINT, FAILED_TRANSACTION):
        await roll_back(driver)
        if error.sqlstate == FAILED_TRANSACTION:
            return TransactionAborted(FAILED_EARLIER)
        return transaction_ended(token)
    if driver.status is not Status.IDLE or error.severity != "ERROR":
        return InDoubt(
            f"COMMIT was sent and not answered: {describe(error)}",
            token=str(token),
            hint="the resolver finds out",
        )
    # COMMIT's outcome is known: a connection lost since then shows in its next use.
    await roll_back(driver)
    if error.sqlstate in CONFLICTS and isinstance(
        conflict := translate(error, "COMMIT"), DatabaseConflict
    ):
        return conflict
    return TransactionAborted(f"the server refused COMMIT: {describe(error)}")
