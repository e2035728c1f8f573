"""The broker as a resource under another transaction manager: XA's calls, whose
decisions are the manager's.

    resource = client.xa_resource(owner="orders")
    resource.start(xid)
    resource.send("orders", b"...", key="o-1")
    resource.end(xid)
    if resource.prepare(xid) == "ok":
        resource.commit(xid)            # or rollback(xid): in this process or in any later one

What is prepared is durable, holds for ever, and is decided by nobody but the manager,
or an operator in its place: then the manager's own decision, if it is another one,
meets XaHeuristic. Until it is prepared, a branch is in this process alone and ends with
it.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator
from typing import Any, Literal, Protocol

from txmq.client.blocking.core import Core
from txmq.client.blocking.transaction.broker_part import Share
from txmq.client.blocking.transaction.foreign import (
    ForeignBranch,
    Standing,
    finish,
    telling,
    token_of,
)
from txmq.client.blocking.transaction.transaction import Face, Stage
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors.xa import XaDuplicate, XaHeuristic, XaInvalid, XaProtocol, XaRolledBack, XaUnknown
from txmq.model.bundle import GroupState
from txmq.model.message import COMMIT, ROLLBACK, Decision, check_name
from txmq.tx.xid import LARGEST_FORMAT, LONGEST_PART, Xid

PAGE = 1_000
COMMITTED = (GroupState.COMMITTED, GroupState.PUBLISHED)


class XidLike(Protocol):
    """An Xid as psycopg2 has it; of a gid that is none, it knows no format."""

    format_id: int | None
    gtrid: str
    bqual: str | None


AnyXid = Xid | XidLike | tuple[int, bytes, bytes]


class XaResource(Face):
    """One manager's use of the broker, for one thread; branches are shared with the
    client's other resources.

    Every call raises XaInvalid for what is no Xid, XaProtocol where the branch is not
    in a state for it, and XaUnavailable, which is XAER_RMFAIL, where the broker did not
    answer.
    """

    def __init__(self, core: Core, branches: dict[Xid, ForeignBranch], owner: str) -> None:
        super().__init__(Share(core, new_token()))
        self.owner = check_name(owner, "owner")
        self._core, self._branches = core, branches
        self._branch: ForeignBranch | None = None  # that this thread works on
        self._timeout = 0.0

    def set_timeout(self, seconds: float) -> None:
        """Branches started from now on are rolled back if they are not prepared within
        that time; 0 = for ever.

        What is prepared is never timed out.
        """
        if seconds < 0:
            raise XaInvalid(f"{seconds} seconds", hint="0 or more")
        self._timeout = seconds

    def start(self, xid: AnyXid, *, join: bool = False, resume: bool = False) -> None:
        """From here on, what this resource sends and acks belongs to the branch.

        `join`: one that was begun before, by another of the client's resources, say;
        `resume`: one that was suspended. Raises XaDuplicate, XaUnknown. An Xid that
        another process has used is found out when it is prepared.
        """
        named = as_xid(xid)
        if self._branch is not None:
            raise XaProtocol(f"branch {self._branch.xid.gid} is not ended yet")
        if join or resume:
            branch = self._known(named, Standing.SUSPENDED if resume else Standing.ENDED)
            branch.look()
        elif named in self._branches:
            raise XaDuplicate(
                f"branch {named.gid} was started before", hint="to work on it again: join=True"
            )
        else:
            branch = self._branches[named] = ForeignBranch(
                self._core, named, self.owner, self._timeout
            )
        branch.standing = Standing.ACTIVE
        self._branch, self._share = branch, branch.share

    def end(self, xid: AnyXid, how: Literal["success", "fail", "suspend"] = "success") -> None:
        """Work on the branch is over, or, suspended, for the time being; after "fail"
        it can only be rolled back.
        """
        if how not in ("success", "fail", "suspend"):
            raise XaInvalid(f"{how!r} is no way to end a branch", hint="success, fail or suspend")
        branch = self._known(as_xid(xid), Standing.ACTIVE, Standing.SUSPENDED)
        if branch.standing is Standing.ACTIVE and branch is not self._branch:
            raise XaProtocol(f"branch {branch.xid.gid} is worked on by another resource")
        branch.standing = Standing.SUSPENDED if how == "suspend" else Standing.ENDED
        if how == "fail":
            branch.doomed = branch.doomed or XaRolledBack(f"branch {branch.xid.gid} has failed")
        if branch is self._branch:
            self._branch = None

    def prepare(self, xid: AnyXid) -> Literal["ok", "read-only"]:
        """Makes the branch durable, so that it can be committed whatever happens;
        "read-only": there is nothing in it, and it is forgotten.

        Raises XaRolledBack in one of its kinds, and then it is forgotten; XaDuplicate;
        XaUnavailable: prepare it again, or roll it back.
        """
        branch = self._ready(as_xid(xid))
        if branch.share.empty:
            self._over(branch, committed=True)
            return "read-only"
        self._store(branch, at_once=False)
        branch.standing = Standing.PREPARED
        return "ok"

    def commit(self, xid: AnyXid, *, one_phase: bool = False) -> None:
        """Commits a prepared branch, of whatever process, or, in `one_phase`, one that
        is not prepared.

        Repeated, it changes nothing. Raises XaUnknown, XaHeuristicRollback; in one
        phase XaRolledBack.
        """
        named = as_xid(xid)
        if not one_phase:
            self._finish(named, COMMIT)
            return
        branch = self._ready(named)
        if (
            not branch.share.empty and self._store(branch, at_once=True) not in COMMITTED
        ):  # it has several parts
            finish(self._core, named, branch.share.token, COMMIT)
        self._over(branch, committed=True)

    def rollback(self, xid: AnyXid) -> None:
        """Rolls a branch back, prepared or not. Raises XaUnknown, XaHeuristicCommit."""
        named = as_xid(xid)
        branch = self._branches.get(named)
        if branch is None or branch.standing is Standing.PREPARED:
            self._finish(named, ROLLBACK)
            return
        branch = self._known(named, Standing.ENDED, Standing.IN_DOUBT)
        branch.withdraw()
        self._over(branch, committed=False)

    def recover(self, *, everybody: bool = False) -> list[Xid]:
        """The Xids of this owner's branches, or everybody's, that are prepared, or were
        decided by hand and not yet forgotten; the oldest first.
        """
        return list(self._prepared(None if everybody else self.owner))

    def forget(self, xid: AnyXid) -> None:
        """A branch decided by hand has been dealt with. Raises XaUnknown."""
        named = as_xid(xid)
        told = {
            "token": token_of(self._core, named).hex,
            "operator": self.owner,
            "reason": "by its manager",
        }
        with telling(named):
            self._core.call("xa.forget", told, repeat=True)

    def _prepared(self, owner: str | None) -> Iterator[Xid]:
        after: str | None = None
        while True:
            wanted: dict[str, Any] = {
                "kind": "foreign",
                "owner": owner,
                "after": after,
                "limit": PAGE,
            }
            with telling(None):
                page = self._core.call("xa.list", wanted, repeat=True)
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
                "no branch is started", hint="start(xid) before, and end(xid) after the work"
            )
        self._branch.look()

    def _known(self, xid: Xid, *expected: Standing) -> ForeignBranch:
        branch = self._branches.get(xid)
        if branch is None:
            raise XaUnknown(f"no branch {xid.gid} was started by this client")
        if branch.standing not in expected:
            raise XaProtocol(f"branch {xid.gid} {branch.standing.value}")
        return branch

    def _ready(self, xid: Xid) -> ForeignBranch:
        """A branch that may be stored. One that can only be rolled back is, and
        forgotten.
        """
        branch = self._known(xid, Standing.ENDED, Standing.IN_DOUBT)
        if branch.standing is Standing.ENDED:  # what may be prepared by now has no clock any more
            try:
                branch.look()
            except XaRolledBack:
                self._over(branch, committed=False)
                raise
        return branch

    def _store(self, branch: ForeignBranch, *, at_once: bool) -> GroupState:
        try:
            return branch.store(at_once=at_once)
        except (XaRolledBack, XaDuplicate):
            self._over(branch, committed=False)
            raise

    def _finish(self, xid: Xid, outcome: Decision) -> None:
        branch = self._branches.get(xid)
        if branch is not None:
            self._known(xid, Standing.PREPARED)
        token = token_of(self._core, xid) if branch is None else branch.share.token
        committed = outcome is COMMIT
        try:
            finish(self._core, xid, token, outcome)
        except XaHeuristic:
            if branch is not None:
                self._over(branch, committed=not committed)
            raise
        if branch is not None:
            self._over(branch, committed=committed)

    def _over(self, branch: ForeignBranch, *, committed: bool) -> None:
        self._branches.pop(branch.xid, None)
        branch.over(committed=committed)


def as_xid(xid: AnyXid) -> Xid:
    """An Xid in any of its forms. Raises XaInvalid."""
    match xid:
        case (int(number), bytes(gtrid), bytes(bqual)):
            found = Xid(number, gtrid, bqual)
        case object(format_id=int(number), gtrid=str(gtrid), bqual=str(bqual)):
            found = Xid(number, gtrid.encode(), bqual.encode())
        case _:
            raise XaInvalid(
                f"{xid!r} is no Xid", hint="a format id, a gtrid and a bqual are needed"
            )
    if (
        not 0 <= found.format <= LARGEST_FORMAT
        or max(len(found.gtrid), len(found.bqual)) > LONGEST_PART
    ):
        hint = f"a format id is at most {LARGEST_FORMAT}, gtrid and bqual have at most {LONGEST_PART} bytes"
        raise XaInvalid("the Xid is too large", hint=hint)
    return found
