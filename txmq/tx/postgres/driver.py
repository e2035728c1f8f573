"""The connection of a service, whatever its driver: the protocol behind all rules.

The rules of transactions, branches and the inbox are written once, as coroutines, and
know no driver. A driver that blocks does its work inside of its `async` methods and
never suspends, so that `txmq.faces.run` has a rule's result at once. With a driver of
asyncio the rules are awaited like any coroutine.

Statements have psycopg2's placeholders, `%s` or `%(name)s`, which a driver translates.
Their parameters have explicit types in SQL, because some drivers bind on the server.
What they bind and return does not go by what the caller has registered on his
connection: codecs, loaders, adapters, classes of rows. Arrays are bound as texts, and
none is returned: asyncpg takes the caller's codecs for their elements.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import Any, Final, Protocol, TypeAlias

Values: TypeAlias = Sequence[Any] | dict[str, Any]
Rows: TypeAlias = list[tuple[Any, ...]]


class Status(IntEnum):
    """The state of the session's transaction, as the server last told it."""

    IDLE = 0
    ACTIVE = 1  # a statement runs
    OPEN = 2
    FAILED = 3  # asyncpg does not tell this from OPEN
    UNKNOWN = 4  # the connection is lost


STATUSES: Final = tuple(Status)  # by libpq's numbers; an enumeration's own look-up is slow
BEGUN_AS: Final = "txmq"  # what drivers call a transaction of a block: none is prepared under it


def array(values: Iterable[object]) -> str:
    """Return the text of an array of numbers or UUIDs, to be bound as
    `%s::text::int8[]`.
    """
    return f"{{{','.join(map(str, values))}}}"


class TransactionGone(Exception):
    """The transaction that `Driver.begin` began is over; nothing was sent."""


class BlockingConnection(Protocol):
    """A connection that a blocking client takes: psycopg2's, or one of psycopg 3."""

    autocommit: bool

    @property
    def closed(self) -> int: ...
    def cursor(self) -> Any: ...  # noqa: ANN401  # of any driver
    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    def close(self) -> None: ...


class Watch(Protocol):
    """The rules for the statements of a caller whose block is open."""

    def require_allowed(self, statement: str) -> re.Match[str] | None:
        """Return the match of a statement about savepoints, before it is sent. Raises
        for one that is refused.
        """

    def follow(self, done: re.Match[str]) -> None:
        """Take note that such a statement has succeeded."""


class Enlisted(Protocol):
    """The messages in a connection's transaction, which somebody else commits."""

    def before_commit(self) -> None:
        """Store them, and write the token row."""

    def commit_with(self, commit: Any) -> None:  # noqa: ANN401  # its result does not matter
        """Take part in a COMMIT."""

    def after_commit(self) -> None:
        """Note that COMMIT is said to have succeeded."""

    def after_rollback(self) -> None:
        """Note that the transaction is said to be rolled back."""


class AsyncEnlisted(Protocol):
    """Likewise, on a connection of asyncio."""

    async def before_commit(self) -> None:
        """Store them, and write the token row."""

    async def commit_with(self, commit: Any) -> None:  # noqa: ANN401  # a coroutine function
        """Take part in a COMMIT."""

    def after_commit(self) -> None:
        """Note that COMMIT is said to have succeeded. It does not wait."""

    def after_rollback(self) -> None:
        """Note that the transaction is said to be rolled back. It does not wait."""


class Driver(Protocol):
    """A connection that a service lends for a transaction, or one of txmq's own.

    Every `async` method may raise DriverError.
    """

    @property
    def connection(self) -> Any:  # noqa: ANN401  # of any driver
        """The driver's own connection, which has a weak reference."""

    @property
    def awaits(self) -> bool:
        """True if it is one of asyncio; else it blocks."""

    @property
    def interruption(self) -> BaseException | None:
        """A cancellation that came while COMMIT or PREPARE was out, and is to be raised
        when the rules are done with its outcome.
        """

    @property
    def status(self) -> Status:
        """The state of the transaction."""

    @property
    def tells_failed(self) -> bool:
        """True if `status` tells a failed transaction from an open one."""

    @property
    def closed(self) -> bool:
        """True if the connection is closed, by its owner or by a failure."""

    @property
    def autocommit(self) -> bool:
        """True if a statement outside of a transaction commits by itself."""

    @property
    def database(self) -> str:
        """The name of the database."""

    @property
    def begun(self) -> bool:
        """True if the transaction is that of `begin`, until `restore`."""

    @property
    def holds_begun(self) -> bool:
        """True if the driver itself takes the transaction of `begin` for open."""

    @property
    def is_ready(self) -> bool:
        """True if the driver itself takes no transaction for open."""

    @property
    def enlists(self) -> bool:
        """True if the connection's own COMMIT takes messages along: it is one of txmq's
        classes, with the attributes `enlisted` and `two_phase`.
        """

    def require_usable(self) -> None:
        """Require a connection in a mode that suits. Raises LocalProtocolError."""

    def require_joinable(self) -> None:
        """Require that a block may end the transaction that is open.

        Raises LocalProtocolError where something of the driver's own will end it.
        """

    def noted(self) -> AbstractContextManager[list[str]]:
        """Collect the server's notices of a block; the connection gets them as well."""

    def watch(self, watch: Watch) -> None:
        """Ask `watch` about each statement that the caller executes from now on."""

    def unwatch(self) -> None:
        """Let the caller's statements alone."""

    async def execute(self, statements: str, values: Values = ()) -> Rows:
        """Execute statements, and return the rows of the last one.

        They go out in one round trip where the driver can do that. Outside of a
        transaction they are one. Their texts have no semicolons in literals.
        """

    async def begin(self) -> bool | None:
        """Begin a transaction that the caller's own calls cannot end.

        Return whether it is DEFERRABLE, as a mark; None = the driver cannot begin one
        here, and nothing was sent.
        """

    async def hold(self) -> None:
        """Have the caller's own calls end no transaction unseen, for as long as the
        connection lives: txmq alone begins and ends them, by statements.
        """

    async def commit(self, before: str = "") -> str:
        """Send COMMIT, and return the command tag of its answer. The statements
        `before` go with it in one round trip; they fail in another transaction.

        Where the driver hides the tag it is "COMMIT": then the status was known before.
        Raises TransactionGone.
        """

    async def roll_back(self) -> None:
        """Leave server and driver without an open transaction."""

    async def roll_back_begun(self) -> bool:
        """Roll back the transaction of `begin`; False = the driver has another one
        open.
        """

    async def restore(self) -> None:
        """Give back the connection's settings that `begin` has changed."""

    async def prepare(self, gid: str) -> bool:
        """Prepare the open transaction; return whether the server has prepared it."""

    async def finish_prepared(self, gid: str, *, commit: bool) -> None:
        """Commit or roll back a prepared transaction."""
