"""Readers without a consumer group, on Twisted's reactor.

`txmq.client.protocol.reader` has the requests and the positions. Each reader has a
connection of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn, ParamSpec, TypeVar
from uuid import UUID

from twisted.internet.defer import Deferred, DeferredLock
from twisted.internet.task import LoopingCall
from twisted.python.failure import Failure

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
from txmq.client.twisted.connection import (
    PersistentConnection,
    TwistedConnection,
    none_on_timeout,
    with_timeout,
)
from txmq.client.twisted.core import TwistedCore
from txmq.client.twisted.protocols import AsyncCloseable
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


class Reader(AsyncCloseable):
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
    ) -> None:
        """Raises LocalProtocolError for an invalid name, start or topics."""
        self._core, self._store = core, store
        self._state = ReaderState(name, topics, start)
        self._log_id: UUID | None = None
        self._store_lock = DeferredLock()  # one thread at a time uses a store
        self._connection: PersistentConnection | None = None
        self._link: TwistedConnection | None = None
        self._round = 0  # replies to requests of an earlier round are ignored
        self._receiver: Deferred[ReceivedMessage | None] | None = None
        self._failure: BaseException | None = None
        self._refreshed_at = 0.0
        self._upkeep = LoopingCall(self._save_and_refresh)
        self._upkeep.clock = core.reactor
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

    async def _open(self) -> None:
        try:
            self._log_id = await self._core.log_id()
            self._state.load(await self._in_store(self._store.load, self.name, self._log_id))
            await self._refresh()
        except BaseException:
            await self.close()
            raise
        self._connection = self._core.open_connection(self._attach, self._fail)
        self._upkeep.start(SAVE_S, now=False)

    def assign(self, partitions: Collection[PartitionName] | None) -> Deferred[None]:
        """Read only these partitions from now on, or (None) all.

        The last message counts as processed.
        """
        return Deferred.fromCoroutine(self._assign(partitions))

    async def _assign(self, partitions: Collection[PartitionName] | None) -> None:
        self._state.mark_processed()
        await self._save()
        self._round += 1
        self._state.assign(partitions)
        await self._refresh()
        self._step()

    async def _refresh(self) -> None:
        """Find the partitions of the topics, and the first offsets of new ones."""
        self._refreshed_at = self._core.reactor.seconds()
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

    def receive(self, timeout: float | None = None) -> Deferred[ReceivedMessage | None]:
        """Fire with the next message; with None after `timeout` seconds, and once the
        reader is closed.

        The message before it counts as processed. The reader connects again by itself.
        Fails with the error that ended it. Raises LocalProtocolError while another call
        waits.
        """
        if self._receiver is not None and not self._receiver.called:
            raise LocalProtocolError(
                "another call waits for the next message", hint="use a reader in one coroutine"
            )
        self._state.mark_processed()
        receiver: Deferred[ReceivedMessage | None] = Deferred()
        self._receiver = receiver
        if timeout is not None:
            receiver.addTimeout(max(0.0, timeout), self._core.reactor, none_on_timeout)
        self._step()
        return receiver

    def commit(self) -> Deferred[None]:
        """Save the positions now; the last message counts as processed."""
        self._state.mark_processed()
        return Deferred.fromCoroutine(self._save())

    async def _save_and_refresh(self) -> None:
        try:
            await self._save()
            if self._core.reactor.seconds() - self._refreshed_at >= REFRESH_S:
                await self._refresh()
                self._step()
        except TxmqError as error:
            if not error.retriable:
                self._fail(error)
            else:
                log.info("reader.not_looked", reader=self.name, error=str(error))
        except OSError as error:
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

    def _in_store(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        """Call a function of the store in a thread, one at a time."""

        def call() -> Deferred[T]:
            return self._core.threads.run(function, *args, **kwargs)

        return self._store_lock.run(call)

    def _attach(self, link: TwistedConnection) -> None:
        self._link = link
        link.lost.addCallback(lambda _none: self._lost(link))
        self._step()

    def _lost(self, link: TwistedConnection) -> None:
        if self._link is link:
            self._link = None
            self._round += 1
            self._state.disconnected()
            log.warning("reader.disconnected", reader=self.name)

    def _fail(self, error: BaseException | None) -> None:
        self._failure = error
        self._step()

    def _step(self) -> None:
        """Serve the receiver; where no message waits, send the next reads."""
        receiver, link = self._receiver, self._link
        if receiver is None or receiver.called:
            return
        if self._failure is not None:
            receiver.errback(self._failure)
        elif self.closed:
            receiver.callback(None)
        elif not self._state.is_empty:
            receiver.callback(self._state.next_message())
        elif link is not None:
            for name, request in list(self._state.next_reads()):
                self._send(link, name, request)

    def _send(self, link: TwistedConnection, name: PartitionName, request: ReaderRequest) -> None:
        reply = with_timeout(
            self._core.reactor, link.request(*request), REPLY_S, RequestTimeout("no answer")
        )
        reply.addCallbacks(
            partial(self._answered, self._round, name),
            partial(self._unanswered, self._round, link, name),
        )
        reply.addErrback(self._invalid_answer)

    def _answered(self, sent_in: int, name: PartitionName, payload: bytes) -> None:
        if sent_in == self._round:
            self._state.received(name, payload)
            self._step()

    def _unanswered(
        self, sent_in: int, link: TwistedConnection, name: PartitionName, failure: Failure
    ) -> None:
        """React to a refusal; without an answer, let another connection try."""
        error = failure.value
        if sent_in != self._round:
            return
        if isinstance(error, OffsetOutOfRange):
            self._state.skip_to_retained(name, error)
            self._step()
        elif isinstance(error, TxmqError) and not error.retriable:
            self._fail(error)
        elif not isinstance(error, ConnectionLost):
            link.abort()

    def _invalid_answer(self, failure: Failure) -> None:
        self._fail(failure.value)

    def close(self) -> Deferred[None]:
        """Save the positions and close.

        The last message does not count as processed: see `commit`.
        """
        return Deferred.fromCoroutine(self._close())

    async def _close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._state.discard_last()
        self._step()
        if self._upkeep.running:
            self._upkeep.stop()
        if self._connection is not None:
            await self._connection.stop()
        try:
            await self._save()
        finally:
            await self._in_store(self._store.close)


class Readers(AsyncCloseable):
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
        self._readers = [Reader(core, name, topics, by_log, start) for core in cores]
        self._store, self._core = store, cores[0]
        self._waiting: Deferred[ReceivedMessage | None] | None = None
        self._name = name
        self.closed = False

    async def _open(self) -> None:
        try:
            for reader in self._readers:
                await open_reader(reader)
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

    def receive(self, timeout: float | None = None) -> Deferred[ReceivedMessage | None]:
        """Return the next message of any broker; see `Reader.receive`."""
        if self._waiting is not None and not self._waiting.called:
            raise LocalProtocolError(
                "another call waits for the next message", hint="use a reader in one coroutine"
            )
        requests = list[Deferred[ReceivedMessage | None]]()
        received: Deferred[ReceivedMessage | None] = Deferred(
            lambda _cancelled: _cancel_all(requests)
        )
        self._waiting = received
        if timeout is not None:
            received.addTimeout(max(0.0, timeout), self._core.reactor, none_on_timeout)

        # Before it gives a message, the first reader ends the waits of the others: a
        # reader whose wait has ended keeps its messages.
        over = False

        def first(outcome: ReceivedMessage | Failure | None) -> None:
            nonlocal over
            if not over:
                over = True
                _cancel_all(requests)
                received.callback(outcome)

        for reader in self._readers:
            if received.called:
                break
            request = reader.receive()
            requests.append(request)
            request.addBoth(first)
        return received

    def commit(self) -> Deferred[None]:
        """Save the positions now; the last message counts as processed."""
        return Deferred.fromCoroutine(self._commit())

    async def _commit(self) -> None:
        for reader in self._readers:
            await reader.commit()

    def close(self) -> Deferred[None]:
        """Save the positions and close.

        The last message does not count as processed: see `commit`.
        """
        return Deferred.fromCoroutine(self._close())

    async def _close(self) -> None:
        if self.closed:
            return
        self.closed = True
        try:
            for reader in self._readers:
                await reader.close()
        finally:
            await self._core.threads.run(self._store.close)


R = TypeVar("R", Reader, Readers)


def open_reader(reader: R) -> Deferred[R]:
    """Load the positions of a new reader, which is closed where that fails.

    Fires with the reader. Fails with UnknownTopic, LogChanged, and as a call does.
    """

    async def opened() -> R:
        await reader._open()  # noqa: SLF001  # of this module
        return reader

    return Deferred.fromCoroutine(opened())


def _cancel_all(requests: Iterable[Deferred[Any]]) -> None:
    for request in requests:
        request.cancel()
