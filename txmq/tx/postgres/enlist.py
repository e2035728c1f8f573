"""Transactions that somebody else begins and ends, with messages in them.

A framework, or the caller, commits by psycopg2's `commit()`. An `EnlistConnection`
takes the messages along: its `commit()` has the bundle stored and the token row
written, sends COMMIT, looks at the answer, and has the decision sent. So nothing
can happen in between, and no hook has to be believed.

On any other connection the caller's hooks say when COMMIT comes and what became of it.
They may be wrong: after a failed statement whose error was swallowed, PostgreSQL
answers ROLLBACK, and drivers return as if nothing had happened. Only the token row
decides there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

import psycopg2
from psycopg2 import extensions

from txmq.errors import LocalProtocolError, TransactionEnded
from txmq.tx.postgres.caller import is_idle, require_healthy, require_usable, roll_back
from txmq.tx.postgres.caller_block import REFUSED, CallerBlock, require_free
from txmq.tx.postgres.session import Connection, plain_cursor
from txmq.tx.postgres.watched_cursor import CursorWatch, Sends, control_in, savepoint_name, watched

if TYPE_CHECKING:
    from uuid import UUID

BY_METHOD: Final = (
    "end it by connection.commit() or rollback(), so that the messages go along with the rows"
)


class Enlisted(Protocol):
    """The messages in a connection's transaction."""

    def before_commit(self) -> None:
        """Store them, and write the token row."""

    def commit_with(self, commit: Callable[[], object]) -> None:
        """Take part in a COMMIT."""

    def after_commit(self) -> None:
        """Note that COMMIT is said to have succeeded."""

    def after_rollback(self) -> None:
        """Note that the transaction is said to be rolled back."""


class EnlistConnection(extensions.connection):
    """A psycopg2 connection whose `commit()` takes enlisted messages along.

    `psycopg2.connect(dsn, connection_factory=EnlistConnection)`. Without messages in
    the open transaction it is a connection like any other.
    """

    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401  # psycopg2's
        super().__init__(*args, **options)
        self.enlisted: Enlisted | None = None
        self.two_phase = False  # between tpc_begin() and the end

    def cursor(
        self,
        name: Any = None,  # noqa: ANN401  # psycopg2's
        cursor_factory: Any = None,  # noqa: ANN401  # likewise
        *args: Any,  # noqa: ANN401  # likewise
        **options: Any,  # noqa: ANN401  # likewise
    ) -> Any:  # noqa: ANN401  # likewise
        """Open a cursor, which is watched for savepoints and for COMMIT as SQL."""
        chosen: Any = self.cursor_factory
        factory = cursor_factory or chosen or extensions.cursor
        own = watched(factory) if isinstance(factory, type) else factory
        return super().cursor(name, own, *args, **options)

    def commit(self) -> None:
        if self.enlisted is None:
            super().commit()
        elif self.two_phase:
            raise psycopg2.ProgrammingError(f"commit {REFUSED}")
        else:
            self.enlisted.commit_with(super().commit)

    def rollback(self) -> None:
        super().rollback()  # psycopg2 refuses it in two phases
        self.two_phase = False
        self._let_go()

    def close(self) -> None:
        super().close()
        self._let_go()

    def reset(self) -> None:
        super().reset()
        self.two_phase = False
        self._let_go()

    def tpc_begin(self, *xid: Any) -> None:  # noqa: ANN401  # psycopg2's
        super().tpc_begin(*xid)
        self.two_phase = True

    def tpc_prepare(self) -> None:
        """Prepare the transaction, with the messages' token row in it.

        They are decided with this branch: by the row, once it is visible.
        """
        if self.enlisted is not None:
            self.enlisted.before_commit()
        super().tpc_prepare()

    def tpc_commit(self, *xid: Any) -> None:  # noqa: ANN401  # psycopg2's
        enlisted = None if xid else self.enlisted
        try:
            if enlisted is None:
                super().tpc_commit(*xid)
            elif self.status == extensions.STATUS_PREPARED:
                super().tpc_commit()
                enlisted.after_commit()
            else:  # in one phase
                enlisted.commit_with(super().tpc_commit)
        finally:
            self.two_phase = self.two_phase and bool(xid)

    def tpc_rollback(self, *xid: Any) -> None:  # noqa: ANN401  # psycopg2's
        super().tpc_rollback(*xid)
        if not xid:
            self.two_phase = False
            self._let_go()

    def _let_go(self) -> None:
        if self.enlisted is not None:
            self.enlisted.after_rollback()


class EnlistedBlock(CallerBlock):
    """The open transaction of a caller who will end it himself.

    It costs no round trip. An `EnlistConnection` calls it at each end of the
    transaction. On another connection a transaction that was ended without a hook is
    noticed at the next statement of a cursor that was opened since.
    """

    def __init__(self, connection: Connection, token: UUID, sends: Sends) -> None:
        super().__init__(connection, token, sends)
        self._proved = True  # nothing marks the transaction
        self._opened = False  # the transaction was seen open
        self._lost = False  # and then it was gone
        self._stored = False  # its token row is written
        self._before_all = sends.mark()

    def join(self, enlisted: Enlisted) -> None:
        """Take part in the transaction that is open, or that the next statement begins.

        Raises as `require_usable`, and LocalProtocolError in autocommit mode or within
        a block of txmq.
        """
        connection = self.connection
        require_usable(connection)
        require_free(connection)
        if connection.autocommit:
            raise LocalProtocolError(
                "The connection is in autocommit mode: each statement commits by itself",
                hint="begin a transaction by the driver or the framework, with autocommit off, or "
                "use client.transaction(connection)",
            )
        self._opened = not is_idle(connection)
        if (
            isinstance(connection, EnlistConnection)
            and connection.status == extensions.STATUS_READY
        ):
            connection.two_phase = False
        self.register()
        self.start()
        if isinstance(connection, EnlistConnection):
            connection.enlisted = enlisted

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Let txmq roll back between two transactions of the connection."""
        connection = self.connection
        if not isinstance(connection, EnlistConnection):
            yield
            return
        enlisted, connection.enlisted = connection.enlisted, None
        yield
        connection.enlisted = enlisted

    def require_open(self) -> None:
        """Require that the transaction is the one that the messages were sent in.

        Raises TransactionEnded, or TransactionAborted where a statement has failed.
        """
        require_healthy(self.connection)
        if self._was_ended() or self.connection.autocommit:
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
            self.close()
            raise self.ended()
        self._opened = True
        if found is None or found["verb"].lower() in ("savepoint", "release"):
            return found
        if found["to"] is None:
            raise self._refusal(statement, BY_METHOD)
        if not isinstance(self.connection, EnlistConnection):
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

    def roll_back(self) -> bool:
        """Roll back and close."""
        self.close()
        connection = self.connection
        if isinstance(connection, EnlistConnection) and connection.two_phase:
            with suppress(psycopg2.Error), plain_cursor(connection) as cursor:
                cursor.execute("ROLLBACK")  # the caller will call tpc_rollback()
        else:
            roll_back(connection)
        return True

    def close(self) -> None:
        """Let the connection alone."""
        CursorWatch.end(self)
        super().close()
        if isinstance(self.connection, EnlistConnection):
            self.connection.enlisted = None

    def _was_ended(self) -> bool:
        ready = self.connection.status == extensions.STATUS_READY
        self._lost = self._lost or (self._opened and (ready or is_idle(self.connection)))
        return self._lost
