"""Check-backs on asyncio: one task with a connection of its own waits for questions.

The broker asks the process first that has stored the half message, whether or not it
has registered the checker: while the block is open there, the answer is UNKNOWN. Else
it asks any process of the service with the checker. Checkers run in another task, so
that a slow one does not keep the broker from learning what is open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from inspect import isawaitable

from txmq.client.aio.connection import AioConnection, PersistentConnection
from txmq.client.aio.core import AioCore
from txmq.client.aio.loop import expire
from txmq.client.log import get_logger
from txmq.client.protocol.transaction.checks import (
    ANSWER_S,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    SLOW_S,
    WAIT_MS,
    CheckAnswer,
    Half,
    answer_args,
    answer_of,
    answer_of_failed,
    checked_name,
    halves_in,
    wait_args,
)
from txmq.client.protocol.transaction.open_work import REASON, is_open
from txmq.crashpoints import crashpoint
from txmq.errors import RequestRejected, RequestTimeout, TxmqError
from txmq.model.message import UNKNOWN, Decision
from txmq.wire.calls.encoding import encode_call
from txmq.wire.data_requests import Opcode
from txmq.wire.json import parse_result

Checker = Callable[[Half], Decision | Awaitable[Decision]]
log = get_logger()


class Checkers:
    """The checkers registered in this process, and their task."""

    def __init__(self, core: AioCore) -> None:
        self._core = core
        self._functions: dict[str, Checker] = {}
        self._task: asyncio.Task[None] | None = None
        self._working: asyncio.Task[None] | None = None  # runs the checkers
        self._connection: PersistentConnection | None = None
        self._link: AioConnection | None = None
        self._polling = False  # the task only waits for questions

    def register(self, name: str, function: Checker) -> None:
        """Answer questions of that checker from now on.

        Raises ConfigError if the client has no service, or LocalProtocolError.
        """
        name = checked_name(self._core.settings.service, name, function)
        new = name not in self._functions
        self._functions[name] = function
        if new and self._polling and self._link is not None:
            self._link.abort()  # the running poll names the other checkers only
        self.start()

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
                link = await self._connection.wait_connected(self._core.settings.timeout)
                await self._poll(link)
                pause = FIRST_PAUSE_S
            except TxmqError as error:
                log.warning("checkers.disconnected", error=error.message)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _poll(self, link: AioConnection) -> None:
        busy = self._working is not None and not self._working.done()
        checkers = [] if busy else sorted(self._functions)
        wait_ms = int(SLOW_S * 1_000) if busy else WAIT_MS
        args = wait_args(self._core.settings.service, checkers, wait_ms)
        self._polling = not busy
        try:
            reply = link.request(Opcode.CALL, encode_call("checks.wait", args))
            late = RequestTimeout("no answer to the wait for check-backs")
            payload = await expire(self._core.loop, reply, wait_ms / 1_000 + ANSWER_S, late)
        except RequestTimeout:
            link.abort()
            raise
        finally:
            self._polling = False
        for_checkers: list[Half] = []
        for half in halves_in(parse_result(payload)):
            if is_open(half.token):
                await self._answer(half, CheckAnswer(UNKNOWN, REASON, open=True))
            elif half.checker in checkers:
                for_checkers.append(half)
            else:
                await self._answer(half, CheckAnswer(UNKNOWN, passed=True))
        if for_checkers:
            self._working = self._core.loop.create_task(
                self._run_checkers(for_checkers), name="txmq-checker"
            )
            await asyncio.wait([self._working], timeout=SLOW_S)

    async def _run_checkers(self, halves: Sequence[Half]) -> None:
        for half in halves:
            await self._answer(half, await self._run_checker(half))

    async def _run_checker(self, half: Half) -> CheckAnswer:
        try:
            decision = self._functions[half.checker](half)
            return answer_of(half, await decision if isawaitable(decision) else decision)
        except Exception as error:  # noqa: BLE001  # the user's code may raise anything
            return answer_of_failed(half, error)

    async def _answer(self, half: Half, answer: CheckAnswer) -> None:
        crashpoint("checker.before_answer")
        try:
            await self._core.call("checks.answer", answer_args(half, answer), within=ANSWER_S)
            crashpoint("checker.after_answer")
        except RequestRejected as refused:
            # The transaction was decided meanwhile; the broker records a conflict.
            log.warning("checkers.answer_refused", token=str(half.token), error=refused.message)
        except TxmqError as error:  # the broker asks again
            log.warning("checkers.not_answered", token=str(half.token), error=error.message)
