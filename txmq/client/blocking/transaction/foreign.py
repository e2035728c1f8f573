"""A branch whose decision is another's: what a process holds of it, and what the broker
is told.
"""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any
from uuid import UUID

from txmq.client.blocking.core import Core
from txmq.client.blocking.transaction.broker_part import Share
from txmq.client.blocking.transaction.bundles import PART_BYTES
from txmq.client.blocking.transaction.decisions import by, decide
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import (
    Conflict,
    DigestMismatch,
    DuplicateXid,
    HeuristicOutcome,
    RequestRejected,
    TxmqError,
    UnknownTransaction,
)
from txmq.errors.xa import (
    XaDuplicate,
    XaError,
    XaHeuristicCommit,
    XaHeuristicRollback,
    XaProtocol,
    XaRefused,
    XaRolledBack,
    XaTimedOut,
    XaUnavailable,
    XaUnknown,
)
from txmq.model.bundle import GroupState
from txmq.model.message import COMMIT, ROLLBACK, Decision
from txmq.tx.xid import Xid
from txmq.wire.group import Description, Part

LOOKED_AFTER_US = (
    60_000_000  # the broker begins to count how long it has been prepared, towards the alarm
)
FINISH = "its manager finishes it by recovery, or an operator: txmq xa list"


class Standing(Enum):
    """Where a branch is in its life."""

    ACTIVE = "is being worked on"
    SUSPENDED = "is suspended"
    ENDED = "is ended, and not prepared"
    IN_DOUBT = "may be prepared, or committed in one phase: the broker did not answer"
    PREPARED = "is prepared"


class ForeignShare(Share):
    """A group that a foreign manager decides; in one phase it is decided as it is
    stored, if it has one part.
    """

    at_once = False

    def _parts(self, most: int = PART_BYTES) -> list[Part]:
        parts = super()._parts(most)
        return [parts[0]._replace(commit=True)] if self.at_once and len(parts) == 1 else parts


class ForeignBranch:
    """One branch in this process. `owner` is the service that the broker lists it
    under.
    """

    def __init__(self, core: Core, xid: Xid, owner: str, timeout: float = 0.0) -> None:
        """`timeout`: seconds until it can only be rolled back, if it is not prepared by
        then; 0 = for ever.
        """
        self.xid = xid
        self.share = ForeignShare(core, new_token())
        self.standing = Standing.ACTIVE
        self.doomed: XaError | None = None  # why it can only be rolled back
        self._core, self._owner = core, owner
        self._deadline = time.monotonic() + timeout if timeout else None

    def look(self) -> None:
        """Raises why the branch can only be rolled back, if so."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.doomed = self.doomed or XaTimedOut(f"branch {self.xid.gid} took too long")
        if self.doomed is not None:
            raise self.doomed

    def store(self, *, at_once: bool = False) -> GroupState:
        """Makes it durable at the broker, for where it stands then. May be called again
        after XaUnavailable.

        Raises XaUnavailable; XaDuplicate or XaRolledBack, and then nothing is stored.
        """
        self.share.at_once, self.standing = at_once, Standing.IN_DOUBT
        try:
            with telling(self.xid):
                state = self._stored()
        except (XaDuplicate, XaRefused):
            with suppress(TxmqError):  # some parts may be there: they would never be complete
                decide(self._core, self.share.token, ROLLBACK)
            raise
        finally:
            self.share.give_up()
        if state is GroupState.ROLLED_BACK:
            raise XaRolledBack(
                f"branch {self.xid.gid} was rolled back", hint="txmq tx show tells by whom"
            )
        return state

    def _stored(self) -> GroupState:
        share = self.share
        described = Description(
            ("foreign", *self.xid), self._owner, tuple(share.buffer.actions), LOOKED_AFTER_US
        )
        try:
            share.prepare(described, time.monotonic() + self._core.settings.timeout)
            share.send()
            return GroupState(share.receipt().state)
        except DigestMismatch:  # an earlier attempt arrived, before one of its topics has grown
            return GroupState[find(self._core, self.xid)["state"]]
        except DuplicateXid as double:
            raise XaDuplicate(double.message, hint=double.hint) from double
        except RequestRejected as refused:
            if refused.outcome != "not done":
                raise
            raise XaRefused(
                f"branch {self.xid.gid}: {refused.message}", hint=refused.hint
            ) from refused

    def withdraw(self) -> None:
        """Rolls back what the broker may have, for good: what is still on its way will
        not be stored.
        """
        if not self.share.sent:
            return
        try:
            finish(self._core, self.xid, self.share.token, ROLLBACK)
        except XaUnknown:
            with telling(self.xid):
                told = {
                    "token": self.share.token.hex,
                    "log_id": str(self._core.log_id),
                    "by": by(self._core),
                }
                self._core.call("xa.outcome", {**told, "decide": True}, repeat=True)

    def over(self, *, committed: bool) -> None:
        """What it acked is done with, in hand again, or, where the broker had it
        reserved, delivered again.
        """
        self.share.over(committed=committed)


def finish(core: Core, xid: Xid, token: UUID, outcome: Decision) -> None:
    """Decides a prepared branch. Raises XaUnknown, XaUnavailable, XaHeuristic,
    XaProtocol.
    """
    name = f"branch {xid.gid}"
    with telling(xid):
        try:
            decide(core, token, outcome)
        except HeuristicOutcome as hand:
            kind = XaHeuristicRollback if outcome is COMMIT else XaHeuristicCommit
            raise kind(hand.message, hint="when it is dealt with: forget it") from hand
        except Conflict as conflict:
            raise XaProtocol(f"{name}: {conflict.message}") from conflict
        except UnknownTransaction as unknown:
            raise XaUnknown(f"{name}: {unknown.message}") from unknown


def token_of(core: Core, xid: Xid) -> UUID:
    """The token of a branch that the broker has. Raises XaUnknown, XaUnavailable."""
    return UUID(find(core, xid)["token"])


def find(core: Core, xid: Xid) -> dict[str, Any]:
    """What the broker has of a branch: its token and state. Raises XaUnknown,
    XaUnavailable.
    """
    named = {
        "format": xid.format,
        "gtrid": b64encode(xid.gtrid).decode(),
        "bqual": b64encode(xid.bqual).decode(),
    }
    with telling(xid):
        try:
            return core.call("xa.find", named, repeat=True)
        except UnknownTransaction as unknown:
            raise XaUnknown(f"the broker has no branch {xid.gid}") from unknown


@contextmanager
def telling(xid: Xid | None) -> Iterator[None]:
    """Whatever has no meaning of its own in XA: the broker could not do it now, or may
    have done it; ask again.
    """
    try:
        yield
    except XaError:
        raise
    except TxmqError as error:
        name = "the list of branches" if xid is None else f"branch {xid.gid}"
        raise XaUnavailable(f"{name}: {error.message}", hint=FINISH) from error
