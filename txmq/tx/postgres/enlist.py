"""Transactions that somebody else begins and ends, with messages in them.

A framework, or the caller, commits by the driver's `commit()`. A connection of one of
txmq's classes takes the messages along: its `commit()` has the bundle stored and the
token row written, sends COMMIT, looks at the answer, and has the decision sent. So
nothing can happen in between, and no hook has to be believed.

Any other connection is refused, unless the caller has hooks, which say when COMMIT
comes and what became of it. They may be wrong: after a failed statement whose error was
swallowed, PostgreSQL answers ROLLBACK, and drivers return as if nothing had happened.
Only the token row decides there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from txmq.errors import LocalProtocolError, TransactionEnded
from txmq.tx.postgres.caller import require_healthy, require_usable, roll_back
from txmq.tx.postgres.caller_block import CallerBlock, require_free
from txmq.tx.postgres.driver import Driver, Enlisted, Status
from txmq.tx.postgres.errors import DriverError
from txmq.tx.postgres.statement_watch import (
    Sends,
    StatementWatch,
    control_in,
    savepoint_name,
)

if TYPE_CHECKING:
    from uuid import UUID

BY_METHOD: Final = (
    "end it by connection.commit() or rollback(), so that the messages go along with the rows"
)


class EnlistedBlock(CallerBlock):
    """The open transaction of a caller who will end it himself.

    It costs no round trip. An `EnlistConnection` calls it at each end of the
    transaction. On another connection a transaction that was ended without a hook is
    noticed at the next statement of a cursor that was opened since.
    """

    def __init__(self, driver: Driver, token: UUID, sends: Sends) -> None:
        super().__init__(driver, token, sends)
        self._proved = True  # nothing marks the transaction
        self._opened = False  # the transaction was seen open
        self._lost = False  # and then it was gone
        self._stored = False  # its token row is written
        self._before_all = sends.mark()

    def join(self, enlisted: Enlisted, *, hooks: bool) -> None:
        """Take part in the transaction that is open, or that the next statement begins.

        Raises as `require_usable`, and LocalProtocolError in autocommit mode, within a
        block of txmq, and without `hooks` where the driver's own COMMIT would leave the
        messages behind.
        """
        driver = self.driver
        if not (driver.enlists or hooks):
            kind = type(driver.connection)
            raise LocalProtocolError(
                f"The commit of a {kind.__module__}.{kind.__qualname__} takes no messages along",
                hint="connect by the EnlistConnection of txmq.postgres, txmq.psycopg or "
                "txmq.asyncpg, or use client.transaction(connection); where your code calls "
                "tx.commit_with() or tx.before_commit() at each COMMIT: enlist(…, hooks=True)",
            )
        status = require_usable(driver)
        require_free(driver)
        if driver.autocommit:
            raise LocalProtocolError(
                "The connection is in autocommit mode: each statement commits by itself",
                hint="begin a transaction by the driver or the framework, with autocommit off, or "
                "use client.transaction(connection)",
            )
        self._opened = status is not Status.IDLE
        if driver.enlists and driver.is_ready:
            driver.connection.two_phase = False
        self.start()
        if driver.enlists:
            driver.connection.enlisted = enlisted

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Let txmq roll back between two transactions of the connection."""
        connection = self.driver.connection
        if not self.driver.enlists:
            yield
            return
        enlisted, connection.enlisted = connection.enlisted, None
        yield
        connection.enlisted = enlisted

    def require_open(self) -> None:
        """Require that the transaction is the one that the messages were sent in.

        Raises TransactionEnded, TransactionAborted where a statement has failed, or
        LocalProtocolError in pipeline mode.
        """
        if not self.driver.closed:
            self.driver.require_usable()
        require_healthy(self.driver)
        if self._was_ended() or self.driver.autocommit:
            raise self.ended()

    def require_allowed(self, statement: str) -> re.Match[str] | None:
        """Return the match of a statement about savepoints.

        Raises LocalProtocolError for one that would end the transaction without its
        messages, and TransactionEnded behind the end of the transaction.
        """
        found = control_in(statement)
        if self._stored:
            if found is not None and found["to"] is not None:
                raise self._refusal(statement, "call before_commit() before the last COMMIT only")
            return None
        if self._was_ended():
            self.release()
            raise self.ended()
        self._opened = True
        if found is None or found["verb"].lower() in ("savepoint", "release"):
            return found
        if found["to"] is None:
            raise self._refusal(statement, BY_METHOD)
        if not self.driver.enlists:
            self._require_known(found, statement)
        return found

    def follow(self, done: re.Match[str]) -> None:
        """Do to the sends what a statement has done to the rows."""
        if done["to"] is not None and self._index(savepoint_name(done)) is None:
            self._sends.withdraw(self._before_all)  # the savepoint was set before any send
            self._savepoints.clear()
        else:
            super().follow(done)

    def end(self) -> None:
        """Refuse to go back behind the token row: it would be gone, and rows would
        stay.
        """
        self._stored = True

    def ended(self) -> TransactionEnded:
        """Return the error of a transaction that ended without its messages."""
        return TransactionEnded(
            f"Transaction {self.name} has messages, and was ended without them: its rows may be "
            "committed, and the messages are not sent",
            hint=f"{BY_METHOD}, on a connection made with "
            "connection_factory=txmq.postgres.EnlistConnection, or call tx.before_commit() before "
            "each COMMIT",
        )

    async def roll_back(self) -> bool:
        """Roll back and close."""
        self.release()
        if self.driver.enlists and self.driver.connection.two_phase:
            with suppress(DriverError):
                await self.driver.execute("ROLLBACK")  # the caller will call tpc_rollback()
        else:
            await roll_back(self.driver)
        return True

    def release(self) -> None:
        """Let the connection alone."""
        StatementWatch.end(self)
        super().release()
        if self.driver.enlists:
            self.driver.connection.enlisted = None

    def _was_ended(self) -> bool:
        driver = self.driver
        over = driver.is_ready or driver.status is Status.IDLE
        self._lost = self._lost or (self._opened and over)
        return self._lost
