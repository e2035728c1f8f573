"""Transactions that the broker decides as it stores them: many messages, topics and acks at once."""

from __future__ import annotations

import time

from txmq import limits
from txmq.client.decisions import await_state
from txmq.client.share import Share
from txmq.client.transaction import Transaction
from txmq.errors import ConnectionLost, InDoubt, MessageTooLarge, RequestTimeout, TransactionAborted
from txmq.tx.group import GroupState
from txmq.wire.group import Part

HINT = "txmq tx show tells, once the broker answers"


class LocalShare(Share):
    """A group that is decided as it is stored, and so has one part."""

    def _parts(self, most: int = limits.BATCH) -> list[Part]:
        parts = super()._parts(most)
        if len(parts) > 1:
            size = sum(len(batch.batch) for part in parts for batch in part.batches)
            hint = "send less at once, or decide it with a database: client.transaction(connection)"
            raise MessageTooLarge(f"a local transaction of {size} bytes does not fit in one frame", hint=hint)
        return [parts[0]._replace(commit=True)]


class LocalTransaction(Transaction):
    """Everything in the block is stored in one frame at its end, visible at once; if the block raises, nothing is."""

    _share_type = LocalShare
    _one_broker = "its broker decides it alone; a database decides for several: client.transaction(connection)"

    def _commit(self) -> None:
        share = self._share
        if share.empty:
            return
        share.prepare(self._description(share, ("local",)), time.monotonic() + self._timeout)
        try:
            share.send()
            state: GroupState | None = GroupState(share.receipt().state)
        except (ConnectionLost, RequestTimeout) as lost:
            state = await_state(self._core, self.token, GroupState.COMMITTED, time.monotonic() + self._timeout)
            if state is None:  # it may still arrive
                raise InDoubt(f"no answer came: {lost.message}", token=str(self.token), hint=HINT) from lost
        if state is GroupState.ROLLED_BACK:
            raise TransactionAborted(f"transaction {self.token} was rolled back")
        share.published = state is GroupState.PUBLISHED

    def _abort(self) -> None:
        """Nothing was sent."""
