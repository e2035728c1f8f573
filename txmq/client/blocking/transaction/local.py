"""Transactions that the broker decides as it stores them: many messages, topics and
acks at once.
"""

from __future__ import annotations

import time

from txmq.client.blocking.transaction.broker_part import Share
from txmq.client.blocking.transaction.bundles import PART_BYTES
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
from txmq.model.bundle import GroupState
from txmq.model.message import ROLLBACK
from txmq.wire.group import Part

HINT = "txmq tx show tells, once the broker answers"


class LocalShare(Share):
    """A group that is decided with its seal."""

    def _parts(self, most: int = PART_BYTES) -> list[Part]:
        *parts, last = super()._parts(most)
        return [*parts, last._replace(commit=True)]


class LocalTransaction(Transaction):
    """Everything in the block is stored at its end and visible at once; if the block
    raises, nothing is.
    """

    _share_type = LocalShare
    _one_broker = "its broker decides it alone; a database decides for several: client.transaction(connection)"

    def _commit(self) -> None:
        share = self._share
        if share.empty:
            return
        share.prepare(self._description(share, ("local",)), time.monotonic() + self._timeout)
        try:
            share.send()
            crashpoint("local.after_send")
            state = GroupState(share.receipt().state)
            crashpoint("local.after_group")
        except (ConnectionLost, RequestTimeout) as lost:
            state = self._find_out(lost)
        except TxmqError:
            share.tell(ROLLBACK)  # parts of it may be there, and hold keys until their time is up
            raise
        if state is GroupState.ROLLED_BACK:
            raise TransactionAborted(f"transaction {self.token} was rolled back")
        share.published = state is GroupState.PUBLISHED

    def _find_out(self, lost: ConnectionLost | RequestTimeout) -> GroupState:
        """What became of it; one of which parts are missing is given up."""
        state = await_state(
            self._core, self.token, GroupState.COMMITTED, time.monotonic() + self._timeout
        )
        try:
            if state is GroupState.OPEN:
                return GroupState(
                    decide(self._core, self.token, ROLLBACK, timeout=self._timeout).state
                )
        except Conflict:
            return GroupState.COMMITTED
        except TxmqError as error:
            raise InDoubt(
                f"not rolled back: {error.message}", token=str(self.token), hint=HINT
            ) from lost
        if state is None:  # it may still arrive
            raise InDoubt(
                f"no answer came: {lost.message}", token=str(self.token), hint=HINT
            ) from lost
        return state

    def _abort(self) -> None:
        """Nothing was sent."""
