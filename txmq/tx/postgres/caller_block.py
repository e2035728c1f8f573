"""The transaction of a block, on the connection that its caller lends.

The caller can end that transaction by himself, with `commit()`, `with connection:` or
SQL. Rows and messages would then part. Three things prevent it:

- A transaction that the block begins, it begins by `Driver.begin`, so that the driver
  itself refuses the calls that would end it.
- The token's INSERT proves that the transaction is still the same. The block has begun
  it DEFERRABLE, which has no effect on transactions that write, and which those have
  not that begin after a raw COMMIT. A transaction that was open before the block has a
  savepoint of the block, whose release fails in any other.
- Statements that end the transaction are refused (`statement_watch`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from txmq.errors import TransactionAborted, TransactionEnded, TxmqError
from txmq.tx.postgres.caller import failure, require_usable, roll_back
from txmq.tx.postgres.driver import Driver, Status
from txmq.tx.postgres.errors import (
    FAILED_EARLIER,
    FAILED_TRANSACTION,
    NO_SAVEPOINT,
    ROLL_BACK,
    DriverError,
    driver_error,
)
from txmq.tx.postgres.statement_watch import Sends, StatementWatch, transaction_ended, watch_of

if TYPE_CHECKING:
    from uuid import UUID

SAVEPOINT: Final = "txmq_block"
# The words of psycopg2 and psycopg 3 for a transaction that was begun by `tpc_begin`.
REFUSED: Final = "be used during a two-phase transaction"


class CallerBlock(StatementWatch):
    """The transaction `token` on the caller's connection, from BEGIN to its end."""

    def __init__(self, driver: Driver, token: UUID, sends: Sends) -> None:
        super().__init__(driver, token, sends)
        self.token = token
        self._marked = False  # it is DEFERRABLE
        self._xid = ""  # of a transaction that was open before
        self._proved = False

    async def begin(self) -> None:
        """Begin the transaction, or join the one that is open.

        Raises as `require_usable`, and LocalProtocolError within another block.
        """
        status = require_usable(self.driver)
        require_free(self.driver)
        if status is Status.IDLE:
            try:
                marked = await self.driver.begin()
            except DriverError as error:
                raise failure(error, "beginning a transaction") from None
            if marked is None:
                await self._join("BEGIN; ")
            self._marked = bool(marked)
        else:
            self.driver.require_joinable()
            await self._join("")
        self.start()

    async def _join(self, begin: str) -> None:
        statements = f"{begin}SAVEPOINT {SAVEPOINT}; SELECT pg_current_xact_id()::text"
        try:
            [(self._xid,)] = await self.driver.execute(statements)
        except DriverError as error:
            raise failure(error, "beginning a block") from None

    @property
    def proof(self) -> str:
        """Return the SQL in front of the token's INSERT: it fails in another
        transaction.
        """
        return "" if self.driver.begun or self._proved else f"RELEASE SAVEPOINT {SAVEPOINT}; "

    def require_open(self) -> None:
        """Require, without a round trip, that the transaction is open.

        Raises TransactionEnded, or TransactionAborted where a statement has failed.
        """
        status = self.driver.status
        if status is Status.FAILED:
            raise TransactionAborted(FAILED_EARLIER, hint=ROLL_BACK)
        if status is Status.IDLE or (self.driver.begun and not self.driver.holds_begun):
            raise self.ended()

    def require_same(self, deferrable: str) -> None:
        """Require that the INSERT behind `proof` ran in the block's own transaction."""
        if self._marked and deferrable != "on":
            raise self.ended()
        self._proved = True

    async def prove(self) -> None:
        """Require the block's own transaction where no token is written."""
        self.require_open()
        if self.proof:
            try:
                await self.driver.execute(self.proof)
            except DriverError as error:
                raise self.refusal(error, "ending a block") from None
        self._proved = True

    def ended(self) -> TransactionEnded:
        """Return the error of a transaction that the caller has ended."""
        return transaction_ended(self.name)

    def refusal(self, error: DriverError, doing: str) -> TxmqError:
        """Return the error of a statement that `proof` was sent with."""
        if error.sqlstate in NO_SAVEPOINT:
            return self.ended()
        return failure(error, doing)

    async def roll_back(self) -> bool:
        """Roll back and close; return False if the caller may have committed rows.

        The server ends the transaction of a lost connection itself.
        """
        self.end()
        try:
            looks = self._look_begun if self.driver.begun else self._look_joined
            ours = self._proved or await looks()
        except DriverError:  # lost
            ours = True
        await roll_back(self.driver)
        await self.close()
        return ours

    async def _look_begun(self) -> bool:
        """Return whether the open transaction is the one that the block has begun.

        The mark of one that has failed cannot be read.
        """
        driver = self.driver
        if driver.status is Status.UNKNOWN:
            return True
        if driver.status is Status.IDLE or not driver.holds_begun:
            return False
        if self._marked and driver.status is not Status.FAILED:
            try:
                found = await driver.execute("SELECT current_setting('transaction_deferrable')")
            except DriverError as error:
                if error.sqlstate != FAILED_TRANSACTION:
                    raise
            else:
                if found != [("on",)]:
                    return False
        return await driver.roll_back_begun()

    async def _look_joined(self) -> bool:
        """Return whether nothing of the block is committed.

        A `rollback()` before the error goes on is a habit that does no harm: nothing
        was executed behind it.
        """
        driver = self.driver
        if driver.status is Status.UNKNOWN:
            return True
        if driver.status is not Status.IDLE:
            try:
                await driver.execute(f"ROLLBACK TO SAVEPOINT {SAVEPOINT}")
            except DriverError as error:
                if error.sqlstate in NO_SAVEPOINT:
                    return False
                raise
            return True
        if not driver.is_ready:
            return False  # ended by SQL; then each statement has committed itself
        found = await driver.execute("SELECT pg_xact_status(%s::text::xid8)", (self._xid,))
        return found == [("aborted",)]

    async def give_back(self) -> None:
        """Roll back if an interrupt has kept the block from ending."""
        if self.registered:
            await self.roll_back()

    async def close(self) -> None:
        """Give the connection back to its caller, as it was."""
        self.release()
        await self.driver.restore()


def require_free(driver: Driver) -> None:
    """Require a connection that serves no other block, and no handler. Raises
    LocalProtocolError.
    """
    other = watch_of(driver.connection)
    if other is not None:
        raise other.busy()


def refusal_in(error: BaseException) -> BaseException | None:
    """Return the driver's refusal to end a block's transaction: `error`, or its cause.

    Frameworks wrap it.
    """
    for found in (error, error.__cause__):
        if found is not None and REFUSED in str(found) and driver_error(found) is not None:
            return found
    return None
