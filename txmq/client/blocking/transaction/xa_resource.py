"""The broker as a resource of another transaction manager, by the calls of XA.

    resource = client.xa_resource(owner="orders")
    resource.start(xid)
    resource.send("orders", b"...", key="o-1")
    resource.end(xid)
    if resource.prepare(xid) == "ok":
        resource.commit(xid)    # or rollback(xid), in this process or a later one

A prepared branch is durable and has no time-out. Only the manager decides it, or an
operator in the manager's place; a contrary decision of the manager then gets
XaHeuristic. An unprepared branch exists in this process only, and ends with the
process.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator
from typing import Any, Literal, Protocol

from txmq.client.blocking.core import BlockingCore
from txmq.client.blocking.transaction.broker_bundle import BrokerBundle
from txmq.client.blocking.transaction.foreign_branch import (
    BranchState,
    ForeignBranch,
    decide_branch,
    token_of,
    xa_errors,
)
from txmq.client.blocking.transaction.transaction import TransactionOperations
from txmq.client.protocol.transaction.lifecycle import Stage
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors.xa import XaDuplicate, XaHeuristic, XaInvalid, XaProtocol, XaRolledBack, XaUnknown
from txmq.model.bundle import BundleState
from txmq.model.message import COMMIT, ROLLBACK, Decision, check_name
from txmq.tx.xid import LARGEST_FORMAT, LONGEST_PART, Xid

PAGE = 1_000
COMMITTED = (BundleState.COMMITTED, BundleState.PUBLISHED)


class XidLike(Protocol):
    """An Xid of psycopg2; `format_id` None = the gid is not made from an Xid."""

    format_id: int | None
    gtrid: str
    bqual: str | None


XidArgument = Xid | XidLike | tuple[int, bytes, bytes]


class XaResource(TransactionOperations):
    """One manager's use of the broker. For one thread.

    The resources of a client share their branches. Every call raises XaInvalid for an
    invalid Xid, XaProtocol for a branch in the wrong state, and XaUnavailable, which is
    XAER_RMFAIL, if the broker did not answer.
    """

    def __init__(self, core: BlockingCore, branches: dict[Xid, ForeignBranch], owner: str) -> None:
        super().__init__(BrokerBundle(core, new_token()))
        self.owner = check_name(owner, "owner")
        self._core, self._branches = core, branches
        self._branch: ForeignBranch | None = None  # of this thread, between start and end
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
                self._core, named, self.owner, self._timeout
            )
        branch.state = BranchState.ACTIVE
        self._branch, self._bundle = branch, branch.bundle

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

    def prepare(self, xid: XidArgument) -> Literal["ok", "read-only"]:
        """Make the branch durable; "read-only" = it is empty, and forgotten.

        Raises XaRolledBack, in one of its kinds, or XaDuplicate: the branch is
        forgotten. After XaUnavailable prepare it again, or roll it back.
        """
        branch = self._require_storable(parse_xid(xid))
        if branch.bundle.empty:
            self._remove(branch, committed=True)
            return "read-only"
        self._store(branch, at_once=False)
        branch.state = BranchState.PREPARED
        return "ok"

    def commit(self, xid: XidArgument, *, one_phase: bool = False) -> None:
        """Commit a prepared branch of any process, or in `one_phase` an unprepared one.

        Repeating it changes nothing. Raises XaUnknown or XaHeuristicRollback, in one
        phase XaRolledBack.
        """
        named = parse_xid(xid)
        if not one_phase:
            self._finish(named, COMMIT)
            return
        branch = self._require_storable(named)
        # A bundle of several parts is stored undecided.
        if not branch.bundle.empty and self._store(branch, at_once=True) not in COMMITTED:
            decide_branch(self._core, named, branch.bundle.token, COMMIT)
        self._remove(branch, committed=True)

    def rollback(self, xid: XidArgument) -> None:
        """Roll a branch back, prepared or not.

        Raises XaUnknown or XaHeuristicCommit.
        """
        named = parse_xid(xid)
        branch = self._branches.get(named)
        if branch is None or branch.state is BranchState.PREPARED:
            self._finish(named, ROLLBACK)
            return
        branch = self._branch_of(named, BranchState.ENDED, BranchState.IN_DOUBT)
        branch.roll_back()
        self._remove(branch, committed=False)

    def recover(self, *, everybody: bool = False) -> list[Xid]:
        """Return the Xids of prepared branches, the oldest first.

        Branches that an operator has decided are listed until they are forgotten.
        `everybody` = those of all owners.
        """
        return list(self._list_prepared(None if everybody else self.owner))

    def forget(self, xid: XidArgument) -> None:
        """Forget a branch that an operator has decided. Raises XaUnknown."""
        named = parse_xid(xid)
        args = {
            "token": token_of(self._core, named).hex,
            "operator": self.owner,
            "reason": "by its manager",
        }
        with xa_errors(named):
            self._core.call("xa.forget", args, repeat=True)

    def _list_prepared(self, owner: str | None) -> Iterator[Xid]:
        after: str | None = None
        while True:
            args: dict[str, Any] = {
                "kind": "foreign",
                "owner": owner,
                "after": after,
                "limit": PAGE,
            }
            with xa_errors(None):
                page = self._core.call("xa.list", args, repeat=True)
            for row in page["transactions"]:
                xid = row["xid"]
                yield Xid(xid["format"], b64decode(xid["gtrid"]), b64decode(xid["bqual"]))
            after = page["next"]
            if after is None:
                return

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

    def _store(self, branch: ForeignBranch, *, at_once: bool) -> BundleState:
        try:
            return branch.store(at_once=at_once)
        except (XaRolledBack, XaDuplicate):
            self._remove(branch, committed=False)
            raise

    def _finish(self, xid: Xid, outcome: Decision) -> None:
        branch = self._branches.get(xid)
        if branch is not None:
            self._branch_of(xid, BranchState.PREPARED)
        token = token_of(self._core, xid) if branch is None else branch.bundle.token
        committed = outcome is COMMIT
        try:
            decide_branch(self._core, xid, token, outcome)
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
