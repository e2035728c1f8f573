"""Two-phase commit over several PostgreSQL databases and brokers.

`txmq.client.protocol.awaited.xa` has the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

from txmq.client.blocking.concurrently import run_concurrently
from txmq.client.blocking.core import BlockingCore
from txmq.client.blocking.transaction.broker_bundle import BrokerBundle
from txmq.client.blocking.transaction.transaction import Transaction
from txmq.client.protocol.awaited.xa import Step, XaSteps, require_connections
from txmq.client.protocol.transaction.prepared_slots import SlotDemand, prepared_slots
from txmq.faces import run
from txmq.tx.postgres.driver import BlockingConnection
from txmq.tx.postgres.drivers import blocking_driver

T = TypeVar("T")


class XaTransaction(Transaction, XaSteps[BrokerBundle, BlockingCore]):
    """Rows on several connections and messages sent in the block, all or none.

    The block returns once the transaction is committed. `unfinished` has the gids of
    branches whose database could not be reached: recovery commits them, and their rows
    stay locked until then. The block raises InDoubt if the home broker did not answer,
    HeuristicMixed if an operator had ended a branch otherwise, and else the reason of
    the rollback.

    For one database prefer `client.transaction(connection)`: half the cost, and nothing
    is left prepared. A single branch that wrote, without any message, is committed in
    one phase. Branches that only read end after the decision, so that no NOTIFY goes
    out of a transaction that was rolled back.
    """

    def __init__(
        self,
        core: BlockingCore,
        connections: Sequence[BlockingConnection],
        *,
        node: str,
        timeout: float,
        check_after: float,
    ) -> None:
        super().__init__(core, timeout=timeout, check_after=check_after)
        require_connections(connections)
        self._use([blocking_driver(connection) for connection in connections], node)

    async def _at_once(self, steps: Sequence[Step[T]]) -> list[T]:
        return run_concurrently([partial(_run, step) for step in steps])

    async def _reserve_slots(
        self, demand: dict[int, SlotDemand], deadline: float, stack: ExitStack
    ) -> None:
        stack.enter_context(prepared_slots().reserve(demand, deadline))


def _run(step: Step[T]) -> T:
    return run(step())
