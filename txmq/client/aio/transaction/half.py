"""Half messages in a block on asyncio.

`txmq.client.protocol.awaited.half` has the steps.
"""

from __future__ import annotations

from txmq.client.aio.core import AioCore
from txmq.client.aio.transaction.bundle import AioBundle
from txmq.client.aio.transaction.transaction import Transaction
from txmq.client.protocol.awaited.half import HalfSteps
from txmq.client.protocol.transaction.lifecycle import Stage


class HalfTransaction(Transaction, HalfSteps[AioBundle, AioCore]):
    """A block of sends, then `await tx.prepare()`, then local work.

    The end of the block commits, an exception rolls back. `prepare` returns once the
    half message is durable: if this process dies during the work, the broker asks the
    checker. Without `prepare` the message is stored and committed after the work. A
    crash in between then leaves the work without its message.
    """

    def __init__(self, core: AioCore, checker: str, *, timeout: float, check_after: float) -> None:
        super().__init__(core, timeout=timeout, check_after=check_after)
        self._ask(checker)

    async def prepare(self) -> None:
        """Store the half message; nothing can be sent after it.

        Raises as `client.send` does.
        """
        self._require(Stage.OPEN)
        await self._in_full(self._prepare())
