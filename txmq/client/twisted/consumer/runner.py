"""Handlers on the reactor's thread: each has messages that it acks or nacks."""

from __future__ import annotations

from asyncio import isfuture
from collections.abc import Callable, Sequence
from inspect import isawaitable
from typing import Any, TypeAlias

from twisted.internet.defer import CancelledError, Deferred, DeferredList
from twisted.internet.task import deferLater

from txmq.client.protocol.consumer.fetched import DeliveredMessage
from txmq.client.protocol.consumer.handlers import (
    HandlerOptions,
    failed_messages,
    require_finished,
)
from txmq.client.twisted.consumer.members import ReactorMembers

Handler: TypeAlias = Callable[..., object]
"""A function of a message or a list; it may return a Deferred, a coroutine or an
asyncio future.
"""


class Run(Deferred[None]):
    """The end of a run: fires when all work has ended, fails with the error that ended
    it.

    To cancel it calls `stop`; then it fails with CancelledError, and still not before
    the work has ended.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        super().__init__()
        self._stop, self._cancelled = stop, False

    def cancel(self) -> None:
        """Ask the work to end."""
        if not self.called and not self._cancelled:
            self._cancelled = True
            self._stop()

    def end(self, error: BaseException | None = None) -> None:
        """Fire: the work has ended."""
        if error is None and not self._cancelled:
            self.callback(None)
        else:
            self.errback(error or CancelledError())


def run_on_reactor(members: ReactorMembers, handler: Handler, options: HandlerOptions) -> Run:
    """Run a handler without an inbox. To cancel the run cancels what handlers wait for;
    their messages are delivered again.
    """
    runner = ReactorRunner(members, handler, options)
    workers = [Deferred.fromCoroutine(runner.work()) for _ in range(options.workers)]

    def cancel_workers() -> None:
        for worker in workers:
            worker.cancel()

    def stop() -> None:
        runner.cancelled = True
        # A handler may be the caller, and a coroutine that runs cannot be cancelled.
        members.reactor.callLater(0, cancel_workers)

    run = Run(stop)

    def ended(ends: list[tuple[bool, Any]]) -> None:
        errors = [end.value for succeeded, end in ends if not succeeded]
        if runner.cancelled:
            errors = [error for error in errors if not isinstance(error, CancelledError)]
        run.end(next(iter(errors), None))

    DeferredList(workers, consumeErrors=True).addCallback(ended)
    return run


class ReactorRunner:
    """The workers of one run. `cancelled`: what they wait for is being cancelled."""

    def __init__(self, members: ReactorMembers, handler: Handler, options: HandlerOptions) -> None:
        self.cancelled = False
        self._members, self._handler, self._options = members, handler, options
        self._idle_since = members.reactor.seconds()
        self._ended = False

    async def work(self) -> None:
        """Work until the consumer is closed, all workers were idle for long enough, or
        one of them has failed.
        """
        members, options = self._members, self._options
        most = options.batch or 1
        try:
            while not (members.closed or self._ended or self.cancelled):
                messages = await members.receive_many(most, options.idle_exit)
                if messages:
                    with members.working():
                        await self._fill_and_process(messages)
                    self._idle_since = members.reactor.seconds()
                elif self._is_idle():
                    return
        finally:
            self._ended = True

    def _is_idle(self) -> bool:
        longest = self._options.idle_exit
        if longest is None or self._members.handlers:
            return False
        return bool(self._members.reactor.seconds() - self._idle_since >= longest)

    async def _fill_and_process(self, messages: list[DeliveredMessage]) -> None:
        most, batch_wait = self._options.batch or 1, self._options.batch_wait
        try:
            await self._process(await self._members.filled(messages, most, batch_wait))
        except CancelledError:
            for message in messages:
                if message.in_hand:
                    self._members.member_of(message).postpone(message, 0.0)
            raise

    async def _process(self, messages: Sequence[DeliveredMessage]) -> None:
        """Handle the messages, as often in place as the consumer may, and settle
        them.
        """
        members, error = self._members, await self._attempt(messages)
        attempts = None if error is None else members.in_place()
        while error is not None and attempts is not None:
            pause = attempts.pause_after(error, messages)
            if pause is not None:
                await deferLater(members.reactor, pause)
            if pause is None or members.closed:
                members.nack_many(failed_messages(messages, error), error=error)
                return
            members.count(retried=len(messages))
            error = await self._attempt(messages)

    async def _attempt(self, messages: Sequence[DeliveredMessage]) -> Exception | None:
        """Handle and ack the messages. Return the error if that fails."""
        try:
            answer = self._handler(messages[0] if self._options.batch is None else messages)
            require_finished(await _result_of(answer))
        except Exception as error:
            if self.cancelled and isinstance(error, CancelledError):
                raise
            return error  # a handler may raise anything
        self._members.ack_many(messages)
        return None


async def _result_of(answer: object) -> object:
    """Return what the handler's Deferred, coroutine or asyncio future ends with."""
    if isfuture(answer):
        return await Deferred.fromFuture(answer)
    return await answer if isawaitable(answer) else answer
