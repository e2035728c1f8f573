"""Errors that a resource raises towards its transaction manager
(`txmq.client.blocking.transaction.xa_resource`), by XA's names.

    XaError
    ├─ XaUnknown XAER_NOTA, XaDuplicate XAER_DUPID
    ├─ XaProtocol XAER_PROTO, XaInvalid XAER_INVAL
    ├─ XaUnavailable XAER_RMFAIL
    ├─ XaRolledBack XA_RBROLLBACK
    │  ├─ XaTimedOut XA_RBTIMEOUT, XaRefused XA_RBOTHER
    └─ XaHeuristic
       ├─ XaHeuristicCommit XA_HEURCOM, XaHeuristicRollback XA_HEURRB

There is no XA_HEURMIX: a broker decides its branch whole. Nor is there XAER_RMERR,
which promises that nothing was done: where that is not certain, it is XAER_RMFAIL.
"""

from __future__ import annotations

from typing import ClassVar

from txmq.errors import TransactionError


class XaError(TransactionError):
    """The branch cannot carry out the call; `code` is XA's name for the reason."""

    code: ClassVar[str]

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{self.code}: {message}", hint=hint)


class XaUnknown(XaError):
    """The broker has no such branch: never prepared, forgotten or rolled back."""

    advice = "nothing is left to do for it here; `txmq xa list` tells what is not finished"
    code = "XAER_NOTA"


class XaDuplicate(XaError):
    """The Xid belongs to another branch."""

    advice = "give each branch an Xid of its own"
    code = "XAER_DUPID"


class XaProtocol(XaError):
    """The branch's state or its manager's decision does not allow this call."""

    advice = "the order is start, end, prepare, then commit or rollback"
    code = "XAER_PROTO"


class XaInvalid(XaError):
    """An argument of the call is invalid."""

    code = "XAER_INVAL"


class XaUnavailable(XaError):
    """The broker did not answer; it may have carried out the call."""

    advice = "repeat the call, or recover"
    code = "XAER_RMFAIL"
    retriable = True
    outcome = "unknown"


class XaRolledBack(XaError):
    """The branch was rolled back and is forgotten."""

    advice = "nothing of it is left: roll back the whole transaction"
    code = "XA_RBROLLBACK"


class XaTimedOut(XaRolledBack):
    """The branch took longer than its manager allowed, before it was prepared."""

    code = "XA_RBTIMEOUT"


class XaRefused(XaRolledBack):
    """The broker refuses the contents of the branch; see the cause of this error."""

    code = "XA_RBOTHER"


class XaHeuristic(XaError):
    """An operator had decided the branch the other way."""

    advice = "repair what the operator's decision did, then forget the branch"


class XaHeuristicCommit(XaHeuristic):
    """The branch was committed by hand; its manager rolls back."""

    code = "XA_HEURCOM"


class XaHeuristicRollback(XaHeuristic):
    """The branch was rolled back by hand; its manager commits."""

    code = "XA_HEURRB"
