"""psycopg2: connections that block.

- A transaction of a block is begun by `tpc_begin`, so that psycopg2 itself refuses
  `commit()`, `rollback()`, `with connection:` and a change of `autocommit`. Nothing is
  prepared by that: psycopg2 sends a plain BEGIN, where it would send it anyway, and a
  plain COMMIT.
- `commit()` hides the command tag, and returns without an error when the server
  answered ROLLBACK. The status is looked at before.
- `tpc_prepare()` returns without an error likewise. So PREPARE goes through a cursor,
  together with a query for what the server has prepared under that gid: one query
  string, one round trip. A BEGIN in between keeps psycopg2, which still thinks the
  transaction open, in step with the server until the rollback takes both back.
- The caller's statements are seen by cursors of a class derived from his own.
- Types and adapters that the caller has registered do not count for txmq's statements:
  its cursors have psycopg2's own types, and what they bind is quoted before.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from functools import lru_cache
from typing import Any, Final

import psycopg2
from psycopg2 import extensions, sql

from txmq.errors import LocalProtocolError
from txmq.tx.postgres.driver import (
    BEGUN_AS,
    STATUSES,
    Enlisted,
    Rows,
    Status,
    TransactionGone,
    Values,
    Watch,
)
from txmq.tx.postgres.errors import DriverError, driver_error
from txmq.tx.postgres.session import Connection, Notices, plain_cursor
from txmq.tx.postgres.statement_watch import watch_of

REFUSED: Final = "cannot be used during a two-phase transaction"  # psycopg2's words
_PREPARE: Final = (
    "PREPARE TRANSACTION %(gid)s; BEGIN; SELECT FROM pg_prepared_xact() WHERE gid = %(gid)s"
)
_NOT_WATCHED: Final = object()


class Psycopg2Driver:
    """A connection of psycopg2. For one thread."""

    awaits = False
    tells_failed = True
    interruption = None

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        # autocommit and deferrable of the caller's, which a block changes for a while
        self._settings: tuple[bool, bool | None] | None = None
        self._factory: Any = _NOT_WATCHED
        self._held = False

    @property
    def status(self) -> Status:
        return STATUSES[self.connection.get_transaction_status()]

    @property
    def closed(self) -> bool:
        return bool(self.connection.closed)

    @property
    def autocommit(self) -> bool:
        return bool(self.connection.autocommit)

    @property
    def database(self) -> str:
        return str(self.connection.info.dbname)

    @property
    def begun(self) -> bool:
        return self._settings is not None

    @property
    def holds_begun(self) -> bool:
        return bool(self.connection.status == extensions.STATUS_BEGIN)

    @property
    def is_ready(self) -> bool:
        return bool(self.connection.status == extensions.STATUS_READY)

    @property
    def enlists(self) -> bool:
        return isinstance(self.connection, EnlistConnection)

    def require_usable(self) -> None:
        if self.connection.async_:
            raise LocalProtocolError(
                "the psycopg2 connection is asynchronous",
                hint="open one without async_=True; on Twisted the client runs it in its threads",
            )

    def require_joinable(self) -> None:
        """Refuse nothing: the block may end any transaction, whoever has begun it."""

    def noted(self) -> AbstractContextManager[list[str]]:
        return Notices(self.connection)

    def watch(self, watch: Watch) -> None:
        connection = self.connection
        self._factory = connection.cursor_factory
        connection.cursor_factory = watched(_cursor_class(connection))

    def unwatch(self) -> None:
        if self._factory is _NOT_WATCHED:
            return
        given, self._factory = self._factory, _NOT_WATCHED
        factory = self.connection.cursor_factory
        if isinstance(factory, type) and issubclass(factory, _Watched):
            self.connection.cursor_factory = given

    async def execute(self, statements: str, values: Values = ()) -> Rows:
        try:
            with plain_cursor(self.connection) as cursor:
                cursor.string_types = _OWN_TYPES
                cursor.execute(statements, _quoted(values))
                return cursor.fetchall() if cursor.description is not None else []
        except psycopg2.Error as error:
            raise _known(error) from error

    async def begin(self) -> bool | None:
        connection = self.connection
        try:
            if not connection.autocommit:
                if connection.status != extensions.STATUS_READY:
                    _end(connection)  # SQL has ended the last one, which psycopg2 does not know
            elif _has_settings(connection):
                # psycopg2 would lose these settings of the session in autocommit mode.
                return None
            self._settings = connection.autocommit, connection.deferrable
            try:
                connection.autocommit = False
                # A SERIALIZABLE READ ONLY one would wait for a safe snapshot.
                marked = not connection.readonly
                if marked:
                    connection.deferrable = True
                connection.tpc_begin(BEGUN_AS)
            except BaseException:
                await self.restore()
                raise
        except psycopg2.Error as error:
            raise _known(error) from error
        return marked

    async def hold(self) -> None:
        """Let psycopg2 take a transaction for open all the time.

        Then it begins none itself, and its `commit()` and `rollback()` show in its
        status. What it begins after these is READ ONLY.
        """
        if self._held:
            return
        try:
            self.connection.autocommit = False
            self.connection.readonly = True
            self._roll_back_held()
        except psycopg2.Error as error:
            raise _known(error) from error
        self._held = True

    def _roll_back_held(self) -> None:
        ready = self.connection.status == extensions.STATUS_READY
        if ready or self.status is not Status.IDLE:
            with plain_cursor(self.connection) as cursor:
                cursor.execute("ROLLBACK")  # where it is ready, behind a BEGIN of psycopg2

    async def commit(self, before: str = "") -> str:
        connection = self.connection
        try:
            if self.begun:
                try:
                    connection.tpc_commit()
                except psycopg2.ProgrammingError as error:
                    if error.pgcode is not None:
                        raise
                    raise TransactionGone from None  # psycopg2 has another open; nothing was sent
                return "COMMIT"
            if connection.status == extensions.STATUS_BEGIN and not self._held:
                try:
                    connection.commit()
                except psycopg2.ProgrammingError as error:
                    if error.pgcode is not None:
                        raise
                    # begun by tpc_begin, which forbids commit(); nothing was sent
                    connection.tpc_commit()
                return "COMMIT"
            # A BEGIN that psycopg2 does not know of: its commit() would do nothing.
            with plain_cursor(connection) as cursor:
                cursor.execute(f"{before}COMMIT")
                tag = cursor.statusmessage
        except psycopg2.Error as error:
            raise _known(error) from error
        if not self._held:
            with suppress(psycopg2.Error):
                _end(connection)
        return str(tag)

    async def roll_back(self) -> None:
        try:
            if self._held:
                self._roll_back_held()
            else:
                _end(self.connection)
        except psycopg2.Error as error:
            raise _known(error) from error

    async def roll_back_begun(self) -> bool:
        try:
            self.connection.tpc_rollback()
        except psycopg2.ProgrammingError as error:
            return error.pgcode is not None  # refused: psycopg2 has another one open
        except psycopg2.Error as error:
            raise _known(error) from error
        return True

    async def restore(self) -> None:
        if self._settings is None:
            return
        (autocommit, deferrable), self._settings = self._settings, None
        with suppress(psycopg2.Error):  # closed, or it was lost
            self.connection.deferrable = deferrable
            self.connection.autocommit = autocommit

    async def prepare(self, gid: str) -> bool:
        try:
            with plain_cursor(self.connection) as cursor:
                cursor.execute(_PREPARE, {"gid": gid})
                prepared = cursor.rowcount == 1
        except psycopg2.Error as error:
            raise _known(error) from error
        # PREPARE's outcome is known: a connection lost since shows in its next use.
        with suppress(psycopg2.Error):
            _end(self.connection)
        return prepared

    async def finish_prepared(self, gid: str, *, commit: bool) -> None:
        try:
            (self.connection.tpc_commit if commit else self.connection.tpc_rollback)(gid)
        except psycopg2.Error as error:
            raise _known(error) from error


_OWN_TYPES: Final = {
    oid: known
    for known in (
        extensions.BOOLEAN,
        extensions.INTEGER,
        extensions.LONGINTEGER,
        psycopg2.STRING,
        psycopg2.BINARY,
    )
    for oid in known.values
}


def _quoted(values: Values) -> Any:  # noqa: ANN401  # as they were given
    """Return values as texts that no adapter changes; SQL gives them their types."""
    if isinstance(values, dict):
        return {name: _quoted_value(value) for name, value in values.items()}
    return [_quoted_value(value) for value in values] or None


def _quoted_value(value: Any) -> Any:  # noqa: ANN401  # of the rules' statements
    if value is None:
        return None
    if isinstance(value, bytes):
        return extensions.Binary(value)
    return extensions.QuotedString(str(value))


def _known(error: psycopg2.Error) -> DriverError:
    known = driver_error(error)
    assert known is not None, "psycopg2's"
    return known


def _has_settings(connection: Connection) -> bool:
    """Return whether the session has settings of its own for transactions."""
    settings = (connection.isolation_level, connection.readonly, connection.deferrable)
    return settings != (None, None, None)


def _end(connection: Connection) -> None:
    """Leave server and psycopg2 without an open transaction. Raises psycopg2.Error."""
    if connection.autocommit:
        if connection.get_transaction_status() != extensions.TRANSACTION_STATUS_IDLE:
            with plain_cursor(connection) as cursor:
                cursor.execute("ROLLBACK")
        return
    try:
        connection.rollback()
    except psycopg2.ProgrammingError:  # begun by tpc_begin, which forbids it; nothing was sent
        if connection.status == extensions.STATUS_READY:
            # psycopg2 2.9 stays in two-phase mode after a failed tpc_commit().
            connection.tpc_begin("to leave the mode")
        connection.tpc_rollback()


class _Watched(extensions.cursor):
    """A cursor of the caller's own class, whose statements are read."""

    def execute(self, query: Any, vars: Any = None) -> None:  # noqa: A002, ANN401  # psycopg2's
        watch = watch_of(self.connection)
        if watch is None:
            super().execute(query, vars)
            return
        found = watch.require_allowed(query if type(query) is str else _text(query, self))
        super().execute(query, vars)
        if found is not None:
            watch.follow(found)


@lru_cache
def watched(base: Any) -> Any:  # noqa: ANN401  # mypy takes no cursor for hashable
    """Return the class of watched cursors of a class of cursors."""
    if issubclass(base, _Watched):
        return base
    return type(f"Watched{base.__name__}", (_Watched, base), {})


def _cursor_class(connection: Connection) -> Any:  # noqa: ANN401  # as above
    """Return the class of the caller's cursors, which depends on that of his connection
    and on its factory.
    """
    if type(connection) is extensions.connection and connection.cursor_factory is None:
        return extensions.cursor
    return type(connection.cursor())


def _text(query: object, cursor: extensions.cursor) -> str:
    if isinstance(query, sql.Composable):
        return query.as_string(cursor)
    return bytes(query[:256]).decode(errors="replace") if isinstance(query, bytes) else str(query)


class _Info(extensions.ConnectionInfo):
    """Connection as psycopg2 tells of it, and whether messages wait for its commit.

    A pool asks it whether to roll back what it is given. Without that the messages of a
    user who has executed nothing would go along with the commit of the next one.
    """

    def __init__(self, connection: EnlistConnection) -> None:
        super().__init__(connection)
        self._connection = connection

    @property
    def transaction_status(self) -> int:
        """Return the status; with messages a transaction that is not begun is open."""
        found = int(super().transaction_status)
        if found == extensions.TRANSACTION_STATUS_IDLE and self._connection.enlisted is not None:
            return extensions.TRANSACTION_STATUS_INTRANS
        return found


class EnlistConnection(extensions.connection):
    """A psycopg2 connection whose `commit()` takes enlisted messages along.

    `psycopg2.connect(dsn, connection_factory=EnlistConnection)`. Without messages in
    the open transaction it is a connection like any other.
    """

    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401  # psycopg2's
        super().__init__(*args, **options)
        self.enlisted: Enlisted | None = None
        self.two_phase = False  # between tpc_begin() and the end

    @property
    def info(self) -> Any:  # noqa: ANN401  # psycopg2's
        """Return what psycopg2 tells of the connection."""
        return _Info(self)

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
