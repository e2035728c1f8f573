"""The broker as a resource of another transaction manager, on asyncio.

    resource = client.xa_resource(owner="orders")
    resource.start(xid)
    resource.send("orders", b"...", key="o-1")
    resource.end(xid)
    if await resource.prepare(xid) == "ok":
        await resource.commit(xid)    # or rollback(xid), in this process or a later one

The rest is as for the blocking one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Literal, TypeVar

from txmq.client.aio.core import AioCore
from txmq.client.aio.loop import cancelled
from txmq.client.aio.transaction.bundle import AioBundle
from txmq.client.aio.transaction.transaction import AioOperations
from txmq.client.protocol.awaited.foreign_branch import ForeignBranch, sealed
from txmq.client.protocol.awaited.xa_resource import ResourceSteps, XidArgument
from txmq.client.protocol.transaction.tokens import new_token
from txmq.tx.xid import Xid
from txmq.wire.bundle import BundlePart

T = TypeVar("T")


class ForeignBundle(AioBundle):
    """A bundle that another transaction manager decides."""

    at_once = False

    def _parts(self, stored: Sequence[BundlePart] = ()) -> list[BundlePart]:
        return sealed(super()._parts(stored), at_once=self.at_once)


class XaResource(AioOperations, ResourceSteps[AioBundle]):
    """One manager's use of the broker. For one task at a time.

    Every call raises as that of the blocking resource. A call that is cancelled may be
    carried out: `txmq.aio.outcome_of` tells where it certainly is not. Make it again,
    as after XaUnavailable.
    """

    def __init__(self, core: AioCore, branches: dict[Xid, ForeignBranch], owner: str) -> None:
        def new_bundle() -> ForeignBundle:
            return ForeignBundle(core, new_token())

        ResourceSteps.__init__(self, core, new_bundle, branches, owner)

    async def prepare(self, xid: XidArgument) -> Literal["ok", "read-only"]:
        """Make the branch durable; "read-only" = it is empty, and forgotten.

        Raises XaRolledBack, in one of its kinds, or XaDuplicate: the branch is
        forgotten. After XaUnavailable prepare it again, or roll it back.
        """
        return await self._named(self._prepare(xid))

    async def commit(self, xid: XidArgument, *, one_phase: bool = False) -> None:
        """Commit a prepared branch of any process, or in `one_phase` an unprepared one.

        Repeating it changes nothing. Raises XaUnknown or XaHeuristicRollback, in one
        phase XaRolledBack.
        """
        await self._named(self._commit(xid, one_phase=one_phase))

    async def rollback(self, xid: XidArgument) -> None:
        """Roll a branch back, prepared or not.

        Raises XaUnknown or XaHeuristicCommit.
        """
        await self._named(self._rollback(xid))

    async def recover(self, *, everybody: bool = False) -> list[Xid]:
        """Return the Xids of prepared branches, the oldest first.

        Branches that an operator has decided are listed until they are forgotten.
        `everybody` = those of all owners.
        """
        return await self._recover(everybody=everybody)

    async def forget(self, xid: XidArgument) -> None:
        """Forget a branch that an operator has decided. Raises XaUnknown."""
        await self._named(self._forget(xid))

    async def _named(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except asyncio.CancelledError as error:
            cancelled(error, "unknown", "a call of an XA resource")
            raise
