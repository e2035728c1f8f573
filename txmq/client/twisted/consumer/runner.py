"""Handlers on the reactor's thread: each has messages that it acks or nacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import iscoroutine
from typing import Any, TypeAlias

from twisted.internet.defer import Deferred, DeferredList

from txmq.client.protocol.consumer.fetched import DeliveredMessage
from txmq.client.protocol.consumer.handlers import HandlerOptions, failed_messages
from txmq.client.twisted.consumer.members import ReactorMembers

Handler: TypeAlias = Callable[..., object]
"""A function of a message or a list; it may return a Deferred or a coroutine."""


async def run_on_reactor(
    members: ReactorMembers, handler: Handler, options: HandlerOptions
) -> None:
    """Run a handler without an inbox. Raises the error that ended the work."""
    runner = ReactorRunner(members, handler, options)
    workers = [Deferred.fromCoroutine(runner.work()) for _ in range(options.workers)]
    ends: list[tuple[bool, Any]] = await DeferredList(workers, consumeErrors=True)
    for succeeded, end in ends:
        if not succeeded:
            raise end.value


class ReactorRunner:
    """The workers of one run."""

    def __init__(self, members: ReactorMembers, handler: Handler, options: HandlerOptions) -> None:
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
            while not members.closed and not self._ended:
                messages = await members.receive_many(most, options.idle_exit)
                if messages:
                    with members.working():
                        await self._process(
                            await members.filled(messages, most, options.batch_wait)
                        )
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

    async def _process(self, messages: Sequence[DeliveredMessage]) -> None:
        try:
            answer = self._handler(messages[0] if self._options.batch is None else messages)
            if isinstance(answer, Deferred) or iscoroutine(answer):
                await answer
        except Exception as error:  # noqa: BLE001  # a handler may raise anything
            self._members.nack_many(failed_messages(messages, error), error=error)
        else:
            self._members.ack_many(messages)
