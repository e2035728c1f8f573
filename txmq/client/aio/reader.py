"""Readers: all messages of topics, without a consumer group, on asyncio.

`txmq.client.protocol.reader` has the requests and the positions. Each reader has a
connection of its own.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from asyncio import AbstractEventLoop, Future
from collections.abc import AsyncIterator, Callable, Collection
from functools import partial
from typing import ParamSpec, Self, TypeVar
from uuid import UUID

from txmq.client.aio.closing import AsyncCloseable
from txmq.client.aio.connection import AioConnection, PersistentConnection
from txmq.client.aio.core import AioCore, finish
from txmq.client.aio.loop import expire
from txmq.client.log import get_logger
from txmq.client.protocol.offsets import OffsetStore
from txmq.client.protocol.reader import (
    POLL_S,
    REFRESH_S,
    SAVE_S,
    ReaderRequest,
    ReaderStart,
    ReaderState,
)
from txmq.client.protocol.typed.bodies import Topics
from txmq.errors import (
    ConnectionLost,
    LocalProtocolError,
    OffsetOutOfRange,
    RequestTimeout,
    Throttled,
    TxmqError,
    UnknownTopic,
)
from txmq.model.durations import Duration, seconds_of
from txmq.model.message import ReceivedMessage
from txmq.model.topic_partition import PartitionName

REPLY_S = POLL_S + 10.0
P = ParamSpec("P")
T = TypeVar("T")
log = get_logger()


class Receiving(AsyncCloseable):
    """The waits for a reader, of one broker or of several, in one coroutine."""

    closed: bool
    _loop: AbstractEventLoop
    _core: AioCore
    _receiver: Future[None] | None = None
    _closing: asyncio.Task[None] | None = None

    @abstractmethod
    def mark_processed(self) -> None:
        """Count the last message as processed, and have the next ones read."""

    @abstractmethod
    def next_ready(self) -> ReceivedMessage | None:
        """Return the next message if it waits locally."""

    @abstractmethod
    def raise_failure(self) -> None:
        """Raise the error that ended the reader, if there is one."""

    @abstractmethod
    async def _close(self) -> None:
        """Save the positions, and end."""

    @abstractmethod
    async def open(self) -> Self:
        """Load the positions. Raises UnknownTopic, LogChanged, and as a call does."""

    @abstractmethod
    async def _commit(self) -> None:
        """Save the positions; the last message counts as processed."""

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
            raise LocalProtocolError(
                "another call waits for the next message", hint="use a reader in one coroutine"
            )
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

    # Twisted's face takes the next two from this class, whatever the reader is.

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


class Reader(Receiving):
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
        self._state, self._store = ReaderState(name, topics, start), store
        self._core, self._loop = core, core.loop
        self._deliver = deliver or self._wake
        self._log_id: UUID | None = None
        self._connection: PersistentConnection | None = None
        self._link: AioConnection | None = None
        self._round = 0  # replies to requests of an earlier round are ignored
        self._failure: BaseException | None = None
        self._refreshed_at = 0.0
        self._pause: asyncio.TimerHandle | None = None  # that the broker has asked for
        self._store_lock = asyncio.Lock()  # one thread at a time uses a store
        self._upkeep: asyncio.Task[None] | None = None
        self.closed = False

    @property
    def name(self) -> str:
        """The name under which the positions are stored."""
        return self._state.name

    @property
    def positions(self) -> dict[PartitionName, int]:
        """The next message to process of each partition."""
        return self._state.positions

    @property
    def missed(self) -> int:
        """Messages that retention had dropped before they were read."""
        return self._state.missed

    async def open(self) -> Self:
        try:
            self._log_id = await self._core.log_id()
            self._state.load(await self._in_store(self._store.load, self.name, self._log_id))
            await self._refresh()
        except BaseException:
            await self.close()
            raise
        self._connection = self._core.open_connection(self._attached, self._fail)
        self._upkeep = self._loop.create_task(self._keep_saving(), name=f"txmq-reader-{self.name}")
        return self

    async def assign(self, partitions: Collection[PartitionName] | None) -> None:
        """Read only these partitions from now on, or (None) all.

        The last message counts as processed.
        """
        self._state.mark_processed()
        await self._save()
        self._round += 1
        self._state.assign(partitions)
        await self._refresh()
        self._step()

    async def _refresh(self) -> None:
        """Find the partitions of the topics, and the first offsets of new ones."""
        self._refreshed_at = self._core.seconds()
        discovery = await self._state.discover(self._core)
        if discovery is not None:
            await self._save()
            self._state.adopt(discovery)

    def next_ready(self) -> ReceivedMessage | None:
        """Return the next message if it waits locally."""
        if self._over or self._state.is_empty:
            return None
        return self._state.next_message()

    @property
    def _over(self) -> bool:
        """True where nothing more comes: it is closed, or has failed."""
        return self.closed or self._failure is not None

    def raise_failure(self) -> None:
        """Raise the error that ended the reader, if there is one. A topic that was not
        there may be by the next call, which asks again.
        """
        failure = self._failure
        if isinstance(failure, UnknownTopic):
            self._failure = None
        if failure is not None:
            raise failure

    def mark_processed(self) -> None:
        """Count the last message as processed, and have the next ones read."""
        self._state.mark_processed()
        self._request_more()

    async def _commit(self) -> None:
        self._state.mark_processed()
        await self._save()

    async def _keep_saving(self) -> None:
        while not self.closed:
            await asyncio.sleep(SAVE_S)
            await self._keep_up()

    async def _keep_up(self) -> None:
        """Save the positions, and look for new partitions now and then."""
        try:
            await self._save()
            if self._core.seconds() - self._refreshed_at >= REFRESH_S:
                await self._refresh()
                self._step()
        except TxmqError as error:
            if not error.retriable:
                self._fail(error)
            else:
                log.info("reader.not_looked", reader=self.name, error=str(error))
        except Exception as error:  # noqa: BLE001  # of the user's store
            # A store that cannot save: to go on would only repeat more messages later.
            self._fail(error)

    async def _save(self) -> None:
        if self._state.unsaved and self._log_id is not None:
            self._state.unsaved = False
            try:
                await self._in_store(self._store.save, self.name, self._log_id, self.positions)
            except BaseException:
                self._state.unsaved = True
                raise

    async def _in_store(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        async def call() -> T:
            async with self._store_lock:
                return await asyncio.to_thread(function, *args, **kwargs)

        # A thread cannot be cancelled: the next call must not begin beside it.
        return await finish(self._loop.create_task(call()))

    def _attached(self, link: AioConnection) -> None:
        link.lost.add_done_callback(lambda _lost: self._lost(link))
        self._link = link
        self._step()

    def _lost(self, link: AioConnection) -> None:
        if self._link is link:
            self._link = None
            self._round += 1
            self._state.disconnected()
            if not self.closed:
                log.warning("reader.disconnected", reader=self.name)

    def _fail(self, error: BaseException | None) -> None:
        self._failure = error
        self._round += 1  # what is on its way was asked before
        self._state.disconnected()
        self._deliver()

    def _step(self) -> None:
        self._deliver()
        self._request_more()

    def _request_more(self) -> None:
        """Send the next reads, where no message waits."""
        link = self._link
        if link is None or self._over or not self._state.is_empty:
            return
        now = self._core.seconds()
        if pause_s := self._state.pause_s(now):
            self._pause = self._pause or self._loop.call_later(pause_s, self._end_pause)
            return
        for name, request in list(self._state.next_reads(now)):
            self._send(link, name, request)

    def _end_pause(self) -> None:
        self._pause = None
        self._request_more()

    def _send(self, link: AioConnection, name: PartitionName, request: ReaderRequest) -> None:
        try:
            reply = link.request(*request)
        except ConnectionLost:  # `_lost` follows
            return
        expire(self._loop, reply, REPLY_S, RequestTimeout("no answer"))
        replied = partial(self._replied, self._round, link, name)
        reply.add_done_callback(lambda reply: replied(reply.exception() or reply.result()))

    def _replied(
        self, sent_in: int, link: AioConnection, name: PartitionName, reply: bytes | BaseException
    ) -> None:
        """Take a reply or a refusal; without either, let another connection try."""
        if sent_in != self._round or self.closed:
            return
        try:
            if isinstance(reply, bytes):
                self._state.received(name, reply)
            elif isinstance(reply, OffsetOutOfRange):
                self._state.skip_to_retained(name, reply)
            elif isinstance(reply, Throttled):
                self._state.throttled(name, reply, self._core.seconds())
            elif isinstance(reply, TxmqError) and not reply.retriable:
                self._fail(reply)
                return
            elif isinstance(reply, RequestTimeout):
                link.give_up(reply)
                return
            elif not isinstance(reply, ConnectionLost):
                link.abort()
                return
        except Exception as failure:  # noqa: BLE001  # the reader ends with it
            self._fail(failure)
        else:
            self._step()

    async def _close(self) -> None:
        self.closed = True
        self._state.discard_last()
        self._deliver()
        if self._pause is not None:
            self._pause.cancel()
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.wait([self._upkeep])
        if self._connection is not None:
            await self._connection.stop()
        try:
            await self._save()
        finally:
            await self._in_store(self._store.close)
