"""Arguments of control calls of transactions, jobs and check-backs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from txmq.wire.calls.arguments import Args, Limit, Name, Text, Token

MAX_TOKENS = 5_000  # of one call


class TxList(Args):
    """A list of transactions in one state."""

    state: Literal["undecided", "in-doubt", "waiting", "open", "conflicts"] = "undecided"
    limit: Limit = 100


class TxPending(Args):
    """A page of the undecided transactions that databases decide, by ticket."""

    after: Annotated[int, Field(ge=0, lt=2**63)] = 0
    limit: Limit = 1_000


class TxLease(Args):
    """The broker's lease of a database; 0 = of none."""

    system_id: Annotated[int, Field(ge=0, lt=2**64)] = 0
    database_oid: Annotated[int, Field(ge=0, lt=2**32)] = 0


class TokenArgs(Args):
    """One transaction or job."""

    token: Token


class TxShow(TokenArgs):
    """One transaction.

    `detail` adds its neighbours, contradictions, and a page of its messages, with
    bodies on request.
    """

    detail: bool = False
    after: Annotated[int, Field(ge=0)] = 0  # number of messages on earlier pages
    limit: Limit = 100
    bodies: bool = False


class TxStates(Args):
    """Many transactions, of which only states and deciders are asked for."""

    tokens: Annotated[tuple[Token, ...], Field(max_length=MAX_TOKENS)]


class TxCommitted(Args):
    """A page of the transactions that a database has committed, by token."""

    system_id: Annotated[int, Field(ge=0, lt=2**64)]
    database_oid: Annotated[int, Field(ge=0, lt=2**32)]
    after: Token | None = None
    limit: Limit = 1_000


class TxDecide(TokenArgs):
    """An operator's decision. With `force`, also where the database that decides cannot
    be asked.
    """

    outcome: Literal["COMMIT", "ROLLBACK"]
    operator: Name
    reason: Annotated[str, StringConstraints(min_length=1, max_length=4_096)]
    force: bool = False


class TxCheck(Args):
    """A check-back now, of one transaction or (null) of all undecided ones."""

    token: Token | None = None


class JobDecide(TokenArgs):
    """The decision of a job; a commit names the winning bundles."""

    outcome: Literal["COMMIT", "ROLLBACK"]
    winners: Annotated[tuple[Token, ...], Field(max_length=100_000)] = ()


class ChecksWait(Args):
    """A long poll for check-backs by a process with these checkers.

    `own`: and for those of the process's own transactions, whatever their checker.
    Without it no checkers mean all.
    """

    service: Name
    checkers: Annotated[tuple[Name, ...], Field(max_length=1_000)] = ()
    max: Limit = 16
    wait_ms: Annotated[int, Field(ge=0, le=60_000)] = 20_000
    own: bool = False


class ChecksAnswer(TokenArgs):
    """A checker's answer."""

    answer: Literal["COMMIT", "ROLLBACK", "UNKNOWN"]
    reason: Text = ""  # why the answer is UNKNOWN
    open: bool = False  # the local work goes on in the answering process, the origin
    passed: bool = False  # it is over there, and others are to be asked; no answer
