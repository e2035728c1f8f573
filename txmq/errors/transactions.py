"""Errors of transactions, and what is not known of their outcome."""

from __future__ import annotations

from txmq.errors.base import TxmqError
from txmq.errors.refusals import RequestRejected


class TransactionError(TxmqError):
    """A transaction cannot do what was asked."""


class UnknownTransaction(RequestRejected, TransactionError):
    """The broker knows no such transaction: never stored here, or older than the
    outcomes it keeps.
    """


class AlreadyResolved(TransactionError):
    """The transaction has been decided; `decision` tells how."""

    def __init__(self, message: str, *, decision: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.decision = decision


class TransactionAborted(TransactionError):
    """The transaction was rolled back, or could not be committed: none of its rows and
    messages exist.
    """

    advice = "nothing of it exists: run all of it again"


class TokenFenced(TransactionError):
    """A resolver decided ROLLBACK for the token before its row was written; the
    transaction must be rolled back.
    """


class InDoubt(TransactionError):
    """It is not known whether the transaction committed; `token` names it. The resolver
    finds out.
    """

    outcome = "unknown"

    def __init__(self, message: str, *, token: str, hint: str = "") -> None:
        super().__init__(message, hint=hint or f"what became of it: txmq tx show {token}")
        self.token = token


class HeuristicMixed(TransactionError):
    """Somebody ended branches of the transaction by hand, and otherwise than it was
    decided: its rows disagree.

    `token` names it, `decision` ("COMMIT" or "ROLLBACK") holds for all but `branches`,
    their gids.
    """

    outcome = "unknown"

    def __init__(
        self, message: str, *, token: str, decision: str, branches: tuple[str, ...], hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.token, self.decision, self.branches = token, decision, branches
