"""Check-backs on asyncio: one task with a connection of its own waits for questions,
another one runs the checkers.

`txmq.client.protocol.awaited.checkers` has the steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from inspect import isawaitable
from typing import Any

from txmq.client.aio.connection import AioConnection, PersistentConnection
from txmq.client.aio.core import AioCore
from txmq.client.aio.loop import expire
from txmq.client.log import get_logger
from txmq.client.protocol.awaited.checkers import CheckerSteps
from txmq.client.protocol.transaction.checks import (
    ANSWER_S,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    SLOW_S,
    Half,
)
from txmq.errors import RequestTimeout, TxmqError
from txmq.model.message import Decision
from txmq.wire.calls.encoding import encode_call
from txmq.wire.data_requests import Opcode
from txmq.wire.json import parse_result

Checker = Callable[[Half], Decision | Awaitable[Decision]]
log = get_logger()


class Checkers(CheckerSteps[Checker]):
    """The checkers registered in this process, and their task."""

    def __init__(self, core: AioCore) -> None:
        super().__init__(core)
        self._core = core
        self._task: asyncio.Task[None] | None = None
        self._working: asyncio.Task[None] | None = None  # runs the checkers
        self._connection: PersistentConnection | None = None
        self._link: AioConnection | None = None

    def start(self) -> None:
        """Answer questions about the half messages of this process from now on."""
        if self._task is None and not self._core.closed:
            self._connection = self._core.open_connection(self._attach)
            self._task = self._core.loop.create_task(self._run(), name="txmq-checkers")

    def _attach(self, link: AioConnection) -> None:
        self._link = link

    async def close(self) -> None:
        """Stop waiting for questions, and finish the answer that is being given."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._working is not None:
            await asyncio.wait([self._working], timeout=ANSWER_S)
            self._working.cancel()
            await asyncio.wait([self._working])
        if self._connection is not None:
            await self._connection.stop()

    async def _run(self) -> None:
        pause = FIRST_PAUSE_S
        assert self._connection is not None, "opened by `start`"
        while True:
            try:
                self._link = await self._connection.wait_connected(self._core.settings.timeout)
                await self._poll()
                pause = FIRST_PAUSE_S
            except TxmqError as error:
                log.warning("checkers.disconnected", error=error.message)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)

    @property
    def _busy(self) -> bool:
        return self._working is not None and not self._working.done()

    async def _wait(self, args: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert self._link is not None, "_attach sets it"
        link = self._link
        try:
            reply = link.request(Opcode.CALL, encode_call("checks.wait", args))
            error = RequestTimeout("no answer to the wait for check-backs")
            return parse_result(await expire(self._core.loop, reply, seconds, error))
        except RequestTimeout as late:
            link.give_up(late)
            raise

    def _end_wait(self) -> None:
        if self._link is not None:
            self._link.abort()

    async def _decided(self, answer: object) -> object:
        return await answer if isawaitable(answer) else answer

    async def _begin_checkers(self, halves: Sequence[Half]) -> None:
        self._working = self._core.loop.create_task(self._run_checkers(halves), name="txmq-checker")
        await asyncio.wait([self._working], timeout=SLOW_S)
