"""Checks and steps on the business connection that a caller lends for one
transaction.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import (
    asynccontextmanager,
    suppress,
)
from itertools import count
from typing import Final

from txmq.errors import DatabaseError, DatabaseUnavailable, LocalProtocolError, TransactionAborted
from txmq.tx.postgres.driver import Driver, Status
from txmq.tx.postgres.errors import (
    FAILED_EARLIER,
    FAILED_TRANSACTION,
    ROLL_BACK,
    DriverError,
    translate,
    translated,
)

BEGIN: Final = "BEGIN ISOLATION LEVEL READ COMMITTED; "
_savepoints = count(1)


def require_usable(driver: Driver) -> Status:
    """Require a connection that can run statements; return its status.

    Raises LocalProtocolError for a mode that does not suit, DatabaseUnavailable for a
    lost connection, TransactionAborted in the middle of a failed transaction.
    """
    if driver.closed:
        raise DatabaseUnavailable("the connection is closed", hint="open another one")
    driver.require_usable()
    status = driver.status
    if status is Status.UNKNOWN:
        raise DatabaseUnavailable("the connection is lost", hint="open another one")
    if status is Status.FAILED:
        raise TransactionAborted(FAILED_EARLIER, hint=ROLL_BACK)
    return status


def require_healthy(driver: Driver) -> None:
    """Require a transaction without a failed statement, even if its error was
    swallowed.

    Raises TransactionAborted.
    """
    if driver.status is Status.FAILED:
        raise TransactionAborted(FAILED_EARLIER, hint=ROLL_BACK)


def require_open(driver: Driver) -> None:
    """Require an open transaction, which the next statement will join.

    Without one the statement would be committed alone. Raises LocalProtocolError, or
    TransactionAborted where a statement of the transaction has failed.
    """
    status = driver.status
    if status is Status.FAILED:
        raise TransactionAborted(FAILED_EARLIER, hint=ROLL_BACK)
    begins_by_itself = not driver.autocommit and driver.is_ready
    if status is not Status.OPEN and not begins_by_itself:
        raise LocalProtocolError(
            "no transaction is open", hint="nobody may commit or roll back inside the block"
        )


def failure(error: DriverError, doing: str) -> DatabaseError | TransactionAborted:
    """Return the error to raise for a failed statement of txmq's in the caller's
    transaction.
    """
    if error.sqlstate == FAILED_TRANSACTION:
        return TransactionAborted(FAILED_EARLIER, hint=ROLL_BACK)
    return translate(error, doing)


async def execute(driver: Driver, statement: str) -> None:
    """Run one statement. Raises DatabaseError."""
    with translated(statement):
        await driver.execute(statement)


@asynccontextmanager
async def savepoint(driver: Driver) -> AsyncIterator[None]:
    """Run a block whose rows are rolled back where it raises. Raises DatabaseError."""
    name = f"txmq_{next(_savepoints)}"
    await execute(driver, f"SAVEPOINT {name}")
    try:
        yield
    except BaseException:
        with suppress(DatabaseError):  # lost: then the whole transaction is gone
            await execute(driver, f"ROLLBACK TO SAVEPOINT {name}")
        raise
    await execute(driver, f"RELEASE SAVEPOINT {name}")


async def roll_back(driver: Driver) -> None:
    """Roll back the open transaction; the server ends that of a lost connection
    itself.
    """
    with suppress(DriverError):
        await driver.roll_back()
