"""Handlers on the reactor's thread: so many at a time, each with messages that it acks
or nacks by how it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import iscoroutine
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from twisted.internet.defer import Deferred, DeferredList

from txmq.client.blocking.consumer.runner import check_limits, nack_all
from txmq.client.twisted.inbox import Source as Bridged
from txmq.client.twisted.inbox import run_in_threads

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from txmq.client.protocol.consumer.fetched import DeliveredMessage

Handler: TypeAlias = Callable[
    ..., object
]  # of a message or a list of them; may give a Deferred or a coroutine


class Source(Bridged, Protocol):
    """What handlers need of a consumer, be it of one broker or of several."""

    @property
    def at_work(self) -> int: ...
    async def filled(
        self, found: list[DeliveredMessage], most: int, seconds: float
    ) -> list[DeliveredMessage]: ...


class Limits(NamedTuple):
    """How to run: so many workers, so many messages for one call of the handler, how
    long to wait for so many, and after how many seconds without any to end.
    """

    workers: int
    batch: int | None
    batch_wait: float
    idle_exit: float | None


async def run_handler(
    consumer: Source, handler: Handler, inbox: Callable[[], Connection] | None, limits: Limits
) -> None:
    """What `run` does. Raises LocalProtocolError for what cannot be meant, and why the
    consumer cannot go on.
    """
    check_limits(limits.workers, "workers", limits.batch, limits.batch_wait)
    if inbox is not None:
        await run_in_threads(consumer, handler, inbox, limits)
        return
    runner = Runner(consumer, handler, limits)
    work = [Deferred.fromCoroutine(runner.work()) for _ in range(limits.workers)]
    ends: list[tuple[bool, Any]] = await DeferredList(work, consumeErrors=True)
    for is_well, end in ends:
        if not is_well:
            raise end.value


class Runner:
    """What the workers of one `run` have in common."""

    def __init__(self, consumer: Source, handler: Handler, limits: Limits) -> None:
        self._consumer, self._handler, self._limits = consumer, handler, limits
        self._idle_since = consumer.reactor.seconds()
        self._ended = False

    async def work(self) -> None:
        """Until the consumer is closed, all workers were idle for long enough, or one
        of them cannot go on.
        """
        limits = self._limits
        try:
            while not self._consumer.closed and not self._ended:
                most = limits.batch or 1
                messages = await self._consumer.receive_many(most, limits.idle_exit)
                if messages:
                    with self._consumer.working():
                        await self._handle(
                            await self._consumer.filled(messages, most, limits.batch_wait)
                        )
                    self._idle_since = self._consumer.reactor.seconds()
                elif self._is_idle():
                    return
        finally:
            self._ended = True

    def _is_idle(self) -> bool:
        longest = self._limits.idle_exit
        if longest is None or self._consumer.at_work:
            return False
        return bool(self._consumer.reactor.seconds() - self._idle_since >= longest)

    async def _handle(self, messages: Sequence[DeliveredMessage]) -> None:
        try:
            answer = self._handler(messages[0] if self._limits.batch is None else messages)
            if isinstance(answer, Deferred) or iscoroutine(answer):
                await answer
        except Exception as error:  # whatever a handler raises, its messages failed
            nack_all(self._consumer, messages, error)
        else:
            self._consumer.ack_many(messages)
