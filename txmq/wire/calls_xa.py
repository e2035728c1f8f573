"""Arguments of the control calls of XA, and of producer instances (docs/FORMATS.md
2.3).
"""

from __future__ import annotations

from base64 import b64decode
from binascii import Error
from typing import Annotated, Literal
from uuid import UUID

from pydantic import AfterValidator, Field, StringConstraints

from txmq.wire.args import Args, Limit, Name, Reason, Token
from txmq.wire.decider import GID, U31, XA_PART


def _xa_part(text: str) -> str:
    try:
        if XA_PART(b64decode(text, validate=True)):
            return text
    except (Error, ValueError):
        pass
    raise ValueError("a gtrid or bqual is at most 64 bytes, in base64")


XidPart = Annotated[str, StringConstraints(max_length=88), AfterValidator(_xa_part)]
Words = Annotated[str, StringConstraints(pattern=r"^[ -~]{1,127}$")]


class ProducerRegister(Args):
    """This process is an instance's from now on."""

    service: Name
    instance: Name


class XaList(Args):
    """Which branches to list: undecided ones and those with heuristics, or the latter
    alone.
    """

    kind: Literal["home", "foreign"] | None = None
    owner: Name | None = None
    heuristic: bool = False
    after: Token | None = None
    limit: Limit = 100


class XaDecided(Args):
    """Which committed transactions of this broker's own to list: `limit` is how many of
    any kind are looked at.
    """

    after: Token | None = None
    limit: Limit = 1_000


class XaCommitted(Args):
    """What this broker has committed as the home of it, after number `after` of that
    start of the broker.
    """

    boot_epoch: Annotated[int, Field(ge=0)] = 0
    after: Annotated[int, Field(ge=0)] = 0
    limit: Limit = 1_000


class XaFind(Args):
    """A foreign Xid."""

    format: Annotated[int, Field(ge=0, le=U31)]
    gtrid: XidPart
    bqual: XidPart


class XaOutcome(Args):
    """How the home broker decided; `decide` makes it decide what it has not."""

    token: Token
    log_id: UUID
    decide: bool = False
    by: Words


class XaHeuristic(Args):
    """A branch that was found otherwise than decided; `branch` is its gid."""

    token: Token
    branch: Annotated[str, StringConstraints(pattern=rf"^[ -~]{{1,{GID}}}$")]
    decided: Literal["COMMIT", "ROLLBACK"]
    found: Words
    operator: Name
    reason: Reason


class XaForget(Args):
    """What was decided by hand, or was found mixed, has been dealt with."""

    token: Token
    operator: Name
    reason: Reason
