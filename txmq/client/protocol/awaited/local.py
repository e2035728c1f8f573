"""The steps of transactions that their broker decides as it stores them."""

from __future__ import annotations

from collections.abc import Sequence

from txmq.client.protocol.awaited.block import B, BlockSteps, K
from txmq.client.protocol.awaited.bundle import StoringBundle
from txmq.crashpoints import crashpoint
from txmq.errors import (
    Conflict,
    ConnectionLost,
    InDoubt,
    RequestTimeout,
    TransactionAborted,
    TxmqError,
)
from txmq.model.bundle import BundleState
from txmq.model.decider import ByBroker
from txmq.model.message import ROLLBACK
from txmq.wire.bundle import BundlePart

SHOW_HINT = "see `txmq tx show` once the broker answers"


class SealedBundle(StoringBundle[K]):
    """A bundle whose seal decides it. A face adds its own bundle to the bases."""

    decided_by_seal = True

    def _parts(self, stored: Sequence[BundlePart] = ()) -> list[BundlePart]:
        *parts, last = super()._parts(stored)
        return [*parts, last._replace(commit=True)]


class LocalSteps(BlockSteps[B, K]):
    """Messages and acks that become visible together at the end of the block.

    If the block raises, nothing is stored.
    """

    _one_broker_hint = (
        "its broker decides it alone: let a database decide, with client.transaction(connection)"
    )

    async def _commit(self) -> None:
        bundle = self._only_bundle
        if bundle is None:
            return
        deadline = self._core.seconds() + self._timeout
        await bundle.build(self._description(bundle, ByBroker()), deadline)
        try:
            self._deciding = True
            await bundle.send()
            crashpoint("local.after_send")
            state = BundleState((await bundle.await_receipt()).state)
            crashpoint("local.after_group")
        except (ConnectionLost, RequestTimeout) as lost:
            state = await self._resolve_doubt(bundle, lost)
        except TxmqError:
            if bundle.sent:  # parts that have arrived would hold their keys until they time out
                bundle.send_decision(ROLLBACK)
            raise
        if state is BundleState.ROLLED_BACK:
            raise TransactionAborted(f"Transaction {self.token} was rolled back")
        bundle.published = state is BundleState.PUBLISHED

    async def _resolve_doubt(self, bundle: B, lost: ConnectionLost | RequestTimeout) -> BundleState:
        """Ask the broker for the bundle's state; roll it back if parts are missing."""
        deadline = self._core.seconds() + self._timeout
        state = await bundle.await_state(BundleState.COMMITTED, deadline)
        try:
            if state is BundleState.OPEN:
                return BundleState((await bundle.decide(ROLLBACK, self._timeout)).state)
        except Conflict:
            return BundleState.COMMITTED
        except TxmqError as error:
            raise InDoubt(
                f"The rollback failed: {error.message}", token=str(self.token), hint=SHOW_HINT
            ) from lost
        if state is None:  # the bundle may still arrive
            raise InDoubt(
                f"The broker did not answer: {lost.message}", token=str(self.token), hint=SHOW_HINT
            ) from lost
        return state

    async def _abort(self) -> None:
        """Do nothing: nothing was sent."""
