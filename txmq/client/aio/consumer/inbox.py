"""Handlers with exactly one effect on asyncio.

`txmq.client.protocol.awaited.inbox` has the steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from inspect import isawaitable
from typing import Any

from txmq.client.aio.consumer.group_member import LoopMember
from txmq.client.aio.consumer.members import LoopMembers
from txmq.client.aio.consumer.runner import Worker
from txmq.client.protocol.awaited import inbox
from txmq.client.protocol.awaited.inbox import EVERY_S, InboxWork, Stopped, outstanding
from txmq.client.protocol.consumer.fetched import DeliveredMessage
from txmq.tx.postgres.driver import Driver
from txmq.tx.postgres.drivers import async_driver
from txmq.tx.postgres.errors import translated
from txmq.tx.postgres.inbox import Position

Connect = Callable[[], Any]  # of a connection, or an awaitable of one


class Database(inbox.Database):
    """A connection of asyncio, or none yet."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect

    async def connect(self) -> Driver:
        with translated("connecting to PostgreSQL"):
            connection = self._connect()
            if isawaitable(connection):
                connection = await connection
            # psycopg has it; connections of asyncpg have no other mode.
            if (set_autocommit := getattr(connection, "set_autocommit", None)) is not None:
                await set_autocommit(True)
        self._driver = async_driver(connection)
        return self._driver

    async def close(self) -> None:
        driver, self._driver = self._driver, None
        if driver is not None and not driver.closed:
            with suppress(Exception):  # it is not needed any more
                closing = driver.connection.close()
                if isawaitable(closing):
                    await closing


class Inbox(inbox.Inbox):
    """The inbox of one member, and the task that tends it."""

    def __init__(self, member: LoopMember, database: Database) -> None:
        super().__init__(member, member.core, database)
        self._lock = asyncio.Lock()
        self._name = f"txmq-{member.settings.group}-inbox"
        self._task: asyncio.Task[None] | None = None

    async def open(self, driver: Driver, position: Position, topic: str) -> int:
        async with self._lock:
            return await self._openings.open_position(driver, position, topic)

    def start(self) -> None:
        """Begin to tend the inbox."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name=self._name)

    async def stop(self) -> None:
        """Fold a last time and end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        try:
            await self.tend(closing=True)
        finally:
            await self._database.close()

    async def _run(self) -> None:
        while True:
            await self.tend()
            await asyncio.sleep(EVERY_S)


class InboxWorker(InboxWork, Worker):
    """A worker with a connection of its own: see InboxWork."""

    async def process(self, messages: Sequence[DeliveredMessage]) -> None:
        try:
            await self.apply_all(messages)
        except Stopped:
            self._source.give_back(outstanding(messages))

    async def end(self) -> None:
        await self._database.close()

    async def _finished(self, answer: object) -> None:
        await self.finished(answer)

    async def _sleep(self, seconds: float) -> None:
        self.raise_if_cancelled()
        await asyncio.sleep(seconds)


async def run_with_inbox(
    members: LoopMembers,
    new_database: Callable[[], Database],
    run: Callable[[Mapping[object, Inbox]], Awaitable[None]],
) -> None:
    """Tend the inboxes of the members while `run` has their messages handled."""
    inboxes: dict[object, Inbox] = {}

    def tend(member: LoopMember) -> None:
        inboxes[member.owner] = Inbox(member, new_database())
        inboxes[member.owner].start()

    for member in members.members:
        tend(member)
    members.on_added.append(tend)  # for members that are added
    try:
        await run(inboxes)
    finally:
        members.on_added.remove(tend)
        await asyncio.gather(*(one.stop() for one in inboxes.values()))
