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

from collections.abc import Sequence
from typing import Literal

from txmq.client.blocking.at_once import CoreAtOnce
from txmq.client.blocking.core import BlockingCore
from txmq.client.blocking.transaction.broker_bundle import BrokerBundle
from txmq.client.blocking.transaction.transaction import TransactionOperations
from txmq.client.protocol.awaited.foreign_branch import ForeignBranch, sealed
from txmq.client.protocol.awaited.xa_resource import ResourceSteps, XidArgument
from txmq.client.protocol.transaction.tokens import new_token
from txmq.faces import run
from txmq.tx.xid import Xid
from txmq.wire.bundle import BundlePart


class ForeignBundle(BrokerBundle):
    """A bundle that another transaction manager decides."""

    at_once = False

    def _parts(self, stored: Sequence[BundlePart] = ()) -> list[BundlePart]:
        return sealed(super()._parts(stored), at_once=self.at_once)


class XaResource(TransactionOperations, ResourceSteps[BrokerBundle]):
    """One manager's use of the broker. For one thread.

    The resources of a client share their branches. Every call raises XaInvalid for an
    invalid Xid, XaProtocol for a branch in the wrong state, and XaUnavailable, which is
    XAER_RMFAIL, if the broker did not answer.
    """

    def __init__(self, core: BlockingCore, branches: dict[Xid, ForeignBranch], owner: str) -> None:
        def new_bundle() -> ForeignBundle:
            return ForeignBundle(core, new_token())

        ResourceSteps.__init__(self, CoreAtOnce(core), new_bundle, branches, owner)

    def prepare(self, xid: XidArgument) -> Literal["ok", "read-only"]:
        """Make the branch durable; "read-only" = it is empty, and forgotten.

        Raises XaRolledBack, in one of its kinds, or XaDuplicate: the branch is
        forgotten. After XaUnavailable prepare it again, or roll it back.
        """
        return run(self._prepare(xid))

    def commit(self, xid: XidArgument, *, one_phase: bool = False) -> None:
        """Commit a prepared branch of any process, or in `one_phase` an unprepared one.

        Repeating it changes nothing. Raises XaUnknown or XaHeuristicRollback, in one
        phase XaRolledBack.
        """
        run(self._commit(xid, one_phase=one_phase))

    def rollback(self, xid: XidArgument) -> None:
        """Roll a branch back, prepared or not.

        Raises XaUnknown or XaHeuristicCommit.
        """
        run(self._rollback(xid))

    def recover(self, *, everybody: bool = False) -> list[Xid]:
        """Return the Xids of prepared branches, the oldest first.

        Branches that an operator has decided are listed until they are forgotten.
        `everybody` = those of all owners.
        """
        return run(self._recover(everybody=everybody))

    def forget(self, xid: XidArgument) -> None:
        """Forget a branch that an operator has decided. Raises XaUnknown."""
        run(self._forget(xid))
