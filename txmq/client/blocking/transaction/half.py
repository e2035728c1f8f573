"""Half messages in a block: stored before the local work, decided after it.

`txmq.client.protocol.awaited.half` has the steps.
"""

from __future__ import annotations

from txmq.client.blocking.core import BlockingCore
from txmq.client.blocking.transaction.broker_bundle import BrokerBundle
from txmq.client.blocking.transaction.transaction import Transaction
from txmq.client.protocol.awaited.half import HalfSteps
from txmq.client.protocol.transaction.lifecycle import Stage
from txmq.faces import run


class HalfTransaction(Transaction, HalfSteps[BrokerBundle, BlockingCore]):
    """A block of sends, then `prepare()`, then local work.

    The end of the block commits, an exception rolls back. `prepare` returns once the
    half message is durable: if this process dies during the work, the broker asks the
    checker. Without `prepare` the message is stored and committed after the work. A
    crash in between then leaves the work without its message.
    """

    def __init__(
        self, core: BlockingCore, checker: str, *, timeout: float, check_after: float
    ) -> None:
        super().__init__(core, timeout=timeout, check_after=check_after)
        self._ask(checker)

    def prepare(self) -> None:
        """Store the half message; nothing can be sent after it.

        Raises as `client.send` does.
        """
        self._require(Stage.OPEN)
        run(self._prepare())
