"""Handlers on an event loop: each has messages that it acks or nacks."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from inspect import isawaitable
from typing import Any, TypeAlias

from txmq.client.aio.consumer.members import LoopMembers
from txmq.client.protocol.consumer.fetched import DeliveredMessage
from txmq.client.protocol.consumer.handlers import (
    HandlerOptions,
    failed_messages,
    require_finished,
)
from txmq.model.causation import current_cause

Handler: TypeAlias = Callable[..., object]
"""A function of a message or a list; it may return a coroutine or another awaitable."""


class Worker(ABC):
    """One of the workers of a run: it handles the messages of one call at a time."""

    run: Run  # which it is one of

    def __init__(self, members: LoopMembers) -> None:
        self._members = members

    def raise_if_cancelled(self) -> None:
        """Raise CancelledError where the run is cancelled.

        A handler may have cancelled its own task, which then is to go on.
        """
        if self.run.cancelled:
            raise asyncio.CancelledError
        task = asyncio.current_task()
        while task is not None and task.cancelling():
            task.uncancel()

    async def finished(self, answer: object) -> None:
        """Wait for what the handler has returned. Raises LocalProtocolError where its
        work may not be done, and RuntimeError where it was cancelled, but not the run.
        """
        task = asyncio.current_task()
        try:
            require_finished(await answer if isawaitable(answer) else answer)
            if task is not None and task.cancelling():
                await asyncio.sleep(0)  # the cancellation comes here
        except asyncio.CancelledError as error:
            self.raise_if_cancelled()
            raise RuntimeError("the handler was cancelled, or what it awaited") from error

    @abstractmethod
    async def process(self, messages: Sequence[DeliveredMessage]) -> None:
        """Handle the messages and settle them."""

    @abstractmethod
    async def end(self) -> None:
        """Let go of what the worker has, at the end of the run."""


class PlainWorker(Worker):
    """A worker whose handler is called without an inbox."""

    def __init__(self, members: LoopMembers, handler: Handler, *, lists: bool) -> None:
        super().__init__(members)
        self._handler, self._lists = handler, lists

    async def process(self, messages: Sequence[DeliveredMessage]) -> None:
        """Handle the messages, as often in place as the consumer may, and settle
        them.
        """
        try:
            await self._process(messages)
        except SystemExit as error:  # counts as a failure, or the next process would end, too
            self._members.nack_many(failed_messages(messages, error), error=error)
            raise

    async def _process(self, messages: Sequence[DeliveredMessage]) -> None:
        members, error = self._members, await self._attempt(messages)
        attempts = None if error is None else members.in_place()
        while error is not None and attempts is not None:
            pause = attempts.pause_after(error, messages)
            if pause is not None:
                await asyncio.sleep(pause)
            if pause is None or members.closed:
                members.nack_many(failed_messages(messages, error), error=error)
                return
            members.count(retried=len(messages))
            error = await self._attempt(messages)

    async def _attempt(self, messages: Sequence[DeliveredMessage]) -> BaseException | None:
        """Handle and ack the messages. Return the error if that fails."""
        cause = current_cause.set(None if self._lists else messages[0])
        try:
            await self.finished(self._handler(messages if self._lists else messages[0]))
        except Exception as error:  # noqa: BLE001  # a handler may raise anything
            return error
        finally:
            current_cause.reset(cause)
        self._members.ack_many(messages)
        return None

    async def end(self) -> None:
        """Do nothing: there is nothing to let go of."""


async def run_workers(
    members: LoopMembers, options: HandlerOptions, workers: Sequence[Worker]
) -> None:
    """Work until the consumer is closed, all workers were idle for long enough, or one
    of them has failed.

    A worker that handles messages may finish them. Where the call is cancelled, the
    handlers are, and their messages are delivered again. No task outlives the call.
    """
    await Run(members, options).work(workers)


class Run:
    """The work of one call of `run`."""

    def __init__(self, members: LoopMembers, options: HandlerOptions) -> None:
        self._members, self._options = members, options
        self._idle_since = members.loop.time()
        self._ended = asyncio.Event()
        self._caller: asyncio.Task[Any] | None = None
        self._receiving = set[asyncio.Task[None]]()

    @property
    def cancelled(self) -> bool:
        """True once the call of `run` is cancelled, and with it its workers."""
        return self._caller is not None and self._caller.cancelling() > 0

    async def work(self, workers: Sequence[Worker]) -> None:
        """Run the workers; see `run_workers`."""
        loop, self._caller = self._members.loop, asyncio.current_task()
        for worker in workers:
            worker.run = self
        tasks = [
            loop.create_task(self._work(worker), name=f"txmq-{self._members.settings.group}-{n}")
            for n, worker in enumerate(workers)
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self.end()
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            self._ended.set()
            for task in tasks:
                task.cancel()
            while not all(task.done() for task in tasks):
                try:
                    await asyncio.wait(tasks)
                except asyncio.CancelledError:
                    continue  # each has been told to end
            raise
        finally:
            # Each error is retrieved, and the first one is raised.
            errors = [task.exception() for task in tasks if task.done() and not task.cancelled()]
        for error in errors:
            if error is not None:
                raise error

    def end(self) -> None:
        """Have the workers end. They may finish the messages that they handle."""
        self._ended.set()
        for task in list(self._receiving):
            task.cancel()

    async def has_ended(self, seconds: float) -> bool:
        """Wait so many seconds; return True as soon as the workers are to end."""
        try:
            async with asyncio.timeout(seconds):
                return await self._ended.wait()
        except TimeoutError:
            return False

    async def _work(self, worker: Worker) -> None:
        try:
            await self._loop(worker)
        finally:
            await worker.end()

    async def _loop(self, worker: Worker) -> None:
        members, options = self._members, self._options
        task = asyncio.current_task()
        assert task is not None, "a worker is a task"
        while not (members.closed or self._ended.is_set()):
            self._receiving.add(task)
            try:
                messages = await members.receive_many(options.batch or 1, options.idle_exit)
            finally:
                self._receiving.discard(task)
            if messages:
                with members.working():
                    await self._fill_and_process(worker, messages)
                self._idle_since = members.loop.time()
            elif self._is_idle():
                return

    def _is_idle(self) -> bool:
        longest = self._options.idle_exit
        if longest is None or self._members.handlers:
            return False
        return self._members.loop.time() - self._idle_since >= longest

    async def _fill_and_process(self, worker: Worker, messages: list[DeliveredMessage]) -> None:
        most, batch_wait = self._options.batch or 1, self._options.batch_wait
        try:
            if batch_wait:
                messages = await self._members.filled(messages, most, batch_wait)
            await worker.process(messages)
        except BaseException:  # cancelled: handlers' own errors end as nacks
            self._members.postpone(messages)
            raise
