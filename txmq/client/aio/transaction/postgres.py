"""Transactions on asyncio that PostgreSQL decides by its COMMIT.

`txmq.client.protocol.awaited.postgres` has the steps.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Self

from txmq.client.aio.core import AioCore
from txmq.client.aio.transaction.bundle import AioBundle
from txmq.client.aio.transaction.caller_transaction import CallerTransaction, not_begun
from txmq.client.protocol.awaited.postgres import PostgresSteps
from txmq.client.protocol.transaction.lifecycle import Stage
from txmq.tx.postgres.caller import savepoint
from txmq.tx.postgres.caller_block import CallerBlock
from txmq.tx.postgres.drivers import async_driver


class PostgresTransaction(CallerTransaction, PostgresSteps[AioBundle, AioCore]):
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

    async def __aenter__(self) -> Self:
        self._require(Stage.NEW)
        await super().__aenter__()
        self._stage = Stage.NEW
        try:
            await self._block.begin()
        except BaseException as error:
            await self._block.give_back()
            not_begun(error)
            raise
        self._stage = Stage.OPEN
        return self

    async def _give_back(self) -> None:
        await self._block.give_back()

    async def _commit(self) -> None:
        await self._end_in_commit()

    async def _abort(self) -> None:
        await self._end_in_rollback()

    def _database_savepoint(self) -> AbstractAsyncContextManager[None]:
        return savepoint(self._driver)
