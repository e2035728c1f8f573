"""Transactions on asyncio that PostgreSQL decides by its COMMIT.

`txmq.client.protocol.awaited.postgres` has the steps.
"""

from __future__ import annotations

from txmq.client.aio.core import AioCore
from txmq.client.aio.transaction.bundle import AioBundle
from txmq.client.aio.transaction.transaction import Transaction
from txmq.client.protocol.awaited.postgres import PostgresSteps
from txmq.tx.postgres.caller_block import CallerBlock
from txmq.tx.postgres.drivers import async_driver


class PostgresTransaction(Transaction, PostgresSteps[AioBundle, AioCore]):
    """Rows written on `connection` and messages sent in the block, both or neither.

    The block returns after COMMIT. After TransactionAborted, DatabaseConflict or
    DatabaseUnavailable neither exists. InDoubt, with the token, says that the outcome
    could not be found out in time; the broker's resolver will find it.
    """

    def __init__(
        self,
        core: AioCore,
        connection: object,
        *,
        timeout: float,
        check_after: float,
        allow_weak_commit: bool,
        outbox: bool = False,
    ) -> None:
        super().__init__(core, timeout=timeout, check_after=check_after)
        driver = async_driver(connection)
        block = CallerBlock(driver, self.token, self._sends)
        self._use(driver, block, outbox=outbox, allow_weak=allow_weak_commit)
