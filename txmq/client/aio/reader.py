"""Readers: all messages of topics, without a consumer group, on asyncio.

`txmq.client.protocol.awaited.reader` has what readers do on any event loop.
"""

from __future__ import annotations

import asyncio
from asyncio import AbstractEventLoop, Future
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from functools import partial
from typing import ParamSpec, Self, TypeVar

from txmq.client.aio.closing import AioCloseable
from txmq.client.aio.connection import AioConnection
from txmq.client.aio.core import AioCore, finish
from txmq.client.aio.loop import expire
from txmq.client.protocol.awaited.reader import (
    REPLY_S,
    EventReader,
    EventReaders,
    Source,
    second_receiver,
)
from txmq.client.protocol.offsets import OffsetsByLog, OffsetStore
from txmq.client.protocol.reader import SAVE_S, ReaderRequest, ReaderStart, ReaderState
from txmq.client.protocol.typed.bodies import Topics
from txmq.errors import ConnectionLost, RequestTimeout
from txmq.model.durations import Duration, seconds_of
from txmq.model.message import ReceivedMessage
from txmq.model.topic_partition import PartitionName

P = ParamSpec("P")
T = TypeVar("T")


class Receiving(Source, AioCloseable):
    """The waits for a reader, of one broker or of several, in one coroutine."""

    _loop: AbstractEventLoop
    _core: AioCore
    _receiver: Future[None] | None = None
    _closing: asyncio.Task[None] | None = None

    async def open(self) -> Self:
        """Load the positions. Raises UnknownTopic, LogChanged, and as a call does."""
        await self._open()
        return self

    async def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        while (message := await self.receive()) is not None:
            yield message

    async def receive(self, timeout: Duration | None = None) -> ReceivedMessage | None:  # noqa: ASYNC109  # as of the other faces
        """Return the next message; None after `timeout` seconds, and once the reader is
        closed.

        The message before it counts as processed. The reader connects again by itself.
        Raises the error that ended it, and LocalProtocolError while another call waits.
        To cancel it loses no message.
        """
        if self._receiver is not None:
            raise second_receiver()
        self._core.seconds()  # on this loop
        self.mark_processed()
        try:
            async with asyncio.timeout(seconds_of(timeout, "timeout")):
                while True:
                    self.raise_failure()
                    if (ready := self.next_ready()) is not None or self.closed:
                        return ready
                    self._receiver = self._loop.create_future()
                    await self._receiver
        except TimeoutError:
            return None
        finally:
            self._receiver = None

    def _wake(self) -> None:
        """Have the receiver look again."""
        if self._receiver is not None and not self._receiver.done():
            self._receiver.set_result(None)

    async def commit(self) -> None:
        """Save the positions now; the last message counts as processed."""
        await self._commit()

    async def close(self) -> None:
        """Save the positions and close.

        The last message does not count as processed: see `commit`.
        """
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        elif self._closing.done():
            return  # the first caller has had its error
        await finish(self._closing)


class Reader(Receiving, EventReader[AioConnection]):
    """A reader of one broker, for one coroutine at a time. Made by `client.reader`;
    otherwise as the blocking one.

    `async for message in reader` gives messages until it is closed. A message is
    processed when the next one is requested.
    """

    def __init__(
        self,
        core: AioCore,
        name: str,
        topics: Topics,
        store: OffsetStore,
        start: ReaderStart,
        deliver: Callable[[], None] | None = None,
    ) -> None:
        """`deliver` is called when a message, an error or the end may have come.

        Raises LocalProtocolError for an invalid name, start or topics.
        """
        super().__init__(ReaderState(name, topics, start), store)
        self._core, self._calls, self._loop = core, core, core.loop
        self._deliver = deliver or self._wake
        self._store_lock = asyncio.Lock()  # one thread at a time uses a store
        self._upkeep: asyncio.Task[None] | None = None

    async def assign(self, partitions: Collection[PartitionName] | None) -> None:
        """Read only these partitions from now on, or (None) all.

        The last message counts as processed.
        """
        await self._assign(partitions)

    def _start(self) -> None:
        self._connection = self._core.open_connection(self._attach, self._fail)
        self._upkeep = self._loop.create_task(self._keep_saving(), name=f"txmq-reader-{self.name}")

    def _after(self, seconds: float, function: Callable[[], None]) -> asyncio.TimerHandle:
        return self._loop.call_later(seconds, function)

    async def _keep_saving(self) -> None:
        while not self.closed:
            await asyncio.sleep(SAVE_S)
            await self._keep_up()

    async def _stop_upkeep(self) -> None:
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.wait([self._upkeep])

    async def _in_store(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        async def call() -> T:
            async with self._store_lock:
                return await asyncio.to_thread(function, *args, **kwargs)

        # A thread cannot be cancelled: the next call must not begin beside it.
        return await finish(self._loop.create_task(call()))

    def _attach(self, link: AioConnection) -> None:
        link.lost.add_done_callback(lambda _lost: self._lost(link))
        self._attached(link)

    def _send(self, link: AioConnection, name: PartitionName, request: ReaderRequest) -> None:
        try:
            reply = link.request(*request)
        except ConnectionLost:  # `_lost` follows
            return
        expire(self._loop, reply, REPLY_S, RequestTimeout("no answer"))
        replied = partial(self._replied, self._round, link, name)
        reply.add_done_callback(lambda reply: replied(reply.exception() or reply.result()))


class Readers(Receiving, EventReaders):
    """A reader of several brokers, for one coroutine at a time.

    Made by `cluster.reader`, and used as a Reader. Partitions of different brokers have
    the same numbers, so `positions` and `assign` are for readers of one broker.
    """

    def __init__(
        self,
        cores: Sequence[AioCore],
        name: str,
        topics: Topics,
        store: OffsetStore,
        start: ReaderStart,
    ) -> None:
        """Raises LocalProtocolError for an invalid name, start or topics."""
        by_log = OffsetsByLog(store)
        names = topics if isinstance(topics, str) else list(topics)
        super().__init__(
            name, [Reader(core, name, names, by_log, start, self._wake) for core in cores]
        )
        self._store, self._core, self._loop = store, cores[0], cores[0].loop

    def _deliver(self) -> None:
        self._wake()

    async def _close_store(self) -> None:
        await asyncio.to_thread(self._store.close)
