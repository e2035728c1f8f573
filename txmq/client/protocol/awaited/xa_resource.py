"""The steps of the broker as a resource of another manager, in all faces."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable
from typing import Any, Literal, Protocol, cast

from txmq.client.protocol.awaited.core import AwaitedCore
from txmq.client.protocol.awaited.foreign_branch import (
    BranchState,
    ForeignBranch,
    ForeignBundle,
    decide_branch,
    token_of,
    xa_errors,
)
from txmq.client.protocol.transaction.lifecycle import Stage
from txmq.client.protocol.transaction.operations import B, BundleOperations
from txmq.errors import ConfigError
from txmq.errors.xa import XaDuplicate, XaHeuristic, XaInvalid, XaProtocol, XaRolledBack, XaUnknown
from txmq.model.bundle import COMMITTED, BundleState
from txmq.model.message import COMMIT, ROLLBACK, Decision, check_name
from txmq.tx.xid import LARGEST_FORMAT, LONGEST_PART, Xid

PAGE = 1_000


class XidLike(Protocol):
    """An Xid of psycopg2; `format_id` None = the gid is not made from an Xid."""

    format_id: int | None
    gtrid: str
    bqual: str | None


XidArgument = Xid | XidLike | tuple[int, bytes, bytes]


class ResourceSteps(BundleOperations[B]):
    """One manager's use of the broker."""

    def __init__(
        self,
        broker: AwaitedCore,
        new_bundle: Callable[[], ForeignBundle],
        branches: dict[Xid, ForeignBranch],
        owner: str,
    ) -> None:
        super().__init__(cast("B", new_bundle()))  # of its face
        self.owner = check_name(owner, "owner")
        self._broker, self._new_bundle, self._branches = broker, new_bundle, branches
        self._branch: ForeignBranch | None = None  # of this resource, between start and end
        self._timeout = 0.0

    def set_timeout(self, seconds: float) -> None:
        """Set the seconds within which later branches are prepared; 0 = any."""
        if seconds < 0:
            raise XaInvalid(f"Invalid time-out of {seconds} seconds", hint="give 0 or more")
        self._timeout = seconds

    def start(self, xid: XidArgument, *, join: bool = False, resume: bool = False) -> None:
        """Begin work on a branch: later sends and acks of this resource belong to it.

        `join` = a branch that was started before and ended, by another resource of the
        client, say. `resume` = a suspended branch. Raises XaDuplicate or XaUnknown. An
        Xid that another process has used is found out when the branch is prepared.
        """
        named = parse_xid(xid)
        if self._branch is not None:
            raise XaProtocol(
                f"Branch {self._branch.xid.gid} is not ended yet", hint="call end(xid) first"
            )
        if join or resume:
            branch = self._branch_of(named, BranchState.SUSPENDED if resume else BranchState.ENDED)
            branch.require_committable()
        elif named in self._branches:
            raise XaDuplicate(
                f"Branch {named.gid} was started before",
                hint="give join=True to work on it again",
            )
        else:
            branch = self._branches[named] = ForeignBranch(
                self._broker, self._new_bundle(), named, self.owner, self._timeout
            )
        branch.state = BranchState.ACTIVE
        self._branch = branch
        self._bundle = cast("B", branch.bundle)

    def end(self, xid: XidArgument, how: Literal["success", "fail", "suspend"] = "success") -> None:
        """End or suspend the work on a branch; after "fail" it can only roll back."""
        if how not in ("success", "fail", "suspend"):
            raise XaInvalid(
                f"Invalid way {how!r} to end a branch",
                hint="give 'success', 'fail' or 'suspend'",
            )
        branch = self._branch_of(parse_xid(xid), BranchState.ACTIVE, BranchState.SUSPENDED)
        if branch.state is BranchState.ACTIVE and branch is not self._branch:
            raise XaProtocol(f"Branch {branch.xid.gid} is active in another resource")
        branch.state = BranchState.SUSPENDED if how == "suspend" else BranchState.ENDED
        if how == "fail":
            branch.rollback_reason = branch.rollback_reason or XaRolledBack(
                f"Branch {branch.xid.gid} was ended with 'fail'"
            )
        if branch is self._branch:
            self._branch = None

    async def _prepare(self, xid: XidArgument) -> Literal["ok", "read-only"]:
        branch = self._require_storable(parse_xid(xid))
        if branch.bundle.buffer.empty:
            self._remove(branch, committed=True)
            return "read-only"
        await self._store(branch, at_once=False)
        branch.state = BranchState.PREPARED
        return "ok"

    async def _commit(self, xid: XidArgument, *, one_phase: bool) -> None:
        named = parse_xid(xid)
        if not one_phase:
            await self._finish(named, COMMIT)
            return
        branch = self._require_storable(named)
        # A bundle of several parts is stored undecided.
        if (
            not branch.bundle.buffer.empty
            and await self._store(branch, at_once=True) not in COMMITTED
        ):
            await decide_branch(self._broker, named, branch.bundle.token, COMMIT)
        self._remove(branch, committed=True)

    async def _rollback(self, xid: XidArgument) -> None:
        named = parse_xid(xid)
        branch = self._branches.get(named)
        if branch is None or branch.state is BranchState.PREPARED:
            await self._finish(named, ROLLBACK)
            return
        branch = self._branch_of(named, BranchState.ENDED, BranchState.IN_DOUBT)
        await branch.roll_back()
        self._remove(branch, committed=False)

    async def _recover(self, *, everybody: bool) -> list[Xid]:
        args: dict[str, Any] = {
            "kind": "foreign",
            "owner": None if everybody else self.owner,
            "after": None,
            "limit": PAGE,
        }
        found: list[Xid] = []
        while True:
            with xa_errors(None):
                page = await self._broker.call("xa.list", args, repeat=True)
            for row in page["transactions"]:
                xid = row["xid"]
                found.append(Xid(xid["format"], b64decode(xid["gtrid"]), b64decode(xid["bqual"])))
            args["after"] = page["next"]
            if args["after"] is None:
                return found

    async def _forget(self, xid: XidArgument) -> None:
        named = parse_xid(xid)
        args = {
            "token": (await token_of(self._broker, named)).hex,
            "operator": self.owner,
            "reason": "by its manager",
        }
        with xa_errors(named):
            await self._broker.call("xa.forget", args, repeat=True)

    def _require(self, stage: Stage) -> None:
        del stage
        if self._branch is None:
            raise XaProtocol(
                "No branch is active in this resource",
                hint="call start(xid) before the work, and end(xid) after it",
            )
        self._branch.require_committable()

    def _branch_of(self, xid: Xid, *expected: BranchState) -> ForeignBranch:
        branch = self._branches.get(xid)
        if branch is None:
            raise XaUnknown(f"This client has not started branch {xid.gid}")
        if branch.state not in expected:
            raise XaProtocol(f"Branch {xid.gid} {branch.state.value}")
        return branch

    def _require_storable(self, xid: Xid) -> ForeignBranch:
        """Return a branch that may be stored; forget one that can only roll back."""
        branch = self._branch_of(xid, BranchState.ENDED, BranchState.IN_DOUBT)
        if branch.state is BranchState.ENDED:  # one in doubt may be prepared: no time-out
            try:
                branch.require_committable()
            except XaRolledBack:
                self._remove(branch, committed=False)
                raise
        return branch

    async def _store(self, branch: ForeignBranch, *, at_once: bool) -> BundleState:
        try:
            return await branch.store(at_once=at_once)
        except (XaRolledBack, XaDuplicate):
            self._remove(branch, committed=False)
            raise

    async def _finish(self, xid: Xid, outcome: Decision) -> None:
        branch = self._branches.get(xid)
        if branch is not None:
            self._branch_of(xid, BranchState.PREPARED)
        token = await token_of(self._broker, xid) if branch is None else branch.bundle.token
        committed = outcome is COMMIT
        try:
            await decide_branch(self._broker, xid, token, outcome)
        except XaHeuristic:
            if branch is not None:
                self._remove(branch, committed=not committed)
            raise
        if branch is not None:
            self._remove(branch, committed=committed)

    def _remove(self, branch: ForeignBranch, *, committed: bool) -> None:
        self._branches.pop(branch.xid, None)
        branch.finish(committed=committed)


def parse_xid(xid: XidArgument) -> Xid:
    """Return an Xid given in any form. Raises XaInvalid."""
    match xid:
        case (int(number), bytes(gtrid), bytes(bqual)):
            found = Xid(number, gtrid, bqual)
        case object(format_id=int(number), gtrid=str(gtrid), bqual=str(bqual)):
            found = Xid(number, gtrid.encode(), bqual.encode())
        case _:
            raise XaInvalid(f"Invalid Xid {xid!r}", hint="give a format id, a gtrid and a bqual")
    if (
        not 0 <= found.format <= LARGEST_FORMAT
        or max(len(found.gtrid), len(found.bqual)) > LONGEST_PART
    ):
        raise XaInvalid(
            f"Invalid Xid {xid!r}: too large",
            hint=f"give a format id up to {LARGEST_FORMAT}, and gtrid and bqual "
            f"of up to {LONGEST_PART} bytes",
        )
    return found


def no_owner() -> ConfigError:
    """Return the error of a resource without an owner."""
    return ConfigError("owner", "branches are listed under an owner", hint="such as: orders")
