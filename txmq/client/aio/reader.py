"""Readers: all messages of topics, without a consumer group, on asyncio.

`txmq.client.protocol.reader` has the requests and the positions. Each reader has a
connection of its own.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from functools import partial
from typing import NoReturn, ParamSpec, TypeVar
from uuid import UUID

from txmq.client.aio.closing import AioCloseable
from txmq.client.aio.connection import AioConnection, PersistentConnection
from txmq.client.aio.core import AioCore, finish
from txmq.client.aio.loop import expire
from txmq.client.log import get_logger
from txmq.client.protocol.offsets import OffsetsByLog, OffsetStore
from txmq.client.protocol.reader import (
    POLL_S,
    REFRESH_S,
    SAVE_S,
    ReaderRequest,
    ReaderStart,
    ReaderState,
    RequestSequence,
    positions_of_one_broker,
)
from txmq.client.protocol.typed.bodies import Topics
from txmq.errors import (
    ConnectionLost,
    LocalProtocolError,
    OffsetOutOfRange,
    RequestTimeout,
    TxmqError,
)
from txmq.model.message import ReceivedMessage
from txmq.model.topic_partition import PartitionName

REPLY_S = POLL_S + 10.0
P = ParamSpec("P")
T = TypeVar("T")
log = get_logger()


class Reader(AioCloseable):
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
        self._core, self._store, self._loop = core, store, core.loop
        self._state = ReaderState(name, topics, start)
        self._deliver = deliver or self._wake
        self._log_id: UUID | None = None
        self._store_lock = asyncio.Lock()  # one thread at a time uses a store
        self._connection: PersistentConnection | None = None
        self._link: AioConnection | None = None
        self._round = 0  # replies to requests of an earlier round are ignored
        self._receiver: Future[None] | None = None
        self._failure: BaseException | None = None
        self._refreshed_at = 0.0
        self._upkeep: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
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

    async def open(self) -> None:
        """Load the positions. Raises UnknownTopic, LogChanged, and as a call does."""
        try:
            self._log_id = await self._core.log_id()
            self._state.load(await self._in_store(self._store.load, self.name, self._log_id))
            await self._refresh()
        except BaseException:
            await self.close()
            raise
        self._connection = self._core.open_connection(self._attach, self._fail)
        self._upkeep = self._loop.create_task(self._keep_up(), name=f"txmq-reader-{self.name}")

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
        self._refreshed_at = self._loop.time()
        discovery = await self._run(self._state.discover())
        if discovery is not None:
            await self._save()
            self._state.adopt(discovery)

    async def _run(self, sequence: RequestSequence[T]) -> T:
        try:
            request = next(sequence)
            while True:
                request = sequence.send(await self._core.request(*request, repeat=True))
        except StopIteration as end:
            result: T = end.value
            return result

    async def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        while (message := await self.receive()) is not None:
            yield message

    async def receive(self, timeout: float | None = None) -> ReceivedMessage | None:  # noqa: ASYNC109  # as of the other faces
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
        self._state.mark_processed()
        try:
            async with asyncio.timeout(timeout):
                while True:
                    self.raise_failure()
                    if (ready := self.next_ready()) is not None or self.closed:
                        return ready
                    self._receiver = self._loop.create_future()
                    self._request_more()
                    await self._receiver
        except TimeoutError:
            return None
        finally:
            self._receiver = None

    def next_ready(self) -> ReceivedMessage | None:
        """Return the next message if it waits locally."""
        if self._failure is not None or self.closed or self._state.is_empty:
            return None
        return self._state.next_message()

    @property
    def over(self) -> bool:
        """True where nothing more comes: it is closed, or has failed."""
        return self.closed or self._failure is not None

    def raise_failure(self) -> None:
        """Raise the error that ended the reader, if there is one."""
        if self._failure is not None:
            raise self._failure

    def mark_processed(self) -> None:
        """Count the last message as processed, and have the next ones read."""
        self._state.mark_processed()
        self._request_more()

    async def commit(self) -> None:
        """Save the positions now; the last message counts as processed."""
        self._state.mark_processed()
        await self._save()

    async def _keep_up(self) -> None:
        """Save the positions now and then, and look for new partitions."""
        while True:
            await asyncio.sleep(SAVE_S)
            try:
                await self._save()
                if self._loop.time() - self._refreshed_at >= REFRESH_S:
                    await self._refresh()
                    self._step()
            except TxmqError as error:
                if not error.retriable:
                    self._fail(error)
                    return
                log.info("reader.not_looked", reader=self.name, error=str(error))
            except Exception as error:  # noqa: BLE001  # of the user's store
                # A store that cannot save: to go on would only repeat more later.
                self._fail(error)
                return

    async def _save(self) -> None:
        if self._state.unsaved and self._log_id is not None:
            self._state.unsaved = False
            try:
                await self._in_store(self._store.save, self.name, self._log_id, self.positions)
            except BaseException:
                self._state.unsaved = True
                raise

    async def _in_store(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function of the store in a thread, one at a time."""

        async def call() -> T:
            async with self._store_lock:
                return await asyncio.to_thread(function, *args, **kwargs)

        # A thread cannot be cancelled: the next call must not begin beside it.
        return await finish(self._loop.create_task(call()))

    def _attach(self, link: AioConnection) -> None:
        self._link = link
        link.lost.add_done_callback(lambda _lost: self._lost(link))
        self._step()

    def _lost(self, link: AioConnection) -> None:
        if self._link is link:
            self._link = None
            self._round += 1
            self._state.disconnected()
            if self.closed:
                return
            log.warning("reader.disconnected", reader=self.name)

    def _fail(self, error: BaseException | None) -> None:
        self._failure = error
        self._step()

    def _step(self) -> None:
        self._deliver()
        self._request_more()

    def _wake(self) -> None:
        """Have the receiver look again."""
        if self._receiver is not None and not self._receiver.done():
            self._receiver.set_result(None)

    def _request_more(self) -> None:
        """Send the next reads, where no message waits."""
        link = self._link
        if link is None or self.over or not self._state.is_empty:
            return
        for name, request in list(self._state.next_reads()):
            self._send(link, name, request)

    def _send(self, link: AioConnection, name: PartitionName, request: ReaderRequest) -> None:
        try:
            reply = link.request(*request)
        except ConnectionLost:  # `_lost` follows
            return
        expire(self._loop, reply, REPLY_S, RequestTimeout("no answer"))
        reply.add_done_callback(partial(self._replied, self._round, link, name))

    def _replied(
        self, sent_in: int, link: AioConnection, name: PartitionName, reply: Future[bytes]
    ) -> None:
        error = reply.exception()
        if sent_in != self._round or self.closed:
            return
        try:
            if error is None:
                self._state.received(name, reply.result())
            elif isinstance(error, OffsetOutOfRange):
                self._state.skip_to_retained(name, error)
            elif isinstance(error, TxmqError) and not error.retriable:
                self._fail(error)
                return
            elif not isinstance(error, ConnectionLost):
                link.abort()  # let another connection try
                return
        except Exception as failure:  # noqa: BLE001  # the reader ends with it
            self._fail(failure)
        else:
            self._step()

    async def close(self) -> None:
        """Save the positions and close.

        The last message does not count as processed: see `commit`.
        """
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        await finish(self._closing)

    async def _close(self) -> None:
        self.closed = True
        self._state.discard_last()
        self._deliver()
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.wait([self._upkeep])
        if self._connection is not None:
            await self._connection.stop()
        try:
            await self._save()
        finally:
            await self._in_store(self._store.close)


class Readers(AioCloseable):
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
        self._readers = [Reader(core, name, names, by_log, start, self._deliver) for core in cores]
        self._store, self._name, self._loop = store, name, cores[0].loop
        self._receiver: Future[None] | None = None
        self._turn = 0
        self._closing: asyncio.Task[None] | None = None
        self.closed = False

    async def open(self) -> None:
        """Open the readers of all brokers."""
        try:
            for reader in self._readers:
                await reader.open()
        except BaseException:
            await self.close()
            raise

    @property
    def name(self) -> str:
        """The name under which the positions are stored."""
        return self._name

    @property
    def missed(self) -> int:
        """Messages that retention had dropped before they were read."""
        return sum(reader.missed for reader in self._readers)

    @property
    def positions(self) -> dict[PartitionName, int]:
        """Raises LocalProtocolError: positions are those of one broker."""
        raise positions_of_one_broker("positions")

    def assign(self, partitions: Collection[PartitionName] | None) -> NoReturn:
        """Raises LocalProtocolError: partitions are those of one broker."""
        raise positions_of_one_broker("assign(…)")

    async def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        while (message := await self.receive()) is not None:
            yield message

    async def receive(self, timeout: float | None = None) -> ReceivedMessage | None:  # noqa: ASYNC109  # as of the other faces
        """Return the next message of any broker; see `Reader.receive`."""
        if self._receiver is not None:
            raise LocalProtocolError(
                "another call waits for the next message", hint="use a reader in one coroutine"
            )
        try:
            async with asyncio.timeout(timeout):
                while True:
                    self._receiver = self._loop.create_future()
                    for reader in self._readers:
                        reader.mark_processed()
                    if (message := self._next()) is not None or self.closed:
                        return message
                    await self._receiver
        except TimeoutError:
            return None
        finally:
            self._receiver = None

    def _next(self) -> ReceivedMessage | None:
        """Return a message that waits locally, of the brokers in turn."""
        self._turn += 1
        for n in range(len(self._readers)):
            reader = self._readers[(self._turn + n) % len(self._readers)]
            reader.raise_failure()
            if (message := reader.next_ready()) is not None:
                return message
        return None

    def _deliver(self) -> None:
        if self._receiver is not None and not self._receiver.done():
            self._receiver.set_result(None)

    async def commit(self) -> None:
        """Save the positions now; the last message counts as processed."""
        for reader in self._readers:
            await reader.commit()

    async def close(self) -> None:
        """Save the positions and close.

        The last message does not count as processed: see `commit`.
        """
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        await finish(self._closing)

    async def _close(self) -> None:
        self.closed = True
        self._deliver()
        try:
            for reader in self._readers:
                await reader.close()
        finally:
            await asyncio.to_thread(self._store.close)
