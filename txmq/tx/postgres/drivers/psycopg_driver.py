"""psycopg 3: connections that block, and those of asyncio.

- A transaction of a block is begun by `tpc_begin`, so that psycopg itself refuses
  `commit()` and `rollback()`. Nothing is prepared by that: psycopg sends a plain BEGIN.
  It is DEFERRABLE by itself only: where SQL has ended it, psycopg begins another one in
  front of the next statement, which must not have that mark.
- `commit()`, `tpc_prepare()` and the end of `connection.transaction()` return without
  an error when the server answered ROLLBACK. COMMIT and PREPARE go through a cursor,
  which tells the command tag.
- txmq's statements go through a cursor that binds on the client: several make one round
  trip, and none is prepared, which poolers would not stand. It has psycopg's own
  loaders and dumpers, whatever the caller has registered.
- The caller's statements are seen by cursors of a class derived from his own, and by
  `connection.transaction()`, whose savepoints pass no cursor.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import lru_cache
from typing import Any, Final

import psycopg
from psycopg import adapt, postgres, pq, rows, sql

from txmq.errors import LocalProtocolError
from txmq.faces import run
from txmq.tx.postgres.driver import (
    BEGUN_AS,
    STATUSES,
    AsyncEnlisted,
    Enlisted,
    Rows,
    Status,
    TransactionGone,
    Values,
    Watch,
)
from txmq.tx.postgres.drivers.uninterrupted import uninterrupted
from txmq.tx.postgres.errors import DriverError, driver_error
from txmq.tx.postgres.statement_watch import watch_of

REFUSED: Final = "cannot be used during a two-phase transaction"  # psycopg's words
_NOT_WATCHED: Final = object()


class PsycopgDriver:
    """A connection of psycopg 3. For one thread, or one task."""

    tells_failed = True

    def __init__(self, connection: Any) -> None:  # noqa: ANN401  # Connection or AsyncConnection
        self.connection = connection
        self.awaits = isinstance(connection, psycopg.AsyncConnection)
        self.interruption: BaseException | None = None
        self._autocommit: bool | None = None  # as a block, if one is begun, has found it
        self._factory: Any = _NOT_WATCHED
        self._held = False

    @property
    def status(self) -> Status:
        number: int = self.connection.pgconn.transaction_status
        return STATUSES[number]

    @property
    def closed(self) -> bool:
        return bool(self.connection.closed)

    @property
    def autocommit(self) -> bool:
        # In its own `transaction()` nothing commits by itself.
        return bool(self.connection.autocommit) and not self.connection._num_transactions  # noqa: SLF001  # nothing public tells

    @property
    def database(self) -> str:
        return str(self.connection.info.dbname)

    @property
    def begun(self) -> bool:
        return self._autocommit is not None

    @property
    def holds_begun(self) -> bool:
        two_phase = self.connection._tpc  # noqa: SLF001  # nothing public tells
        return two_phase is not None and not two_phase[1]

    @property
    def is_ready(self) -> bool:
        return self.status is Status.IDLE

    @property
    def enlists(self) -> bool:
        return isinstance(self.connection, _Enlisting)

    def require_usable(self) -> None:
        if self.connection.pgconn.pipeline_status != pq.PipelineStatus.OFF:
            raise LocalProtocolError(
                "the connection is in pipeline mode, in which errors come late",
                hint="leave `connection.pipeline()` before the transaction, or use a connection "
                "of its own",
            )

    def require_joinable(self) -> None:
        if self.connection._num_transactions:  # noqa: SLF001  # nothing public tells
            raise LocalProtocolError(
                "connection.transaction() is open, and will end the transaction",
                hint="put `with client.transaction(connection)` around it, or send by "
                "client.enlist(connection)",
            )

    @contextmanager
    def noted(self) -> Iterator[list[str]]:
        notices = list[str]()

        def note(diagnostic: psycopg.errors.Diagnostic) -> None:
            notices.append(diagnostic.message_primary or "")

        self.connection.add_notice_handler(note)
        try:
            yield notices
        finally:
            self.connection.remove_notice_handler(note)

    def watch(self, watch: Watch) -> None:
        connection = self.connection
        if self._held:
            connection.commit, connection.rollback = self._refusing(watch)
        if self.enlists:
            return  # it watches by itself
        self._factory = connection.cursor_factory
        connection.cursor_factory = watched(connection.cursor_factory)
        connection.transaction = self._async_transaction if self.awaits else self._transaction

    def _refusing(self, watch: Watch) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Return `commit()` and `rollback()` as SQL that is not allowed."""

        def asked(statement: str) -> Callable[[], Any]:
            async def ask() -> None:
                watch.require_allowed(statement)

            return ask if self.awaits else lambda: run(ask())

        return asked("COMMIT"), asked("ROLLBACK")

    def unwatch(self) -> None:
        for name in ("commit", "rollback"):
            self.connection.__dict__.pop(name, None)
        if self._factory is _NOT_WATCHED:
            return
        given, self._factory = self._factory, _NOT_WATCHED
        if issubclass(self.connection.cursor_factory, _Watched | _AsyncWatched):
            self.connection.cursor_factory = given
        self.connection.__dict__.pop("transaction", None)

    @contextmanager
    def _transaction(self, *args: Any, **options: Any) -> Iterator[psycopg.Transaction]:  # noqa: ANN401  # psycopg's
        connection = self.connection
        with (
            followed(connection) as follow,
            type(connection).transaction(connection, *args, **options) as transaction,
        ):
            follow(transaction)
            yield transaction

    @asynccontextmanager
    async def _async_transaction(
        self,
        *args: Any,  # noqa: ANN401  # psycopg's
        **options: Any,  # noqa: ANN401  # likewise
    ) -> AsyncIterator[psycopg.AsyncTransaction]:
        connection = self.connection
        with followed(connection) as follow:
            async with type(connection).transaction(connection, *args, **options) as transaction:
                follow(transaction)
                yield transaction

    async def execute(self, statements: str, values: Values = ()) -> Rows:
        return (await self._execute(statements, values))[0]

    async def _execute(self, statements: str, values: Values = ()) -> tuple[Rows, str]:
        """Execute statements; return rows and command tag of the last one."""
        kind: Any = _OwnAsyncCursor if self.awaits else _OwnCursor
        try:
            cursor = kind(self.connection, row_factory=rows.tuple_row)
            await self._do(cursor.execute, statements, values or None)
            while cursor.nextset():
                pass
            found = await self._do(cursor.fetchall) if cursor.description is not None else []
        except psycopg.Error as error:
            raise _known(error) from error
        return found, cursor.statusmessage or ""

    async def _do(self, call: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401  # of psycopg
        """Call a method, which blocks or is awaited."""
        result = call(*args)
        return await result if self.awaits else result

    async def begin(self) -> bool | None:
        connection = self.connection
        self._autocommit = connection.autocommit
        deferrable = connection.deferrable
        try:
            if connection.autocommit:
                await self._do(connection.set_autocommit, False)
            # A SERIALIZABLE READ ONLY one would wait for a safe snapshot.
            marked = not connection.read_only
            if marked:
                await self._do(connection.set_deferrable, True)
            try:
                await self._do(connection.tpc_begin, BEGUN_AS)
            finally:
                # Its setter is refused in a transaction, and later ones have no mark.
                connection._deferrable = deferrable  # noqa: SLF001  # as above
                connection._begin_statement = b""  # noqa: SLF001  # likewise
        except BaseException as error:
            await self.restore()
            if isinstance(error, psycopg.Error):
                raise _known(error) from error
            raise
        return marked

    async def hold(self) -> None:
        self._held = True

    async def commit(self, before: str = "") -> str:
        if self.begun and not self.holds_begun:
            raise TransactionGone
        return await self._ended(f"{before}COMMIT")

    async def prepare(self, gid: str) -> bool:
        return await self._ended(f"PREPARE TRANSACTION '{gid}'") == "PREPARE TRANSACTION"

    async def _ended(self, statement: str) -> str:
        """End the transaction, and return the command tag."""
        if self.awaits:
            done = await uninterrupted(self._execute(statement), self.connection.close)
            (_rows, tag), self.interruption = done
        else:
            _rows, tag = await self._execute(statement)
        # Its outcome is known: a connection lost since shows in its next use.
        with suppress(DriverError):
            await self._leave_two_phase()
        return str(tag)

    async def _leave_two_phase(self) -> None:
        if self.holds_begun:
            try:
                await self._do(self.connection.tpc_rollback)
            except psycopg.Error as error:
                raise _known(error) from error

    async def roll_back(self) -> None:
        connection = self.connection
        try:
            if self.holds_begun:
                await self._do(connection.tpc_rollback)
            elif connection._num_transactions:  # noqa: SLF001  # as above
                if self.status is not Status.IDLE:
                    await self._execute("ROLLBACK")
            else:
                await self._do(connection.rollback)
        except psycopg.Error as error:
            raise _known(error) from error

    async def roll_back_begun(self) -> bool:
        await self._leave_two_phase()
        return True

    async def restore(self) -> None:
        autocommit, self._autocommit = self._autocommit, None
        if autocommit:
            with suppress(psycopg.Error):  # closed, or it was lost
                await self._do(self.connection.set_autocommit, True)

    async def finish_prepared(self, gid: str, *, commit: bool) -> None:
        connection = self.connection
        try:
            await self._do(connection.tpc_commit if commit else connection.tpc_rollback, gid)
        except psycopg.Error as error:
            raise _known(error) from error


_OWN_ADAPTERS: Final = adapt.AdaptersMap(types=postgres.types)
postgres.register_default_adapters(_OWN_ADAPTERS)


class _OwnCursor(psycopg.ClientCursor[Any]):
    """A cursor of txmq's own statements."""

    @property
    def adapters(self) -> adapt.AdaptersMap:
        return _OWN_ADAPTERS


class _OwnAsyncCursor(psycopg.AsyncClientCursor[Any]):
    """A cursor of asyncio, likewise."""

    @property
    def adapters(self) -> adapt.AdaptersMap:
        return _OWN_ADAPTERS


def _known(error: psycopg.Error) -> DriverError:
    known = driver_error(error)
    assert known is not None, "psycopg's"
    return known


@contextmanager
def followed(connection: Any) -> Iterator[Callable[[Any], None]]:  # noqa: ANN401  # of either kind
    """Tell the watch over a connection of the savepoint of a `transaction()` in the
    block, and of its end.
    """
    entered: list[Any] = []

    def tell(statement: str) -> None:
        watch = watch_of(connection)
        if watch is not None and (found := watch.require_allowed(statement)) is not None:
            watch.follow(found)

    def follow(transaction: Any) -> None:  # noqa: ANN401  # Transaction or AsyncTransaction
        if transaction.savepoint_name:
            entered.append(transaction)
            tell(f"SAVEPOINT {quoted(transaction.savepoint_name)}")

    try:
        yield follow
    finally:
        for transaction in entered:
            name = quoted(transaction.savepoint_name)
            if transaction.status is not transaction.Status.COMMITTED:
                tell(f"ROLLBACK TO {name}")
            tell(f"RELEASE {name}")


def quoted(name: str) -> str:
    """Return an identifier as SQL has it."""
    return '"' + name.replace('"', '""') + '"'


def _text(query: object, cursor: Any) -> str:  # noqa: ANN401  # of either kind
    if isinstance(query, sql.Composable):
        return query.as_string(cursor)
    return bytes(query[:256]).decode(errors="replace") if isinstance(query, bytes) else str(query)


class _Watched(psycopg.Cursor[Any]):
    """A cursor of the caller's own class, whose statements are read."""

    def execute(self, query: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401  # psycopg's
        watch = watch_of(self.connection)
        if watch is None:
            return super().execute(query, *args, **options)
        found = watch.require_allowed(_text(query, self))
        super().execute(query, *args, **options)
        if found is not None:
            watch.follow(found)
        return self


class _AsyncWatched(psycopg.AsyncCursor[Any]):
    """A cursor of asyncio, likewise."""

    async def execute(self, query: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401  # psycopg's
        watch = watch_of(self.connection)
        if watch is None:
            return await super().execute(query, *args, **options)
        found = watch.require_allowed(_text(query, self))
        await super().execute(query, *args, **options)
        if found is not None:
            watch.follow(found)
        return self


@lru_cache
def watched(base: Any) -> Any:  # noqa: ANN401  # mypy takes no cursor for hashable
    """Return the class of watched cursors of a class of cursors."""
    if issubclass(base, _Watched | _AsyncWatched):
        return base
    own = _AsyncWatched if issubclass(base, psycopg.AsyncCursor) else _Watched
    return type(f"Watched{base.__name__}", (own, base), {})


class _Enlisting:
    """Common part of both kinds of connections that take messages along."""

    enlisted: Any = None
    two_phase = False  # between tpc_begin() and the end
    _own_factory: Any = None

    @property
    def cursor_factory(self) -> Any:  # noqa: ANN401  # psycopg's
        return self._own_factory

    @cursor_factory.setter
    def cursor_factory(self, factory: Any) -> None:  # noqa: ANN401  # psycopg's
        self._own_factory = watched(factory)

    def _let_go(self) -> None:
        if self.enlisted is not None:
            self.enlisted.after_rollback()


class EnlistConnection(_Enlisting, psycopg.Connection[Any]):
    """A connection of psycopg 3 whose `commit()` takes enlisted messages along, like
    the end of its `with` and of its outermost `transaction()`.

    `EnlistConnection.connect(dsn)`. Without messages in the open transaction it is a
    connection like any other.
    """

    enlisted: Enlisted | None

    def commit(self) -> None:
        if self.enlisted is None or self._num_transactions:  # psycopg refuses the latter
            super().commit()
        elif self.two_phase:
            raise psycopg.ProgrammingError(f"commit() {REFUSED}")
        else:
            self.enlisted.commit_with(super().commit)

    def rollback(self) -> None:
        super().rollback()  # psycopg refuses it in two phases
        self.two_phase = False
        self._let_go()

    def close(self) -> None:
        super().close()
        self._let_go()

    @contextmanager
    def transaction(
        self,
        savepoint_name: str | None = None,
        force_rollback: bool = False,  # noqa: FBT001, FBT002  # psycopg's
    ) -> Iterator[psycopg.Transaction]:
        """Begin a transaction, whose messages go along at its end, or a savepoint."""
        outermost = self.info.transaction_status is pq.TransactionStatus.IDLE
        inner = super().transaction(savepoint_name, force_rollback)
        with followed(self) as follow:
            transaction = inner.__enter__()
            if not outermost:
                follow(transaction)
            try:
                yield transaction
            except BaseException as error:
                if not inner.__exit__(type(error), error, error.__traceback__):
                    raise
            else:
                if outermost and self.enlisted is not None and not force_rollback:
                    self._commit_block(inner)
                else:
                    inner.__exit__(None, None, None)
            finally:
                if outermost:
                    self._let_go()

    def _commit_block(self, inner: Any) -> None:  # noqa: ANN401  # a context manager
        assert self.enlisted is not None
        try:
            self.enlisted.before_commit()
        except BaseException as error:
            inner.__exit__(type(error), error, error.__traceback__)
            raise
        self.enlisted.commit_with(lambda: inner.__exit__(None, None, None))

    def tpc_begin(self, xid: psycopg.Xid | str) -> None:
        super().tpc_begin(xid)
        self.two_phase = True

    def tpc_prepare(self) -> None:
        """Prepare the transaction, with the messages' token row in it.

        They are decided with this branch: by the row, once it is visible.
        """
        if self.enlisted is not None:
            self.enlisted.before_commit()
        super().tpc_prepare()

    def tpc_commit(self, xid: psycopg.Xid | str | None = None) -> None:
        enlisted = self.enlisted if xid is None else None
        prepared = self._tpc is not None and self._tpc[1]
        try:
            if enlisted is None:
                super().tpc_commit(xid)
            elif prepared:
                super().tpc_commit()
                enlisted.after_commit()
            else:  # in one phase
                enlisted.commit_with(super().tpc_commit)
        finally:
            self.two_phase = self.two_phase and xid is not None

    def tpc_rollback(self, xid: psycopg.Xid | str | None = None) -> None:
        super().tpc_rollback(xid)
        if xid is None:
            self.two_phase = False
            self._let_go()


class AsyncEnlistConnection(_Enlisting, psycopg.AsyncConnection[Any]):
    """A connection of psycopg 3 for asyncio that takes messages along, likewise."""

    enlisted: AsyncEnlisted | None

    async def commit(self) -> None:
        if self.enlisted is None or self._num_transactions:  # psycopg refuses the latter
            await super().commit()
        elif self.two_phase:
            raise psycopg.ProgrammingError(f"commit() {REFUSED}")
        else:
            await self.enlisted.commit_with(super().commit)

    async def rollback(self) -> None:
        await super().rollback()  # psycopg refuses it in two phases
        self.two_phase = False
        self._let_go()

    async def close(self) -> None:
        await super().close()
        self._let_go()

    @asynccontextmanager
    async def transaction(
        self,
        savepoint_name: str | None = None,
        force_rollback: bool = False,  # noqa: FBT001, FBT002  # psycopg's
    ) -> AsyncIterator[psycopg.AsyncTransaction]:
        """Begin a transaction, whose messages go along at its end, or a savepoint."""
        outermost = self.info.transaction_status is pq.TransactionStatus.IDLE
        inner = super().transaction(savepoint_name, force_rollback)
        with followed(self) as follow:
            transaction = await inner.__aenter__()
            if not outermost:
                follow(transaction)
            try:
                yield transaction
            except BaseException as error:
                if not await inner.__aexit__(type(error), error, error.__traceback__):
                    raise
            else:
                if outermost and self.enlisted is not None and not force_rollback:
                    await self._commit_block(inner)
                else:
                    await inner.__aexit__(None, None, None)
            finally:
                if outermost:
                    self._let_go()

    async def _commit_block(self, inner: Any) -> None:  # noqa: ANN401  # a context manager
        assert self.enlisted is not None
        try:
            await self.enlisted.before_commit()
        except BaseException as error:
            await inner.__aexit__(type(error), error, error.__traceback__)
            raise
        await self.enlisted.commit_with(lambda: inner.__aexit__(None, None, None))

    async def tpc_begin(self, xid: psycopg.Xid | str) -> None:
        await super().tpc_begin(xid)
        self.two_phase = True

    async def tpc_prepare(self) -> None:
        """Prepare the transaction, with the messages' token row in it."""
        if self.enlisted is not None:
            await self.enlisted.before_commit()
        await super().tpc_prepare()

    async def tpc_commit(self, xid: psycopg.Xid | str | None = None) -> None:
        enlisted = self.enlisted if xid is None else None
        prepared = self._tpc is not None and self._tpc[1]
        try:
            if enlisted is None:
                await super().tpc_commit(xid)
            elif prepared:
                await super().tpc_commit()
                enlisted.after_commit()
            else:  # in one phase
                await enlisted.commit_with(super().tpc_commit)
        finally:
            self.two_phase = self.two_phase and xid is not None

    async def tpc_rollback(self, xid: psycopg.Xid | str | None = None) -> None:
        await super().tpc_rollback(xid)
        if xid is None:
            self.two_phase = False
            self._let_go()
