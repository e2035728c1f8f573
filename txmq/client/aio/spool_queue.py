"""Sends of a client with a spool, which a thread's sender makes.

A disk needs threads anyway, and so there is one queue for all: that of the blocking
client. The messages of one turn of the loop go to the thread together, and receipts
come back together.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from asyncio import Future as LoopFuture
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import NamedTuple, TypeVar

from txmq.client.aio.core import finish
from txmq.client.blocking.spooling_client import SpoolingClient
from txmq.model.causation import with_cause
from txmq.model.message import Message, Receipt

T = TypeVar("T")


class Unsent(NamedTuple):
    """A message on its way to the thread."""

    topic: str
    message: Message
    partition: int | None
    answer: LoopFuture[Receipt]


class SpoolQueue:
    """The messages on their way to the thread, and their receipts."""

    def __init__(self, loop: AbstractEventLoop, client: SpoolingClient) -> None:
        self._loop, self._send = loop, client.send_message
        self._thread = ThreadPoolExecutor(1, "txmq-spool")
        self._unsent: list[Unsent] = []
        self._scheduled = False
        self._lock = Lock()
        self._answered: list[tuple[LoopFuture[Receipt], Future[Receipt] | Exception]] = []

    def add(
        self, topic: str, message: Message, partition: int | None, answer: LoopFuture[Receipt]
    ) -> None:
        """Send a message with the others of this turn."""
        # Here, because the thread has no cause.
        self._unsent.append(Unsent(topic, with_cause(message), partition, answer))
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.send_now)

    def send_now(self) -> None:
        """Give the messages of this turn to the thread, in their order."""
        self._scheduled = False
        unsent, self._unsent = self._unsent, []
        if unsent:
            self._thread.submit(partial(self._send_all, unsent))

    def _send_all(self, unsent: Sequence[Unsent]) -> None:
        for topic, message, partition, answer in unsent:
            try:
                sent = self._send(topic, message, partition)
            except Exception as error:  # noqa: BLE001  # of the user's partitioner, too
                self._bring_back(answer, error)
            else:
                sent.add_done_callback(partial(self._bring_back, answer))

    def _bring_back(self, answer: LoopFuture[Receipt], result: Future[Receipt] | Exception) -> None:
        """Bring an answer back to the loop, from any thread."""
        with self._lock:
            first = not self._answered
            self._answered.append((answer, result))
        if first and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._give_answers)

    def _give_answers(self) -> None:
        with self._lock:
            answered, self._answered = self._answered, []
        for answer, result in answered:
            if answer.done():  # the caller has cancelled it
                continue
            error = result if isinstance(result, Exception) else result.exception()
            if error is not None:
                answer.set_exception(error)
            elif isinstance(result, Future):
                answer.set_result(result.result())

    async def run(self, call: Callable[[], T]) -> T:
        """Make a call in the thread, after everything sent so far. A cancellation comes
        once the call has ended.
        """

        async def made() -> T:
            return await self._loop.run_in_executor(self._thread, call)

        return await finish(self._loop.create_task(made()))

    def stop(self) -> None:
        """End the thread, which has nothing to do any more."""
        self._thread.shutdown()
