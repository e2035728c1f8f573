"""The transaction of a block, on the connection that its caller lends.

The caller can end that transaction by himself, with `commit()`, `with connection:` or
SQL. Rows and messages would then part. Three things prevent it:

- A transaction that the block begins, it begins by `tpc_begin`, so that psycopg2 itself
  refuses `commit()`, `rollback()`, `with connection:` and a change of `autocommit`.
  Nothing is ever prepared: psycopg2 sends a plain BEGIN, where it would send it
  anyway, and a plain COMMIT.
- The token's INSERT proves that the transaction is still the same. The block has begun
  it DEFERRABLE, which has no effect on transactions that write, and which those have
  not that begin after a raw COMMIT. A transaction that was open before the block has a
  savepoint of the block, whose release fails in any other.
- Cursors that are opened in the block refuse SQL that ends the transaction
  (`watched_cursor`).
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import psycopg2
from psycopg2 import extensions

from txmq.errors import LocalProtocolError, TransactionEnded
from txmq.tx.postgres.caller import (
    end,
    is_idle,
    require_healthy,
    require_usable,
    roll_back,
)
from txmq.tx.postgres.errors import translated
from txmq.tx.postgres.session import Connection, plain_cursor
from txmq.tx.postgres.watched_cursor import CursorWatch, Sends, transaction_ended, watch_of

if TYPE_CHECKING:
    from uuid import UUID

SAVEPOINT: Final = "txmq_block"
NO_SAVEPOINT: Final = ("3B001", "25P01")  # no such one; no transaction is open at all
REFUSED: Final = "cannot be used during a two-phase transaction"  # psycopg2's words


class _Settings(NamedTuple):
    """Settings of the caller's connection that a block changes for a while."""

    autocommit: bool
    deferrable: bool | None


class CallerBlock(CursorWatch):
    """The transaction `token` on the caller's connection, from BEGIN to its end."""

    def __init__(self, connection: Connection, token: UUID, sends: Sends) -> None:
        super().__init__(connection, str(token), sends)
        self.token = token
        self._begun: _Settings | None = None  # None: it was open before the block
        self._marked = False  # it is DEFERRABLE
        self._xid = ""  # of a transaction that was open before
        self._proved = False

    @property
    def begun(self) -> bool:
        """Return whether the block has begun the transaction, by `tpc_begin`."""
        return self._begun is not None

    def begin(self) -> None:
        """Begin the transaction, or join the one that is open.

        Raises as `require_usable`, and LocalProtocolError within another block.
        """
        require_usable(self.connection)
        require_free(self.connection)
        if is_idle(self.connection):
            with translated("beginning a transaction"):
                self._begin()
        else:
            self._join("")
        self.register()
        self.start()

    def _begin(self) -> None:
        connection = self.connection
        if not connection.autocommit:
            if connection.status != extensions.STATUS_READY:
                end(connection)  # SQL has ended the last one, which psycopg2 does not know
        elif _has_settings(connection):
            # psycopg2 would lose these settings of the session in autocommit mode.
            self._join("BEGIN; ")
            return
        self._begun = _Settings(connection.autocommit, connection.deferrable)
        try:
            connection.autocommit = False
            # A SERIALIZABLE READ ONLY one would wait for a safe snapshot.
            self._marked = not connection.readonly
            if self._marked:
                connection.deferrable = True
            connection.tpc_begin(f"txmq {self.name}")
        except BaseException:
            self._restore()
            raise

    def _join(self, before: str) -> None:
        statement = f"{before}SAVEPOINT {SAVEPOINT}; SELECT pg_current_xact_id()::text"
        with translated("beginning a block"), plain_cursor(self.connection) as cursor:
            cursor.execute(statement)
            [(self._xid,)] = cursor.fetchall()

    @property
    def proof(self) -> str:
        """Return the SQL in front of the token's INSERT: it fails in another
        transaction.
        """
        return "" if self.begun or self._proved else f"RELEASE SAVEPOINT {SAVEPOINT}; "

    def require_open(self) -> None:
        """Require, without a round trip, that the transaction is open.

        Raises TransactionEnded, or TransactionAborted where a statement has failed.
        """
        require_healthy(self.connection)
        status = self.connection.get_transaction_status()
        known = not self.begun or self.connection.status == extensions.STATUS_BEGIN
        if status == extensions.TRANSACTION_STATUS_IDLE or not known:
            raise self.ended()

    def require_same(self, deferrable: str) -> None:
        """Require that the INSERT behind `proof` ran in the block's own transaction."""
        if self._marked and deferrable != "on":
            raise self.ended()
        self._proved = True

    def prove(self) -> None:
        """Require the block's own transaction where no token is written."""
        self.require_open()
        if self.proof:
            try:
                with plain_cursor(self.connection) as cursor:
                    cursor.execute(self.proof)
            except psycopg2.Error as error:
                if error.pgcode in NO_SAVEPOINT:
                    raise self.ended() from None
                raise
        self._proved = True

    def ended(self) -> TransactionEnded:
        """Return the error of a transaction that the caller has ended."""
        return transaction_ended(self.name)

    def roll_back(self) -> bool:
        """Roll back and close; return False if the caller may have committed rows.

        The server ends the transaction of a lost connection itself.
        """
        self.end()
        try:
            ours = self._proved or (self._look_begun() if self.begun else self._look_joined())
        except psycopg2.Error:  # lost
            ours = True
        roll_back(self.connection)
        self.close()
        return ours

    def _look_begun(self) -> bool:
        """Return whether the open transaction is the one that the block has begun.

        The mark of one that has failed cannot be read.
        """
        if self._is_lost():
            return True
        if is_idle(self.connection) or self.connection.status != extensions.STATUS_BEGIN:
            return False
        failed = extensions.TRANSACTION_STATUS_INERROR
        if self._marked and self.connection.get_transaction_status() != failed:
            with plain_cursor(self.connection) as cursor:
                cursor.execute("SELECT current_setting('transaction_deferrable')")
                if cursor.fetchall() != [("on",)]:
                    return False
        try:
            self.connection.tpc_rollback()
        except psycopg2.ProgrammingError as error:
            return error.pgcode is not None  # refused: psycopg2 has another one open
        return True

    def _look_joined(self) -> bool:
        """Return whether nothing of the block is committed.

        A `rollback()` before the error goes on is a habit that does no harm: nothing
        was executed behind it.
        """
        if self._is_lost():
            return True
        with plain_cursor(self.connection) as cursor:
            if not is_idle(self.connection):
                try:
                    cursor.execute(f"ROLLBACK TO SAVEPOINT {SAVEPOINT}")
                except psycopg2.Error as error:
                    if error.pgcode in NO_SAVEPOINT:
                        return False
                    raise
                return True
            if self.connection.status != extensions.STATUS_READY:
                return False  # ended by SQL; then each statement has committed itself
            cursor.execute("SELECT pg_xact_status(%s::text::xid8)", (self._xid,))
            return cursor.fetchall() == [("aborted",)]

    def _is_lost(self) -> bool:
        unknown = extensions.TRANSACTION_STATUS_UNKNOWN
        return bool(self.connection.closed) or self.connection.get_transaction_status() == unknown

    def give_back(self) -> None:
        """Roll back if an interrupt has kept the block from ending."""
        if block_of(self.connection) is self:
            self.roll_back()

    def close(self) -> None:
        """Give the connection back to its caller, as it was."""
        super().close()
        self._restore()

    def _restore(self) -> None:
        if self._begun is None:
            return
        settings, self._begun = self._begun, None
        with suppress(psycopg2.Error):  # closed, or it was lost
            self.connection.deferrable = settings.deferrable
            self.connection.autocommit = settings.autocommit


def _has_settings(connection: Connection) -> bool:
    """Return whether the session has settings of its own for transactions."""
    settings = (connection.isolation_level, connection.readonly, connection.deferrable)
    return settings != (None, None, None)


def block_of(connection: Connection) -> CallerBlock | None:
    """Return the block that is open on a connection."""
    found = watch_of(connection)
    return found if isinstance(found, CallerBlock) else None


def require_free(connection: Connection) -> None:
    """Require a connection that serves no other block. Raises LocalProtocolError."""
    other = block_of(connection)
    if other is not None:
        raise LocalProtocolError(
            f"The connection serves transaction {other.token}, whose block is open",
            hint="use tx.savepoint() for a part of that transaction, and a connection of its own "
            "for another transaction or thread",
        )


def refusal_in(error: BaseException) -> psycopg2.ProgrammingError | None:
    """Return psycopg2's refusal to end a block's transaction: `error`, or its cause.

    Frameworks wrap it.
    """
    for found in (error, error.__cause__):
        if isinstance(found, psycopg2.ProgrammingError) and REFUSED in str(found):
            return found
    return None
