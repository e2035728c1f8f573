"""A branch of another transaction manager: its work and its requests."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any
from uuid import UUID

from txmq.client.blocking.core import BlockingCore
from txmq.client.blocking.transaction.broker_bundle import BrokerBundle
from txmq.client.blocking.transaction.decisions import decide
from txmq.client.protocol.transaction.decision import decided_by
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
from txmq.model.bundle import BundleState
from txmq.model.decider import ByForeign
from txmq.model.message import COMMIT, ROLLBACK, Decision
from txmq.model.units import MINUTE
from txmq.tx.xid import Xid
from txmq.wire.bundle import BundleDescription, BundlePart

CHECK_AFTER_US = MINUTE  # from then on the broker counts the time towards an alarm
FINISH_HINT = "its manager finishes it by recovery, or an operator does: see `txmq xa list`"


class BranchState(Enum):
    """The state of a branch in this process, in the words of an error."""

    ACTIVE = "is being worked on"
    SUSPENDED = "is suspended"
    ENDED = "is ended, and not prepared"
    IN_DOUBT = "may be prepared, or committed in one phase: the broker did not answer"
    PREPARED = "is prepared"


class ForeignBundle(BrokerBundle):
    """A bundle that another transaction manager decides.

    In one phase its seal decides it, if it has one part (`at_once`).
    """

    at_once = False

    def _parts(self, stored: Sequence[BundlePart] = ()) -> list[BundlePart]:
        parts = super()._parts(stored)
        return [parts[0]._replace(commit=True)] if self.at_once and len(parts) == 1 else parts


class ForeignBranch:
    """One branch in this process; the broker lists it under its `owner`."""

    def __init__(self, core: BlockingCore, xid: Xid, owner: str, timeout: float = 0.0) -> None:
        """`timeout`: seconds until an unprepared branch has to roll back; 0 = never."""
        self.xid = xid
        self.bundle = ForeignBundle(core, new_token())
        self.state = BranchState.ACTIVE
        self.rollback_reason: XaError | None = None  # the error of a branch that can only roll back
        self._core, self._owner = core, owner
        self._deadline = time.monotonic() + timeout if timeout else None

    def require_committable(self) -> None:
        """Raise the reason if the branch can only be rolled back."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.rollback_reason = self.rollback_reason or XaTimedOut(
                f"Branch {self.xid.gid} took too long"
            )
        if self.rollback_reason is not None:
            raise self.rollback_reason

    def store(self, *, at_once: bool = False) -> BundleState:
        """Make the branch durable at the broker, and return its state there.

        Raises XaUnavailable, after which it may be called again. Raises XaDuplicate or
        XaRolledBack, after which nothing is stored.
        """
        self.bundle.at_once, self.state = at_once, BranchState.IN_DOUBT
        try:
            with xa_errors(self.xid):
                state = self._upload()
        except (XaDuplicate, XaRefused):
            with suppress(TxmqError):  # drop the parts that have arrived
                decide(self._core, self.bundle.token, ROLLBACK)
            raise
        finally:
            self.bundle.abandon()
        if state is BundleState.ROLLED_BACK:
            raise XaRolledBack(
                f"Branch {self.xid.gid} was rolled back",
                hint="`txmq tx show` tells who rolled it back",
            )
        return state

    def _upload(self) -> BundleState:
        bundle = self.bundle
        description = BundleDescription(
            ByForeign(*self.xid), self._owner, tuple(bundle.buffer.actions), CHECK_AFTER_US
        )
        try:
            deadline = time.monotonic() + self._core.settings.timeout
            return BundleState(bundle.store(description, deadline).state)
        except DigestMismatch:  # an earlier attempt arrived, when a topic had fewer partitions
            return BundleState[find_branch(self._core, self.xid)["state"]]
        except DuplicateXid as double:
            raise XaDuplicate(double.message, hint=double.hint) from double
        except RequestRejected as refused:
            if refused.outcome != "not done":
                raise
            raise XaRefused(
                f"Branch {self.xid.gid}: {refused.message}", hint=refused.hint
            ) from refused

    def roll_back(self) -> None:
        """Roll back what the broker may have, and what is still on its way."""
        if not self.bundle.sent:
            return
        try:
            decide_branch(self._core, self.xid, self.bundle.token, ROLLBACK)
        except XaUnknown:
            with xa_errors(self.xid):
                args = {
                    "token": self.bundle.token.hex,
                    "log_id": str(self._core.log_id),
                    "by": decided_by(self._core.settings.service),
                    "decide": True,
                }
                self._core.call("xa.outcome", args, repeat=True)

    def finish(self, *, committed: bool) -> None:
        """Settle what the branch acks."""
        self.bundle.finish(committed=committed)


def decide_branch(core: BlockingCore, xid: Xid, token: UUID, outcome: Decision) -> None:
    """Decide a prepared branch.

    Raises XaUnknown, XaUnavailable, XaHeuristic or XaProtocol.
    """
    name = f"Branch {xid.gid}"
    with xa_errors(xid):
        try:
            decide(core, token, outcome)
        except HeuristicOutcome as heuristic:
            kind = XaHeuristicRollback if outcome is COMMIT else XaHeuristicCommit
            raise kind(
                heuristic.message, hint="call forget once the outcome is dealt with"
            ) from heuristic
        except Conflict as conflict:
            raise XaProtocol(f"{name}: {conflict.message}") from conflict
        except UnknownTransaction as unknown:
            raise XaUnknown(f"{name}: {unknown.message}") from unknown


def token_of(core: BlockingCore, xid: Xid) -> UUID:
    """Return the token of a branch at the broker. Raises XaUnknown, XaUnavailable."""
    return UUID(find_branch(core, xid)["token"])


def find_branch(core: BlockingCore, xid: Xid) -> dict[str, Any]:
    """Return the broker's row of a branch. Raises XaUnknown or XaUnavailable."""
    args = {
        "format": xid.format,
        "gtrid": b64encode(xid.gtrid).decode(),
        "bqual": b64encode(xid.bqual).decode(),
    }
    with xa_errors(xid):
        try:
            return core.call("xa.find", args, repeat=True)
        except UnknownTransaction as unknown:
            raise XaUnknown(f"The broker has no branch {xid.gid}") from unknown


@contextmanager
def xa_errors(xid: Xid | None) -> Iterator[None]:
    """Turn errors without a meaning in XA into XaUnavailable: the caller may retry."""
    try:
        yield
    except XaError:
        raise
    except TxmqError as error:
        name = "The list of branches" if xid is None else f"Branch {xid.gid}"
        raise XaUnavailable(f"{name}: {error.message}", hint=FINISH_HINT) from error
