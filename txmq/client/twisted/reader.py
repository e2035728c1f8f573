"""Readers without a consumer group, on Twisted's reactor.

`txmq.client.protocol.awaited.reader` has what readers do on any event loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from functools import partial
from typing import ParamSpec, TypeVar

from twisted.internet.defer import Deferred, DeferredLock, succeed
from twisted.internet.task import LoopingCall
from twisted.python.failure import Failure

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
from txmq.client.twisted.connection import TwistedConnection, none_on_timeout, with_timeout
from txmq.client.twisted.core import TwistedCore
from txmq.client.twisted.protocols import AsyncCloseable, DelayedCall
from txmq.errors import RequestTimeout
from txmq.model.durations import Duration, seconds_of
from txmq.model.message import ReceivedMessage
from txmq.model.topic_partition import PartitionName

P = ParamSpec("P")
T = TypeVar("T")


class Receiving(Source, AsyncCloseable):
    """The waits for a reader, of one broker or of several, in one coroutine."""

    _core: TwistedCore
    _receiver: Deferred[ReceivedMessage | None] | None = None

    async def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        while (message := await self.receive()) is not None:
            yield message

    def receive(self, timeout: Duration | None = None) -> Deferred[ReceivedMessage | None]:
        """Fire with the next message; with None after `timeout` seconds, and once the
        reader is closed.

        The message before it counts as processed. The reader connects again by itself.
        Fails with the error that ended it. Raises LocalProtocolError while another call
        waits.
        """
        if self._receiver is not None and not self._receiver.called:
            raise second_receiver()
        self.mark_processed()
        receiver: Deferred[ReceivedMessage | None] = Deferred()
        self._receiver = receiver
        seconds = seconds_of(timeout, "timeout")
        if seconds is not None:
            receiver.addTimeout(seconds, self._core.reactor, none_on_timeout)
        self._serve()
        return receiver

    def _serve(self) -> None:
        """Give the receiver what waits for it."""
        receiver = self._receiver
        if receiver is None or receiver.called:
            return
        try:
            self.raise_failure()
            ready = self.next_ready()
        except Exception:  # noqa: BLE001  # the receiver's
            receiver.errback(Failure())
        else:
            if ready is not None or self.closed:
                receiver.callback(ready)

    def commit(self) -> Deferred[None]:
        """Save the positions now; the last message counts as processed."""
        return Deferred.fromCoroutine(self._commit())

    def close(self) -> Deferred[None]:
        """Save the positions and close.

        The last message does not count as processed: see `commit`.
        """
        return succeed(None) if self.closed else Deferred.fromCoroutine(self._close())


class Reader(Receiving, EventReader[TwistedConnection]):
    """A reader of one broker, for the reactor's thread and one coroutine. Made by
    `client.reader`; otherwise as the blocking one.

    `async for message in reader` gives messages until it is closed. A message is
    processed when the next one is requested.
    """

    def __init__(
        self,
        core: TwistedCore,
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
        self._core, self._calls = core, core
        self._deliver = deliver or self._serve
        self._store_lock = DeferredLock()  # one thread at a time uses a store
        self._upkeep = LoopingCall(self._keep_up)
        self._upkeep.clock = core.reactor

    def assign(self, partitions: Collection[PartitionName] | None) -> Deferred[None]:
        """Read only these partitions from now on, or (None) all.

        The last message counts as processed.
        """
        return Deferred.fromCoroutine(self._assign(partitions))

    def _start(self) -> None:
        self._connection = self._core.open_connection(self._attach, self._fail)
        self._upkeep.start(SAVE_S, now=False)

    def _after(self, seconds: float, function: Callable[[], None]) -> DelayedCall:
        later: DelayedCall = self._core.reactor.callLater(seconds, function)
        return later

    async def _stop_upkeep(self) -> None:
        if self._upkeep.running:
            self._upkeep.stop()

    def _in_store(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Deferred[T]:
        def call() -> Deferred[T]:
            return self._core.threads.run(function, *args, **kwargs)

        return self._store_lock.run(call)

    def _attach(self, link: TwistedConnection) -> None:
        link.lost.addCallback(lambda _none: self._lost(link))
        self._attached(link)

    def _send(self, link: TwistedConnection, name: PartitionName, request: ReaderRequest) -> None:
        replied = partial(self._replied, self._round, link, name)
        late = RequestTimeout("no answer")
        reply = with_timeout(self._core.reactor, link.request(*request), REPLY_S, late)
        reply.addCallbacks(replied, lambda failure: replied(failure.value))


class Readers(Receiving, EventReaders):
    """A reader of several brokers, for the reactor's thread and one coroutine.

    Made by `cluster.reader`, and used as a Reader. Partitions of different brokers have
    the same numbers, so `positions` and `assign` are for readers of one broker.
    """

    def __init__(
        self,
        cores: Sequence[TwistedCore],
        name: str,
        topics: Topics,
        store: OffsetStore,
        start: ReaderStart,
    ) -> None:
        """Raises LocalProtocolError for an invalid name, start or topics."""
        by_log = OffsetsByLog(store)
        names = topics if isinstance(topics, str) else list(topics)
        super().__init__(
            name, [Reader(core, name, names, by_log, start, self._serve) for core in cores]
        )
        self._store, self._core = store, cores[0]

    def _deliver(self) -> None:
        self._serve()

    def _close_store(self) -> Deferred[None]:
        return self._core.threads.run(self._store.close)


R = TypeVar("R", Reader, Readers)


def open_reader(reader: R) -> Deferred[R]:
    """Load the positions of a new reader, which is closed where that fails.

    Fires with the reader. Fails with UnknownTopic, LogChanged, and as a call does.
    """

    async def opened() -> R:
        await reader._open()  # noqa: SLF001  # of the event reader
        return reader

    return Deferred.fromCoroutine(opened())
