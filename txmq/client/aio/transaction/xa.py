"""Two-phase commit over several PostgreSQL databases and brokers, on asyncio.

`txmq.client.protocol.awaited.xa` has the steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TypeVar

from txmq.client.aio.core import AioCore
from txmq.client.aio.transaction.bundle import AioBundle
from txmq.client.aio.transaction.transaction import Transaction
from txmq.client.protocol.awaited.xa import Step, XaSteps, require_connections
from txmq.client.protocol.transaction.prepared_slots import SlotDemand, prepared_slots
from txmq.errors import TwoPhaseFull
from txmq.tx.postgres.drivers import async_driver

SLOT_PAUSE_S = 0.02  # between two looks for a slot that other transactions of the process have
T = TypeVar("T")


class XaTransaction(Transaction, XaSteps[AioBundle, AioCore]):
    """Rows on several connections and messages sent in the block, all or none.

    The block returns once the transaction is committed. `unfinished` has the gids of
    branches whose database could not be reached: recovery commits them, and their rows
    stay locked until then. The block raises InDoubt if the home broker did not answer,
    HeuristicMixed if an operator had ended a branch otherwise, and else the reason of
    the rollback. The rest is as for the blocking `client.xa`.
    """

    def __init__(
        self,
        core: AioCore,
        connections: Sequence[object],
        *,
        node: str,
        timeout: float,
        check_after: float,
    ) -> None:
        super().__init__(core, timeout=timeout, check_after=check_after)
        require_connections(connections)
        self._use([async_driver(connection) for connection in connections], node)

    async def _at_once(self, steps: Sequence[Step[T]]) -> list[T]:
        ends = await asyncio.gather(*(step() for step in steps), return_exceptions=True)
        return [_result(end) for end in ends]

    async def _reserve_slots(
        self, demand: dict[int, SlotDemand], deadline: float, stack: ExitStack
    ) -> None:
        while True:
            try:
                stack.enter_context(prepared_slots().reserve(demand, 0.0))  # without waiting
            except TwoPhaseFull:
                too_many = any(needed > limit for needed, limit in demand.values())
                if too_many or self._core.seconds() >= deadline:
                    raise
                await asyncio.sleep(SLOT_PAUSE_S)
            else:
                return


def _result(end: T | BaseException) -> T:
    if isinstance(end, BaseException):
        raise end
    return end
