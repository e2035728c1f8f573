"""Readers without a group on an event loop.

`txmq.client.protocol.reader` has the requests and the positions. Each reader has a
connection of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Generic, NoReturn, ParamSpec, Protocol, TypeVar
from uuid import UUID

from txmq.client.log import get_logger
from txmq.client.protocol.awaited.core import AwaitedCore
from txmq.client.protocol.offsets import OffsetStore
from txmq.client.protocol.reader import (
    POLL_S,
    REFRESH_S,
    ReaderRequest,
    ReaderState,
    positions_of_one_broker,
)
from txmq.errors import (
    ConnectionLost,
    LocalProtocolError,
    OffsetOutOfRange,
    Throttled,
    TxmqError,
    UnknownTopic,
)
from txmq.model.message import ReceivedMessage
from txmq.model.topic_partition import PartitionName

REPLY_S = POLL_S + 10.0
P = ParamSpec("P")
T = TypeVar("T")
log = get_logger()


class Link(Protocol):
    """A connection while it lasts."""

    def abort(self) -> None: ...


class LastingConnection(Protocol):
    """A connection that is made again when it is lost."""

    def stop(self) -> Awaitable[None]: ...


class Later(Protocol):
    """A call that the loop makes later."""

    def cancel(self) -> None: ...


L = TypeVar("L", bound=Link)


class Source(ABC):
    """A reader of one broker or of several, as its face waits for it."""

    closed: bool

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
    async def _open(self) -> None:
        """Load the positions. Raises UnknownTopic, LogChanged, and as a call does."""

    @abstractmethod
    async def _commit(self) -> None:
        """Save the positions; the last message counts as processed."""

    @abstractmethod
    async def _close(self) -> None:
        """Save the positions, and end."""

    @abstractmethod
    def close(self) -> Awaitable[None]:
        """Close the reader, once."""


class EventReader(Source, Generic[L]):
    """A reader of one broker, for one coroutine at a time.

    `async for message in reader` gives messages until it is closed. A message is
    processed when the next one is requested.
    """

    _calls: AwaitedCore
    _deliver: Callable[[], None]  # called when a message, an error or the end may be there

    def __init__(self, state: ReaderState, store: OffsetStore) -> None:
        self._state, self._store = state, store
        self._log_id: UUID | None = None
        self._connection: LastingConnection | None = None
        self._link: L | None = None
        self._round = 0  # replies to requests of an earlier round are ignored
        self._failure: BaseException | None = None
        self._refreshed_at = 0.0
        self._pause: Later | None = None  # its end, in a pause that the broker has asked for
        self.closed = False

    @abstractmethod
    def _after(self, seconds: float, function: Callable[[], None]) -> Later:
        """Have the loop call a function after so many seconds."""

    @abstractmethod
    def _in_store(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[T]:
        """Call a function of the store in a thread, one at a time."""

    @abstractmethod
    def _send(self, link: L, name: PartitionName, request: ReaderRequest) -> None:
        """Send a request, whose reply or error comes to `_replied`."""

    @abstractmethod
    def _start(self) -> None:
        """Open the connection, and begin to call `_keep_up` every few seconds."""

    @abstractmethod
    async def _stop_upkeep(self) -> None:
        """End the calls of `_keep_up`."""

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
            self._log_id = await self._calls.log_id()
            self._state.load(await self._in_store(self._store.load, self.name, self._log_id))
            await self._refresh()
        except BaseException:
            await self.close()
            raise
        self._start()

    async def _assign(self, partitions: Collection[PartitionName] | None) -> None:
        self._state.mark_processed()
        await self._save()
        self._round += 1
        self._state.assign(partitions)
        await self._refresh()
        self._step()

    async def _refresh(self) -> None:
        """Find the partitions of the topics, and the first offsets of new ones."""
        self._refreshed_at = self._calls.seconds()
        discovery = await self._state.discover(self._calls)
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

    async def _keep_up(self) -> None:
        """Save the positions, and look for new partitions now and then."""
        try:
            await self._save()
            if self._calls.seconds() - self._refreshed_at >= REFRESH_S:
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

    def _attached(self, link: L) -> None:
        self._link = link
        self._step()

    def _lost(self, link: L) -> None:
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
        now = self._calls.seconds()
        if pause_s := self._state.pause_s(now):
            self._pause = self._pause or self._after(pause_s, self._end_pause)
            return
        for name, request in list(self._state.next_reads(now)):
            self._send(link, name, request)

    def _end_pause(self) -> None:
        self._pause = None
        self._request_more()

    def _replied(
        self, sent_in: int, link: L, name: PartitionName, reply: bytes | BaseException
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
                self._state.throttled(name, reply, self._calls.seconds())
            elif isinstance(reply, TxmqError) and not reply.retriable:
                self._fail(reply)
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
        await self._stop_upkeep()
        if self._connection is not None:
            await self._connection.stop()
        try:
            await self._save()
        finally:
            await self._in_store(self._store.close)


class EventReaders(Source):
    """A reader of several brokers, for one coroutine at a time.

    Made by `cluster.reader`, and used as a Reader. Partitions of different brokers have
    the same numbers, so `positions` and `assign` are for readers of one broker.
    """

    def __init__(self, name: str, readers: Sequence[EventReader[Any]]) -> None:
        """`readers` call `_deliver` of this object."""
        self._name, self._readers = name, readers
        self._turn = 0
        self.closed = False

    @abstractmethod
    def _deliver(self) -> None:
        """Have the one that waits look again."""

    @abstractmethod
    def _close_store(self) -> Awaitable[None]:
        """Close the store in a thread."""

    async def _open(self) -> None:
        """Open the readers of all brokers."""
        try:
            for reader in self._readers:
                await reader._open()  # noqa: SLF001  # of this module
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

    def raise_failure(self) -> None:
        """Raise the error that ended a reader, if there is one."""
        for reader in self._readers:
            reader.raise_failure()

    def mark_processed(self) -> None:
        """Count the last message as processed, and have the next ones read."""
        for reader in self._readers:
            reader.mark_processed()

    def next_ready(self) -> ReceivedMessage | None:
        """Return a message that waits locally, of the brokers in turn."""
        self._turn += 1
        for n in range(len(self._readers)):
            reader = self._readers[(self._turn + n) % len(self._readers)]
            if (message := reader.next_ready()) is not None:
                return message
        return None

    async def _commit(self) -> None:
        for reader in self._readers:
            await reader._commit()  # noqa: SLF001  # of this module

    async def _close(self) -> None:
        self.closed = True
        self._deliver()
        try:
            for reader in self._readers:
                await reader.close()
        finally:
            await self._close_store()


def second_receiver() -> LocalProtocolError:
    """Return the error for a call that waits beside another one."""
    return LocalProtocolError(
        "another call waits for the next message", hint="use a reader in one coroutine"
    )
