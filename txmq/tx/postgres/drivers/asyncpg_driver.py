"""asyncpg, for asyncio.

- It has no `commit()`. A transaction of a block is begun by `connection.transaction()`,
  so that those of the caller become savepoints in it.
- Its status does not tell a failed transaction from an open one, and the end of
  `transaction()` is silent when the server answers ROLLBACK. The command tag of COMMIT
  and PREPARE tells, and the token's INSERT fails before.
- It binds on the server: placeholders are numbered, and statements with parameters go
  out one by one. Several outside of a transaction get one around them.
- Codecs that the caller has set do not count for txmq's statements: asyncpg can leave
  them out, as it does for its own.
- The caller's statements are seen by a class derived from that of his connection, which
  is its class while the block is open: the instance has no attributes to hook into.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import takewhile
from typing import Any, Final, NamedTuple

import asyncpg

from txmq.errors import LocalProtocolError
from txmq.tx.postgres.driver import AsyncEnlisted, Rows, Status, TransactionGone, Values, Watch
from txmq.tx.postgres.drivers.uninterrupted import uninterrupted
from txmq.tx.postgres.errors import DriverError, driver_error
from txmq.tx.postgres.statement_watch import control_in, watch_of

_WITH_ROWS: Final = ("SELECT", "WITH m", "WITH g")
_PLACEHOLDER: Final = re.compile(r"%(?:\((\w+)\))?s")
_ERRORS: Final = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
    TimeoutError,
)


class _Statement(NamedTuple):
    """A statement with asyncpg's placeholders, and what to put in their places."""

    text: str
    names: tuple[str | int, ...]


def _is_plain(statement: _Statement) -> bool:
    """Return whether a statement has no parameters and no rows."""
    return not statement.names and not statement.text.startswith(_WITH_ROWS)


class AsyncpgDriver:
    """A connection of asyncpg, or a pool's proxy of it. For one task."""

    awaits = True
    tells_failed = False

    def __init__(self, connection: Any) -> None:  # noqa: ANN401  # Connection or a proxy
        if isinstance(connection, asyncpg.pool.PoolConnectionProxy):
            connection = connection._con  # noqa: SLF001  # its class has the statements
            if connection is None:
                raise LocalProtocolError(
                    "the connection was given back to its pool", hint="acquire another one"
                )
        self.connection = connection
        self.interruption: BaseException | None = None
        self._transaction: Any = None
        self._class: Any = None

    @property
    def status(self) -> Status:
        if self.connection.is_closed():
            return Status.UNKNOWN
        return Status.OPEN if self.connection.is_in_transaction() else Status.IDLE

    @property
    def closed(self) -> bool:
        return bool(self.connection.is_closed())

    @property
    def autocommit(self) -> bool:
        return self.status is not Status.OPEN

    @property
    def database(self) -> str:
        return str(self.connection._params.database)  # noqa: SLF001  # nothing public tells

    @property
    def begun(self) -> bool:
        return self._transaction is not None

    @property
    def holds_begun(self) -> bool:
        top = self.connection._top_xact  # noqa: SLF001  # as above
        return top is not None and top is self._transaction

    @property
    def is_ready(self) -> bool:
        return self.status is Status.IDLE

    @property
    def enlists(self) -> bool:
        # asyncpg takes any connection for an instance of any class of them.
        return issubclass(type(self.connection), EnlistConnection)

    def require_usable(self) -> None:
        """Require nothing: each connection suits."""

    def require_joinable(self) -> None:
        if self.connection._top_xact is not None:  # noqa: SLF001  # as above
            raise LocalProtocolError(
                "connection.transaction() is open, and will end the transaction",
                hint="put `async with client.transaction(connection)` around it, or send by "
                "client.enlist(connection)",
            )

    @contextmanager
    def noted(self) -> Iterator[list[str]]:
        notices = list[str]()

        def note(_connection: object, message: Any) -> None:  # noqa: ANN401  # asyncpg's
            notices.append(message.message or "")

        self.connection.add_log_listener(note)
        try:
            yield notices
        finally:
            if not self.connection.is_closed():
                self.connection.remove_log_listener(note)

    def watch(self, watch: Watch) -> None:
        if not self.enlists:
            self._class = type(self.connection)
            self.connection.__class__ = watched(self._class)

    def unwatch(self) -> None:
        if self._class is not None:
            self.connection.__class__, self._class = self._class, None

    async def execute(self, statements: str, values: Values = ()) -> Rows:
        found = _translated(statements)
        with _known():
            if found[0].text.startswith("BEGIN"):
                found = await self._begun(found)
            if len(found) < 2 or self.status is not Status.IDLE:
                return await self._all(found, values)
            await self._plain("BEGIN")
            try:
                rows = await self._all(found, values)
            except BaseException:
                with suppress(*_ERRORS):
                    await self._plain("ROLLBACK")
                raise
            await self._plain("COMMIT")
            return rows

    async def _all(self, statements: list[_Statement], values: Values) -> Rows:
        rows: Rows = []
        given: Any = values
        for statement in statements:
            if _is_plain(statement):  # not prepared
                await self._plain(statement.text)
                rows = []
            else:
                wanted = [given[name] for name in statement.names]
                rows = [tuple(row) for row in await self._fetched(statement.text, wanted)]
        return rows

    async def _fetched(self, statement: str, values: list[Any]) -> Any:  # noqa: ANN401  # records
        """Return the rows of a statement, past any watch, and past the codecs and the
        class of records of the caller.
        """
        self.connection._check_open()  # noqa: SLF001  # as fetch() does
        return await self.connection._execute(  # noqa: SLF001  # fetch() cannot do without codecs
            statement, values, 0, None, ignore_custom_codec=True, record_class=asyncpg.Record
        )

    async def _plain(self, statement: str) -> str:
        """Execute a statement as it is, past any watch; return the command tag."""
        return str(await asyncpg.Connection.execute(self.connection, statement))

    async def _begun(self, statements: list[_Statement]) -> list[_Statement]:
        """Begin a transaction in which those of the caller are savepoints, by the first
        of these statements and what can go along; return the rest.
        """
        connection = self.connection
        plain = list(takewhile(_is_plain, statements))
        await self._plain("; ".join(text for text, _names in plain))
        connection._top_xact = asyncpg.Connection.transaction(  # noqa: SLF001  # as above
            connection, isolation="read_committed"
        )
        return statements[len(plain) :]

    async def begin(self) -> bool | None:
        connection = self.connection
        connection._top_xact = None  # noqa: SLF001  # SQL has ended the last one
        transaction = asyncpg.Connection.transaction(connection, deferrable=True)
        with _known():
            await transaction.start()
        self._transaction = transaction
        return True

    async def hold(self) -> None:
        """Do nothing: what ends a transaction passes the watch."""

    async def commit(self, before: str = "") -> str:
        if self.begun and not self.holds_begun:
            raise TransactionGone
        return await self._ended(f"{before}COMMIT")

    async def prepare(self, gid: str) -> bool:
        return await self._ended(f"PREPARE TRANSACTION '{gid}'") == "PREPARE TRANSACTION"

    async def _ended(self, statement: str) -> str:
        """End the transaction, and return the command tag."""
        with _known():
            done = await uninterrupted(self._plain(statement), self._terminate)
        tag, self.interruption = done
        self.connection._top_xact = None  # noqa: SLF001  # nothing public does
        return str(tag)

    async def _terminate(self) -> None:
        self.connection.terminate()

    async def roll_back(self) -> None:
        if self.status is Status.OPEN:
            with _known():
                await self._plain("ROLLBACK")
        self.connection._top_xact = None  # noqa: SLF001  # as above

    async def roll_back_begun(self) -> bool:
        await self.roll_back()
        return True

    async def restore(self) -> None:
        self._transaction = None

    async def finish_prepared(self, gid: str, *, commit: bool) -> None:
        with _known():
            await self._plain(f"{'COMMIT' if commit else 'ROLLBACK'} PREPARED '{gid}'")


@contextmanager
def _known() -> Iterator[None]:
    try:
        yield
    except _ERRORS as error:
        raise driver_error(error) or DriverError(error) from error


@lru_cache(maxsize=256)
def _translated(statements: str) -> list[_Statement]:
    """Return statements with asyncpg's placeholders: `%s` are counted over all of
    them.
    """
    found, count = list[_Statement](), 0
    for text in filter(None, map(str.strip, statements.split(";"))):
        names: list[str | int] = []

        def number(place: re.Match[str], names: list[str | int] = names) -> str:
            nonlocal count
            name: str | int = place[1] or count
            count += name == count
            if name not in names:
                names.append(name)
            return f"${names.index(name) + 1}"

        found.append(_Statement(_PLACEHOLDER.sub(number, text), tuple(names)))
    return found


_CALLS: Final = ("execute", "executemany", "fetch", "fetchmany", "fetchrow", "fetchval")


class _WatchedStatement(asyncpg.prepared_stmt.PreparedStatement):  # type: ignore[misc]  # no types
    """A prepared statement about savepoints: SQLAlchemy keeps them for later use."""

    __slots__ = ()

    async def fetch(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401  # asyncpg's
        return await self._followed(super().fetch, args, options)

    async def fetchrow(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401  # likewise
        return await self._followed(super().fetchrow, args, options)

    async def fetchval(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401  # likewise
        return await self._followed(super().fetchval, args, options)

    async def _followed(
        self,
        call: Any,  # noqa: ANN401  # as above
        args: tuple[Any, ...],
        options: dict[str, Any],
    ) -> Any:  # noqa: ANN401  # likewise
        watch = watch_of(self._connection)
        found = None if watch is None else watch.require_allowed(self.get_query())
        result = await call(*args, **options)
        if watch is not None and found is not None:
            watch.follow(found)
        return result


def _watched_prepare(base: Any) -> Any:  # noqa: ANN401  # mypy takes no class for hashable
    async def prepare(self: Any, query: str, **options: Any) -> Any:  # noqa: ANN401  # asyncpg's
        watch = watch_of(self)
        if watch is not None:
            watch.require_allowed(query)
        statement = await base.prepare(self, query, **options)
        if control_in(query) is not None:
            statement.__class__ = _WatchedStatement
        return statement

    return prepare


def _watched_call(base: Any, name: str) -> Any:  # noqa: ANN401  # mypy takes no class for hashable
    call = getattr(base, name)

    async def method(self: Any, query: str, *args: Any, **options: Any) -> Any:  # noqa: ANN401  # asyncpg's
        watch = watch_of(self)
        if watch is None:
            return await call(self, query, *args, **options)
        found = watch.require_allowed(query)
        result = await call(self, query, *args, **options)
        if found is not None:
            watch.follow(found)
        return result

    return method


@lru_cache
def watched(base: Any) -> Any:  # noqa: ANN401  # mypy takes no class for hashable
    """Return the class of watched connections of a class of connections."""
    calls = {name: _watched_call(base, name) for name in _CALLS}
    calls["prepare"] = _watched_prepare(base)
    return type(f"Watched{base.__name__}", (base,), {"__slots__": (), **calls})


_WatchedConnection: Any = watched(asyncpg.Connection)


class EnlistConnection(_WatchedConnection):  # type: ignore[misc]  # made above
    """A connection of asyncpg whose outermost `transaction()` takes enlisted messages
    along.

    `asyncpg.connect(dsn, connection_class=EnlistConnection)`, and likewise for a pool.
    Without messages in the open transaction it is a connection like any other.
    """

    __slots__ = ("enlisted", "two_phase")

    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401  # asyncpg's
        super().__init__(*args, **options)
        self.enlisted: AsyncEnlisted | None = None
        self.two_phase = False  # PREPARE is refused

    async def execute(self, query: str, *args: Any, **options: Any) -> str:  # noqa: ANN401  # asyncpg's
        """Execute a statement; the COMMIT and ROLLBACK of `transaction()` with the
        messages.
        """
        enlisted = self.enlisted
        if enlisted is not None and self._top_xact is None:
            plain = asyncpg.Connection.execute
            if query == "COMMIT;":
                return str(await _taken_along(enlisted, lambda: plain(self, query)))
            if query == "ROLLBACK;":
                tag = str(await plain(self, query))
                self._let_go()
                return tag
        return str(await super().execute(query, *args, **options))

    async def close(self, **options: Any) -> None:  # noqa: ANN401  # asyncpg's
        await super().close(**options)
        self._let_go()

    def terminate(self) -> None:
        super().terminate()
        self._let_go()

    async def reset(self, **options: Any) -> None:  # noqa: ANN401  # asyncpg's
        await super().reset(**options)
        self._let_go()

    def _let_go(self) -> None:
        if self.enlisted is not None:
            self.enlisted.after_rollback()


async def _taken_along(
    enlisted: AsyncEnlisted, commit: Callable[[], Coroutine[Any, Any, str]]
) -> str:
    """Commit with the messages; return the command tag."""
    tag = ""

    async def committing() -> str:
        nonlocal tag
        tag = await commit()
        return tag

    await enlisted.commit_with(committing)
    return tag
