"""A branch of another transaction manager: its work and its requests, in all faces."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any, Protocol
from uuid import UUID

from txmq.client.protocol.awaited.core import AwaitedCore
from txmq.client.protocol.awaited.decisions import decide
from txmq.client.protocol.transaction.buffer import Buffer
from txmq.client.protocol.transaction.decision import decided_by
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
from txmq.model.bundle import BundleReceipt, BundleState
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


class ForeignBundle(Protocol):
    """A bundle that another transaction manager decides.

    In one phase its seal decides it, if it has one part (`at_once`).
    """

    token: UUID
    sent: bool
    at_once: bool
    buffer: Buffer

    def abandon(self) -> None: ...
    def finish(self, *, committed: bool | None) -> None: ...

    async def store_all(self, description: BundleDescription, deadline: float) -> BundleReceipt:
        """Build and send all parts, and wait until the broker has them durably."""


def sealed(parts: list[BundlePart], *, at_once: bool) -> list[BundlePart]:
    """Return the parts of a foreign bundle, of which the only one may decide it."""
    return [parts[0]._replace(commit=True)] if at_once and len(parts) == 1 else parts


class ForeignBranch:
    """One branch in this process; the broker lists it under its `owner`."""

    def __init__(
        self,
        broker: AwaitedCore,
        bundle: ForeignBundle,
        xid: Xid,
        owner: str,
        timeout: float = 0.0,
    ) -> None:
        """`timeout`: seconds until an unprepared branch has to roll back; 0 = never."""
        self.xid, self.bundle = xid, bundle
        self.state = BranchState.ACTIVE
        self.rollback_reason: XaError | None = None  # the error of a branch that can only roll back
        self._broker, self._owner = broker, owner
        self._deadline = broker.seconds() + timeout if timeout else None

    def require_committable(self) -> None:
        """Raise the reason if the branch can only be rolled back."""
        if self._deadline is not None and self._broker.seconds() > self._deadline:
            self.rollback_reason = self.rollback_reason or XaTimedOut(
                f"Branch {self.xid.gid} took too long"
            )
        if self.rollback_reason is not None:
            raise self.rollback_reason

    async def store(self, *, at_once: bool = False) -> BundleState:
        """Make the branch durable at the broker, and return its state there.

        Raises XaUnavailable, after which it may be called again. Raises XaDuplicate or
        XaRolledBack, after which nothing is stored.
        """
        self.bundle.at_once, self.state = at_once, BranchState.IN_DOUBT
        try:
            with xa_errors(self.xid):
                state = await self._upload()
        except (XaDuplicate, XaRefused):
            with suppress(TxmqError):  # drop the parts that have arrived
                await decide(self._broker, self.bundle.token, ROLLBACK)
            raise
        finally:
            self.bundle.abandon()
        if state is BundleState.ROLLED_BACK:
            raise XaRolledBack(
                f"Branch {self.xid.gid} was rolled back",
                hint="`txmq tx show` tells who rolled it back",
            )
        return state

    async def _upload(self) -> BundleState:
        bundle = self.bundle
        description = BundleDescription(
            ByForeign(*self.xid), self._owner, tuple(bundle.buffer.actions), CHECK_AFTER_US
        )
        try:
            deadline = self._broker.seconds() + self._broker.settings.timeout
            return BundleState((await bundle.store_all(description, deadline)).state)
        except DigestMismatch:  # an earlier attempt arrived, when a topic had fewer partitions
            return BundleState[(await find_branch(self._broker, self.xid))["state"]]
        except DuplicateXid as double:
            raise XaDuplicate(double.message, hint=double.hint) from double
        except RequestRejected as refused:
            if refused.outcome != "not done":
                raise
            raise XaRefused(
                f"Branch {self.xid.gid}: {refused.message}", hint=refused.hint
            ) from refused

    async def roll_back(self) -> None:
        """Roll back what the broker may have, and what is still on its way."""
        if not self.bundle.sent:
            return
        try:
            await decide_branch(self._broker, self.xid, self.bundle.token, ROLLBACK)
        except XaUnknown:
            with xa_errors(self.xid):
                args = {
                    "token": self.bundle.token.hex,
                    "log_id": str(await self._broker.log_id()),
                    "by": decided_by(self._broker.settings.service),
                    "decide": True,
                }
                await self._broker.call("xa.outcome", args, repeat=True)

    def finish(self, *, committed: bool) -> None:
        """Settle what the branch acks."""
        self.bundle.finish(committed=committed)


async def decide_branch(broker: AwaitedCore, xid: Xid, token: UUID, outcome: Decision) -> None:
    """Decide a prepared branch.

    Raises XaUnknown, XaUnavailable, XaHeuristic or XaProtocol.
    """
    name = f"Branch {xid.gid}"
    with xa_errors(xid):
        try:
            await decide(broker, token, outcome)
        except HeuristicOutcome as heuristic:
            kind = XaHeuristicRollback if outcome is COMMIT else XaHeuristicCommit
            raise kind(
                heuristic.message, hint="call forget once the outcome is dealt with"
            ) from heuristic
        except Conflict as conflict:
            raise XaProtocol(f"{name}: {conflict.message}") from conflict
        except UnknownTransaction as unknown:
            raise XaUnknown(f"{name}: {unknown.message}") from unknown


async def token_of(broker: AwaitedCore, xid: Xid) -> UUID:
    """Return the token of a branch at the broker. Raises XaUnknown, XaUnavailable."""
    return UUID((await find_branch(broker, xid))["token"])


async def find_branch(broker: AwaitedCore, xid: Xid) -> dict[str, Any]:
    """Return the broker's row of a branch. Raises XaUnknown or XaUnavailable."""
    args = {
        "format": xid.format,
        "gtrid": b64encode(xid.gtrid).decode(),
        "bqual": b64encode(xid.bqual).decode(),
    }
    with xa_errors(xid):
        try:
            return await broker.call("xa.find", args, repeat=True)
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
