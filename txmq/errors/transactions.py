"""Errors of transactions, with the state of knowledge about their outcome."""

from __future__ import annotations

from txmq.errors.base import TxmqError
from txmq.errors.refusals import RequestRejected


class TransactionError(TxmqError):
    """A transaction cannot carry out a call."""


class UnknownTransaction(RequestRejected, TransactionError):
    """The broker has no such transaction: never stored, or older than kept outcomes."""


class AlreadyResolved(TransactionError):
    """The transaction has been decided, as `decision` says."""

    def __init__(self, message: str, *, decision: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.decision = decision


class TransactionAborted(TransactionError):
    """The transaction was rolled back: none of its rows and messages exist."""

    advice = "nothing of it exists: run the whole transaction again"


class TransactionEnded(TransactionError):
    """The caller ended the transaction inside its block, by `commit()` or SQL, say, or
    a handler that of its message.

    Messages of the block are not sent; that of the handler has failed. Rows from before
    or behind that end may exist.
    """

    outcome = "unknown"


class TokenFenced(TransactionError):
    """A resolver decided ROLLBACK for the token before its row was written.

    The transaction must be rolled back.
    """


class InDoubt(TransactionError):
    """The outcome of the transaction `token` is unknown; the resolver finds it out."""

    outcome = "unknown"

    def __init__(self, message: str, *, token: str, hint: str = "") -> None:
        super().__init__(message, hint=hint or f"see its outcome with: txmq tx show {token}")
        self.token = token


class HeuristicMixed(TransactionError):
    """Branches of the transaction were ended by hand against its decision.

    The rows of its databases disagree. `decision` ("COMMIT" or "ROLLBACK") holds for
    all branches of `token` but `branches`, given by their gids.
    """

    outcome = "unknown"

    def __init__(
        self, message: str, *, token: str, decision: str, branches: tuple[str, ...], hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.token, self.decision, self.branches = token, decision, branches
