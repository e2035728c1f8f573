"""What a resource tells the transaction manager that leads it
(`txmq.client.blocking.transaction.resource`), by XA's names.

    XaError
    ├─ XaUnknown XAER_NOTA, XaDuplicate XAER_DUPID, XaProtocol XAER_PROTO, XaInvalid XAER_INVAL
    ├─ XaUnavailable XAER_RMFAIL
    ├─ XaRolledBack XA_RBROLLBACK
    │  ├─ XaTimedOut XA_RBTIMEOUT, XaRefused XA_RBOTHER
    └─ XaHeuristic
       ├─ XaHeuristicCommit XA_HEURCOM, XaHeuristicRollback XA_HEURRB

There is no XA_HEURMIX: a broker decides its branch whole. Nor is there XAER_RMERR,
which says that nothing was done: where that is not certain, it is XAER_RMFAIL.
"""

from __future__ import annotations

from typing import ClassVar

from txmq.errors import TransactionError


class XaError(TransactionError):
    """The branch cannot do what its manager asked; `code` is XA's name for why, and the
    text begins with it.
    """

    code: ClassVar[str]

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{self.code}: {message}", hint=hint)


class XaUnknown(XaError):
    """The broker has no branch of this Xid: never prepared, finished and forgotten, or
    rolled back before.
    """

    advice = "nothing is left to do for it here; `txmq xa list` tells what is not finished"
    code = "XAER_NOTA"


class XaDuplicate(XaError):
    """The Xid is that of another branch."""

    advice = "give each branch an Xid of its own"
    code = "XAER_DUPID"


class XaProtocol(XaError):
    """The branch is not in a state for this call, or was decided otherwise by its own
    manager.
    """

    advice = "the order is start, end, prepare, then commit or rollback"
    code = "XAER_PROTO"


class XaInvalid(XaError):
    """An argument of the call is none of its."""

    code = "XAER_INVAL"


class XaUnavailable(XaError):
    """The broker did not answer: it may have done what was asked. Ask again, or
    recover.
    """

    advice = "ask again, or recover"
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
    """The broker refuses the contents of the branch; the cause of this error tells
    why.
    """

    code = "XA_RBOTHER"


class XaHeuristic(XaError):
    """An operator had decided the branch otherwise; `forget` it once that is dealt
    with.
    """

    advice = "deal with what was decided by hand, then forget it"


class XaHeuristicCommit(XaHeuristic):
    """It was committed by hand, and is to be rolled back."""

    code = "XA_HEURCOM"


class XaHeuristicRollback(XaHeuristic):
    """It was rolled back by hand, and is to be committed."""

    code = "XA_HEURRB"
