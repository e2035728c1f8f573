"""The transaction of messages, on the connection that their handler is lent.

A handler can end that transaction by himself, with `commit()`, `with connection:` or
SQL. Claims and effects would then part: a half would be done once and the rest never,
or the rest at each attempt. Three things prevent it:

- Calls and statements that end it are refused, where driver or cursor are watched.
- The server refuses a COMMIT that txmq has not sent, whatever sends it
  (`txmq_claim_guard` in schema.sql).
- COMMIT goes out behind the release of a savepoint that was set with BEGIN. It fails in
  any other transaction.

Who swallows a refusal goes on with rows that he takes for gone, or for committed. So
the messages fail all the same.
"""

from __future__ import annotations

import re
from typing import Final

from txmq.errors import LocalProtocolError, TransactionEnded
from txmq.tx.postgres.driver import Driver, Status
from txmq.tx.postgres.statement_watch import NO_SENDS, SHOWN, StatementWatch, control_in

# Behind BEGIN, and in front of COMMIT, in whose query string the guard looks for it.
MARK: Final = "SAVEPOINT txmq_message; SET LOCAL txmq.claims = 'open'; "
PROOF: Final = "RELEASE SAVEPOINT txmq_message; "
ADVICE: Final = (
    "return from the handler to commit, and raise an error to roll back; a savepoint does for a "
    "part, and a connection of its own for other work"
)


class HandlerWatch(StatementWatch):
    """The handler's statements while the transaction of its messages is open."""

    def __init__(self, driver: Driver, name: str) -> None:
        """`name` is that of the messages, for errors."""
        super().__init__(driver, name, NO_SENDS)
        self._refused = ""  # the last statement that would have ended the transaction
        self._over = False  # the transaction was seen to be over

    def require_allowed(self, statement: str) -> re.Match[str] | None:
        """Return None: savepoints withdraw nothing.

        Raises LocalProtocolError for a statement that would end the transaction, and
        for all while it ends; TransactionEnded behind its end.
        """
        if self._ending:
            raise LocalProtocolError(
                f"The transaction of {self.name} is ending: another thread uses its connection",
                hint="use a connection of its own for each thread",
            )
        if self._is_over():
            raise self.ended()
        found = control_in(statement)
        if found is not None and found["to"] is None and found["verb"].lower() not in _SAVEPOINTS:
            self._refused = statement.strip()[:SHOWN]
            raise LocalProtocolError(
                f"{self._refused!r} would end the transaction of {self.name}", hint=ADVICE
            )
        return None

    def require_unrefused(self) -> None:
        """Require a handler that has not tried to end the transaction. Raises
        TransactionEnded.
        """
        if self._refused:
            raise self.ended()

    def require_intact(self) -> None:
        """Require likewise that the transaction is open."""
        if self._refused or self._is_over():
            raise self.ended()

    def ended(self) -> TransactionEnded:
        """Return the error of messages whose handler has ended their transaction."""
        if self._refused:
            return TransactionEnded(
                f"{self._refused!r} was refused in the transaction of {self.name}, and its handler "
                "went on",
                hint=ADVICE,
            )
        return TransactionEnded(
            f"The transaction of {self.name} was ended in its handler: what was done before is "
            "rolled back, and what was done behind it may be committed alone",
            hint=ADVICE,
        )

    def busy(self) -> LocalProtocolError:
        """Return the refusal of a block on the connection."""
        return LocalProtocolError(
            f"The connection serves {self.name}, whose handler runs: txmq commits it",
            hint="send with a connection of its own, or by txmq.emit(connection, …)",
        )

    def _is_over(self) -> bool:
        driver = self.driver
        self._over = self._over or driver.is_ready or driver.status is Status.IDLE
        return self._over


_SAVEPOINTS: Final = ("savepoint", "release")
