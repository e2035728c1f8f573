"""Transactions that the broker decides as it stores them: many messages, topics and acks at once."""

from __future__ import annotations

import time

from txmq import limits
from txmq.client.decisions import await_state
from txmq.client.transaction import Transaction
from txmq.errors import ConnectionLost, InDoubt, MessageTooLarge, RequestTimeout, TransactionAborted
from txmq.tx.group import GroupState
from txmq.wire.group import Description, Part

HINT = "txmq tx show tells, once the broker answers"


class LocalTransaction(Transaction):
    """Everything in the block is stored in one frame at its end, visible at once; if the block raises, nothing is."""

    _published = False

    def _commit(self) -> None:
        if self._buffer.empty:
            return
        description = self._description("local")
        deadline = time.monotonic() + self._timeout
        storing = self._storing(description, deadline)
        try:
            storing.send()
            state: GroupState | None = GroupState(self._receipt(storing, description, deadline).state)
        except (ConnectionLost, RequestTimeout) as lost:
            state = await_state(self._core, self.token, GroupState.COMMITTED, time.monotonic() + self._timeout)
            if state is None:  # it may still arrive
                raise InDoubt(f"no answer came: {lost.message}", token=str(self.token), hint=HINT) from lost
        if state is GroupState.ROLLED_BACK:
            raise TransactionAborted(f"transaction {self.token} was rolled back")
        self._published = state is GroupState.PUBLISHED

    def _abort(self) -> None:
        """Nothing was sent."""

    def _known_published(self, deadline: float) -> bool:
        return self._published

    def _parts(self, description: Description, most: int = limits.BATCH) -> list[Part]:
        parts = super()._parts(description, most)
        if len(parts) > 1:
            size = sum(len(batch.batch) for part in parts for batch in part.batches)
            hint = "send less at once, or decide it with a database: client.transaction(connection)"
            raise MessageTooLarge(f"a local transaction of {size} bytes does not fit in one frame", hint=hint)
        return [parts[0]._replace(commit=True)]
