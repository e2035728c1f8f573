"""Statements that a block's caller executes: its savepoints are followed, and SQL that
ends its transaction is refused.

Frameworks make savepoints by SQL: `begin_nested()` of SQLAlchemy, an inner `atomic()`
of Django. What was sent behind a savepoint is withdrawn with the rows. Nothing that
could be asked in the end tells of a savepoint that was rolled back to, so the
statements are read as they pass: each driver asks the watch before it sends one.

Only the first statement of a string is read. Cursors that were opened before the block
are not seen; the token's INSERT finds out if one of them has ended the transaction.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary, ref

from txmq.errors import LocalProtocolError, TransactionEnded
from txmq.tx.postgres.driver import Driver, Status

ADVICE: Final = (
    "the end of the block commits; to roll back raise an error or call "
    "tx.set_rollback_only(), for a part use tx.savepoint(), and give other work "
    "a connection of its own"
)
_SPACE: Final = r"(?:\s|--[^\n]*\n|/\*.*?\*/)*"
_CONTROL: Final = re.compile(
    rf"{_SPACE}(?P<verb>savepoint|release|(?:rollback|abort)(?!\s+prepared)|commit(?!\s+prepared)"
    r"|end|prepare\s+transaction)\b(?:\s+(?:work|transaction)\b)?"
    r"(?P<to>\s+to\b)?(?:\s+savepoint\b)?(?:\s+(?P<name>\"(?:[^\"]|\"\")+\"|[^\s;]+))?",
    re.IGNORECASE | re.DOTALL,
)
_MAY_CONTROL: Final = frozenset("sSrRaAcCeEpP-/" + string.whitespace)  # as its first character
SHOWN: Final = 60  # characters of a refused statement
_open: WeakKeyDictionary[Any, ref[StatementWatch]] = WeakKeyDictionary()


class Sends(NamedTuple):
    """The sends of a transaction: the present position, and a return to an earlier
    one.
    """

    mark: Callable[[], Any]
    withdraw: Callable[[Any], None]


NO_SENDS: Final = Sends(lambda: None, lambda _mark: None)


class _Savepoint(NamedTuple):
    """A savepoint, and the position of the sends at it."""

    name: str
    mark: object


def transaction_ended(name: object) -> TransactionEnded:
    """Return the error of a transaction that the caller has ended."""
    return TransactionEnded(
        f"Transaction {name} was ended inside its block: rows may have been committed or "
        "rolled back by then, and its messages are not sent",
        hint=ADVICE,
    )


class StatementWatch:
    """The caller's statements on a connection while the block of a transaction is
    open.
    """

    def __init__(self, driver: Driver, name: object, sends: Sends) -> None:
        """`name` is the transaction's, for errors."""
        self.driver, self.name, self._sends = driver, name, sends
        self._savepoints: list[_Savepoint] = []
        self._ending = False
        self.registered = False

    def start(self) -> None:
        """Watch the statements from now on."""
        _open[self.driver.connection] = ref(self)
        self.registered = True
        self.driver.watch(self)

    def end(self) -> None:
        """Refuse statements of the caller: the block is ending."""
        if not self._ending:
            self.driver.unwatch()
        self._ending = True

    def release(self) -> None:
        """Let the connection alone."""
        self.end()
        if self.registered:
            del _open[self.driver.connection]
            self.registered = False
        self._sends = NO_SENDS  # they refer to the transaction, which refers to this

    def busy(self) -> LocalProtocolError:
        """Return the refusal of another block on the connection."""
        return LocalProtocolError(
            f"The connection serves transaction {self.name}, whose block is open",
            hint="use tx.savepoint() for a part of that transaction, and a connection of its own "
            "for another transaction or thread",
        )

    def require_allowed(self, statement: str) -> re.Match[str] | None:
        """Return the match of a statement about savepoints.

        Raises LocalProtocolError for one that would end the transaction, and for all
        while the block ends; TransactionEnded behind the end of the transaction.
        """
        if self._ending:
            raise LocalProtocolError(
                f"The block of transaction {self.name} is ending: another thread uses its "
                "connection",
                hint="use a connection of its own for each thread",
            )
        if self.driver.status is Status.IDLE:
            raise transaction_ended(self.name)
        if statement[:1] not in _MAY_CONTROL or (found := _CONTROL.match(statement)) is None:
            return None
        if found["verb"].lower() in ("savepoint", "release"):
            return found
        if found["to"] is None:
            raise self._refusal(statement, ADVICE)
        self._require_known(found, statement)
        return found

    def _refusal(self, statement: str, hint: str) -> LocalProtocolError:
        return LocalProtocolError(
            f"{statement.strip()[:SHOWN]!r} would end transaction {self.name}, whose block is open",
            hint=hint,
        )

    def _require_known(self, found: re.Match[str], statement: str) -> None:
        if self._index(savepoint_name(found)) is None:
            raise LocalProtocolError(
                f"{statement.strip()[:SHOWN]!r}: the block of transaction {self.name} "
                "knows no such savepoint",
                hint="use tx.savepoint(), or a cursor that was opened in the block",
            )

    def follow(self, done: re.Match[str]) -> None:
        """Do to the sends what a statement has done to the rows."""
        name = savepoint_name(done)
        if done["verb"].lower() == "savepoint":
            self._savepoints.append(_Savepoint(name, self._sends.mark()))
            return
        at = self._index(name)
        if at is None:  # released, and set by a cursor that is not watched
            return
        if done["to"] is None:
            del self._savepoints[at:]
        else:
            self._sends.withdraw(self._savepoints[at].mark)
            del self._savepoints[at + 1 :]

    def _index(self, name: str) -> int | None:
        names = [savepoint.name for savepoint in self._savepoints]
        return len(names) - 1 - names[::-1].index(name) if name in names else None


def watch_of(connection: object) -> StatementWatch | None:
    """Return the watch over a connection of a driver."""
    found = _open.get(connection)
    return None if found is None else found()


def control_in(statement: str) -> re.Match[str] | None:
    """Return the match of a statement about savepoints or the transaction's end."""
    return _CONTROL.match(statement) if statement[:1] in _MAY_CONTROL else None


def savepoint_name(found: re.Match[str]) -> str:
    """Return the name of the savepoint that a statement is about."""
    name = found["name"] or ""
    return name[1:-1].replace('""', '"') if name.startswith('"') else name.lower()
