"""Transactions that their broker decides as it stores them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from txmq.client.blocking.core import BlockingCore
from txmq.client.blocking.transaction.broker_bundle import BrokerBundle
from txmq.client.blocking.transaction.decisions import await_state, decide
from txmq.client.blocking.transaction.transaction import Transaction
from txmq.crashpoints import crashpoint
from txmq.errors import (
    Conflict,
    ConnectionLost,
    InDoubt,
    RequestTimeout,
    TransactionAborted,
    TxmqError,
)
from txmq.faces import run
from txmq.model.bundle import BundleState
from txmq.model.decider import ByBroker
from txmq.model.message import ROLLBACK
from txmq.wire.bundle import BundlePart

SHOW_HINT = "see `txmq tx show` once the broker answers"


class LocalBundle(BrokerBundle):
    """A bundle whose seal decides it."""

    decided_by_seal = True

    def _parts(self, stored: Sequence[BundlePart] = ()) -> list[BundlePart]:
        *parts, last = super()._parts(stored)
        return [*parts, last._replace(commit=True)]


class LocalTransaction(Transaction):
    """Messages and acks that become visible together at the end of the block.

    If the block raises, nothing is stored.
    """

    _bundle_type = LocalBundle
    _one_broker_hint = (
        "its broker decides it alone: let a database decide, with client.transaction(connection)"
    )

    def _commit(self) -> None:
        bundle = self._only_bundle
        if bundle is None:
            return
        deadline = time.monotonic() + self._timeout
        run(bundle.build(self._description(bundle, ByBroker()), deadline))
        try:
            run(bundle.send())
            crashpoint("local.after_send")
            state = BundleState(run(bundle.await_receipt()).state)
            crashpoint("local.after_group")
        except (ConnectionLost, RequestTimeout) as lost:
            state = self._resolve_doubt(bundle.core, lost)
        except TxmqError:
            # Parts that have arrived would hold their keys until they time out.
            bundle.send_decision(ROLLBACK)
            raise
        if state is BundleState.ROLLED_BACK:
            raise TransactionAborted(f"Transaction {self.token} was rolled back")
        bundle.published = state is BundleState.PUBLISHED

    def _resolve_doubt(
        self, core: BlockingCore, lost: ConnectionLost | RequestTimeout
    ) -> BundleState:
        """Ask the broker for the bundle's state; roll it back if parts are missing."""
        state = await_state(
            core, self.token, BundleState.COMMITTED, time.monotonic() + self._timeout
        )
        try:
            if state is BundleState.OPEN:
                return BundleState(decide(core, self.token, ROLLBACK, timeout=self._timeout).state)
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

    def _abort(self) -> None:
        """Do nothing: nothing was sent."""
