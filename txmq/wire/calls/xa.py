"""Arguments of control calls of XA and producer instances (docs/FORMATS.md 2.3)."""

from __future__ import annotations

from base64 import b64decode
from binascii import Error
from typing import Annotated, Literal
from uuid import UUID

from pydantic import AfterValidator, Field, StringConstraints

from txmq.wire.calls.arguments import Args, Limit, Name, Reason, Token
from txmq.wire.decider import GID, U31, XA_PART


def _xa_part(text: str) -> str:
    try:
        if XA_PART(b64decode(text, validate=True)):
            return text
    except (Error, ValueError):
        pass
    raise ValueError("a gtrid or bqual must be base64 of at most 64 bytes")


XidPart = Annotated[str, StringConstraints(max_length=88), AfterValidator(_xa_part)]
PrintableText = Annotated[str, StringConstraints(pattern=r"^[ -~]{1,127}$")]


class ProducerRegister(Args):
    """Register this process as the current one of a producer instance."""

    service: Name
    instance: Name


class XaList(Args):
    """A page of undecided branches and heuristics, or of the latter alone."""

    kind: Literal["home", "foreign"] | None = None
    owner: Name | None = None
    heuristic: bool = False
    after: Token | None = None
    limit: Limit = 100


class XaDecided(Args):
    """A page of this broker's committed transactions; `limit` of those examined."""

    after: Token | None = None
    limit: Limit = 1_000


class XaCommitted(Args):
    """Commits of this broker as home broker, after number `after` of `boot_epoch`."""

    boot_epoch: Annotated[int, Field(ge=0)] = 0
    after: Annotated[int, Field(ge=0)] = 0
    limit: Limit = 1_000


class XaFind(Args):
    """A foreign Xid."""

    format: Annotated[int, Field(ge=0, le=U31)]
    gtrid: XidPart
    bqual: XidPart


class XaOutcome(Args):
    """The home broker's decision; `decide` makes it decide an undecided transaction."""

    token: Token
    log_id: UUID
    decide: bool = False
    by: PrintableText


class XaHeuristicArgs(Args):
    """A branch found in another state than decided; `branch` is its gid."""

    token: Token
    branch: Annotated[str, StringConstraints(pattern=rf"^[ -~]{{1,{GID}}}$")]
    decided: Literal["COMMIT", "ROLLBACK"]
    found: PrintableText
    operator: Name
    reason: Reason


class XaForget(Args):
    """Clear a heuristic that an operator has resolved."""

    token: Token
    operator: Name
    reason: Reason
