"""Handlers with an inbox, for consumers on Twisted: the inbox of asyncio, whose
connections block. Each worker has a thread for its connection and its handler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from txmq.client.aio.consumer import inbox
from txmq.client.aio.consumer.members import LoopMembers
from txmq.client.aio.consumer.runner import Handler, Run
from txmq.client.aio.core import finish
from txmq.client.protocol.awaited.inbox import Stopped
from txmq.client.protocol.consumer.handlers import HandlerOptions
from txmq.client.twisted.threads import OneThread
from txmq.tx.postgres.driver import Driver
from txmq.tx.postgres.drivers import driver_in_thread
from txmq.tx.postgres.errors import translated

if TYPE_CHECKING:
    from txmq.tx.postgres.driver import BlockingConnection

    Connect = Callable[[], BlockingConnection]


class ThreadDatabase(inbox.Database):
    """A connection that blocks, in a thread of its own, or none yet."""

    def __init__(self, connect: Connect) -> None:
        super().__init__(connect)
        self.thread = OneThread("txmq-inbox")

    async def connect(self) -> Driver:
        with translated("connecting to PostgreSQL"):
            connection = await self.thread.call(self._open)
        self._driver = driver_in_thread(connection, self.thread.call)
        return self._driver

    def _open(self) -> BlockingConnection:
        connection: BlockingConnection = self._connect()
        connection.autocommit = True
        return connection

    async def close(self) -> None:
        driver, self._driver = self._driver, None
        if driver is not None:
            await self.thread.call(driver.connection.close)
        self.thread.stop()


class ThreadWorker(inbox.InboxWorker):
    """A worker whose handler runs in the thread of its connection."""

    def __init__(
        self,
        members: LoopMembers,
        inboxes: Mapping[object, inbox.Inbox],
        handler: Handler,
        database: ThreadDatabase,
        *,
        lists: bool,
    ) -> None:
        def handle(*arguments: object) -> object:
            return database.thread.call(partial(handler, *arguments))

        super().__init__(members, inboxes, handle, database, lists=lists)

    async def _sleep(self, seconds: float) -> None:
        if await self.run.has_ended(seconds):
            raise Stopped


async def run_in_threads(
    members: LoopMembers, handler: Handler, connect: Connect, options: HandlerOptions
) -> None:
    """Run a handler in threads. A cancellation ends the work; handlers finish."""
    run = Run(members, options)

    async def apply(inboxes: Mapping[object, inbox.Inbox]) -> None:
        await run.work(
            [
                ThreadWorker(
                    members,
                    inboxes,
                    handler,
                    ThreadDatabase(connect),
                    lists=options.batch is not None,
                )
                for _ in range(options.workers)
            ]
        )

    work = asyncio.ensure_future(
        inbox.run_with_inbox(members, partial(ThreadDatabase, connect), apply)
    )
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        run.end()
        await finish(work)
        raise
