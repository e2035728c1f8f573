"""Blocking readers: all messages of topics, from positions of the reader's own.

Nothing is leased or acked, and there is no consumer group.
"""

from __future__ import annotations

import select
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import NoReturn, Self

from txmq.client.blocking.after_fork import forked, tell_after_fork
from txmq.client.blocking.at_once import CoreAtOnce
from txmq.client.blocking.connections.connection import Connection
from txmq.client.blocking.core import BlockingCore
from txmq.client.log import get_logger
from txmq.client.protocol.conversation import reply_payload, silent_for
from txmq.client.protocol.offsets import OffsetsByLog, OffsetStore
from txmq.client.protocol.reader import (
    POLL_S,
    REFRESH_S,
    SAVE_S,
    ReaderStart,
    ReaderState,
    positions_of_one_broker,
)
from txmq.client.protocol.sender.brokers import Brokers
from txmq.client.protocol.typed.bodies import Topics
from txmq.errors import ConnectionLost, OffsetOutOfRange, Throttled, TxmqError, UnknownTopic
from txmq.faces import run
from txmq.model.durations import Duration, seconds_of
from txmq.model.message import ReceivedMessage
from txmq.model.topic_partition import PartitionName
from txmq.wire.frames import Frame

CONNECT_S, REPLY_S = 1.0, POLL_S + 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # between two connections
log = get_logger()


class BrokerReader:
    """A reader's positions, requests and connection at one broker. For one thread."""

    def __init__(
        self,
        core: BlockingCore,
        name: str,
        topics: Topics,
        store: OffsetStore,
        start: ReaderStart,
    ) -> None:
        self._core, self._store = core, store
        self.state = ReaderState(name, topics, start)
        self._connection: Connection | None = None
        self._in_flight: dict[int, PartitionName] = {}
        self._heard_at = 0.0  # or the moment since which a reply is due
        self._saved_at = self._refreshed_at = 0.0
        self._pause, self._paused_until = FIRST_PAUSE_S, 0.0

    def open(self) -> None:
        """Load the positions. Raises UnknownTopic, LogChanged, and as a call does."""
        self.state.load(self._store.load(self.state.name, self._core.log_id))
        self._refresh()
        self._saved_at = time.monotonic()

    def assign(self, partitions: Collection[PartitionName] | None) -> None:
        """Read only these partitions, or (None) all."""
        self.state.mark_processed()
        self.save()
        self._disconnect()
        self.state.assign(partitions)
        self._refresh()

    def next_message(self) -> ReceivedMessage | None:
        """Return the next message if one waits; save the positions now and then."""
        now = time.monotonic()
        if now - self._saved_at >= SAVE_S:
            self.save()
        if now - self._refreshed_at >= REFRESH_S:
            try:
                self._refresh()
            except TxmqError as error:
                if not error.retriable:
                    raise
                log.info("reader.not_looked", reader=self.state.name, error=str(error))
        return self.state.next_message()

    def save(self) -> None:
        """Save the positions if they have changed."""
        self._saved_at = time.monotonic()
        if self.state.unsaved:
            self._store.save(self.state.name, self._core.log_id, self.state.positions)
            self.state.unsaved = False

    @property
    def wait_s(self) -> float:
        """Seconds until the positions are to be saved, a connection to be tried, or a
        pause between reads to end.
        """
        now = time.monotonic()
        pauses = (self._paused_until - now, self.state.pause_s(now))
        until_save = self._saved_at + SAVE_S - now
        return max(0.0, min((until_save, *(pause for pause in pauses if pause > 0))))

    def request(self) -> Connection | None:
        """Send the next reads. None = there is no connection now."""
        now = time.monotonic()
        if now < self._paused_until:
            return None
        try:
            connection = self._connection or self._connect()
            for partition, request in self.state.next_reads(now):
                if not self._in_flight:
                    self._heard_at = now
                self._in_flight[connection.write(*request, now + CONNECT_S)] = partition
        except (TxmqError, OSError) as error:
            self._lost(error)
            return None
        return connection

    def receive(self, connection: Connection) -> None:
        """Accept the replies that the connection has."""
        try:
            self._heard_at = time.monotonic()
            for frame in connection.receive(self._heard_at + CONNECT_S):
                self._accept(frame)
        except (TxmqError, OSError) as error:
            self._lost(error)

    def check_silence(self, connection: Connection) -> None:
        """Let another connection try where this one, without a reply that could be
        read, has been silent for long.
        """
        if self._in_flight and time.monotonic() - self._heard_at > REPLY_S:
            connection.conversation.note_silence()
            self._lost(silent_for(REPLY_S))

    def close(self) -> None:
        """Save the positions and disconnect."""
        self.state.discard_last()
        self._disconnect()
        self.save()

    def _refresh(self) -> None:
        """Find the partitions of the topics, and the first offsets of new ones."""
        self._refreshed_at = time.monotonic()
        discovery = run(self.state.discover(CoreAtOnce(self._core)))
        if discovery is not None:
            self.save()
            self.state.adopt(discovery)

    def _accept(self, frame: Frame) -> None:
        partition = self._in_flight.pop(frame.correlation)
        try:
            self.state.received(partition, reply_payload(frame))
        except OffsetOutOfRange as error:
            self.state.skip_to_retained(partition, error)
        except Throttled as refused:
            self.state.throttled(partition, refused, time.monotonic())

    def _connect(self) -> Connection:
        self._connection = connection = self._core.open_connection(time.monotonic() + CONNECT_S)
        self._pause = FIRST_PAUSE_S
        return connection

    def _lost(self, error: TxmqError | OSError) -> None:
        """Connect again after a pause that grows, or raise where that cannot help."""
        self._disconnect()
        if (
            isinstance(error, TxmqError)
            and not error.retriable
            and not isinstance(error, ConnectionLost)
        ):
            raise error
        log.warning("reader.disconnected", reader=self.state.name, error=str(error))
        asked = error.retry_after_s if isinstance(error, Throttled) else 0.0
        self._paused_until = time.monotonic() + max(self._pause, asked)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)

    def _disconnect(self) -> None:
        self._in_flight.clear()
        self.state.disconnected()
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class BlockingReader(ABC):
    """The calls that readers of one broker and of several have in common."""

    def __init__(self, name: str, readers: Sequence[BrokerReader], store: OffsetStore) -> None:
        self._brokers, self._store = list(readers), store
        self._delivered: BrokerReader | None = None  # that of the last message
        self.name = name
        self.closed = self._forked = False
        tell_after_fork(self)

    def after_fork(self) -> None:
        """Refuse everything in the child: the connections and positions are the
        parent's.
        """
        self._forked = True

    @property
    def missed(self) -> int:
        """Messages that retention had dropped before they were read."""
        return sum(broker.state.missed for broker in self._brokers)

    @property
    @abstractmethod
    def positions(self) -> dict[PartitionName, int]:
        """The next message to process of each partition."""

    @abstractmethod
    def assign(self, partitions: Collection[PartitionName] | None) -> None:
        """Read only these partitions from now on, or (None) all.

        The last message counts as processed.
        """

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """Yield messages until the reader is closed.

        A message is processed when the next one is requested.
        """
        while not self.closed:
            message = self.receive(POLL_S)
            if message is not None:
                yield message

    def receive(self, timeout: Duration | None = None) -> ReceivedMessage | None:
        """Return the next message, or None after `timeout` seconds or once closed.

        The message before it counts as processed. The reader connects again by itself.
        Raises the error that ended it.
        """
        self._processed()
        seconds = seconds_of(timeout, "timeout")
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self.closed:
            for broker in self._brokers:
                message = broker.next_message()
                if message is not None:
                    self._delivered = broker
                    return message
            left = POLL_S if deadline is None else deadline - time.monotonic()
            if left <= 0 and deadline is not None:
                return None
            self._fetch(left)
        return None

    def commit(self) -> None:
        """Save the positions now; the last message counts as processed."""
        self._processed()
        for broker in self._brokers:
            broker.save()

    def _require_own_process(self) -> None:
        if self._forked:
            raise forked("reader")

    def _processed(self) -> None:
        self._require_own_process()
        delivered, self._delivered = self._delivered, None
        if delivered is not None:
            delivered.state.mark_processed()

    def _open(self) -> None:
        """Load the positions. Raises UnknownTopic, LogChanged, and as a call does."""
        for broker in self._brokers:
            broker.open()

    def _join_found(self) -> None:  # noqa: B027  # a reader of one broker finds none
        """Read at brokers that were found since, too."""

    def _fetch(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for messages of any broker."""
        self._join_found()
        readers: dict[Connection, BrokerReader] = {}
        for broker in self._brokers:
            connection = broker.request()
            if connection is not None:
                readers[connection] = broker
        wait_s = min(timeout, *(broker.wait_s for broker in self._brokers))
        if not readers:
            time.sleep(wait_s)
            return
        sockets = [connection.socket for connection in readers]
        readable = select.select(sockets, [], [], wait_s)[0]
        for connection, broker in readers.items():
            if connection.socket in readable:
                broker.receive(connection)
            else:
                broker.check_silence(connection)

    def close(self) -> None:
        """Save the positions and close.

        The last message does not count as processed: see `commit`.
        """
        if self.closed:
            return
        self.closed = True
        if self._forked:
            return
        with ExitStack() as stack:
            stack.callback(self._store.close)
            for broker in self._brokers:
                stack.callback(broker.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Reader(BlockingReader):
    """A reader of one broker, for one thread. Made by `client.reader`.

    A `with` block closes it at its end.
    """

    def __init__(
        self,
        core: BlockingCore,
        name: str,
        topics: Topics,
        store: OffsetStore,
        start: ReaderStart,
    ) -> None:
        """Raises LocalProtocolError for an invalid name, start or topics."""
        self._broker = BrokerReader(core, name, topics, store, start)
        super().__init__(name, (self._broker,), store)
        self._state = self._broker.state

    @property
    def positions(self) -> dict[PartitionName, int]:
        """The next message to process of each partition."""
        return self._state.positions

    def assign(self, partitions: Collection[PartitionName] | None) -> None:
        """Read only these partitions from now on, or (None) all.

        The last message counts as processed.
        """
        self._require_own_process()
        self._broker.assign(partitions)


class Readers(BlockingReader):
    """A reader of several brokers, for one thread. Made by `cluster.reader`.

    A `with` block closes it at its end. Partitions of different brokers have the same
    numbers, so `positions` and `assign` are for readers of one broker. A log that is
    found later is read from its first message on.
    """

    def __init__(
        self,
        found: Brokers[BlockingCore],
        name: str,
        topics: Topics,
        store: OffsetStore,
        start: ReaderStart,
    ) -> None:
        """`found` has the brokers to read, which become more.

        Raises LocalProtocolError for an invalid name, start or topics.
        """
        self._found, self._joined = found, found.answered
        self._topics, self._by_log, self._start = topics, OffsetsByLog(store), start
        self._join_after = 0.0
        super().__init__(name, [self._reader_at(core, name, start) for core in self._joined], store)

    def _reader_at(self, core: BlockingCore, name: str, start: ReaderStart) -> BrokerReader:
        return BrokerReader(core, name, self._topics, self._by_log, start)

    def _open(self) -> None:
        super()._open()
        for core in self._found.cores:  # they become more, and a later list may have fewer
            if core not in self._joined and core in self._found.present:
                with suppress(UnknownTopic):  # so each message comes later than the reader
                    self._join(core, self._start)

    def _join_found(self) -> None:
        if time.monotonic() < self._join_after:
            return
        for core in self._found.answered:
            if core in self._joined:
                continue
            try:
                self._join(core, "first")
            except TxmqError as error:
                log.warning("reader.not_joined", reader=self.name, error=str(error))
                self._join_after = time.monotonic() + REFRESH_S

    def _join(self, core: BlockingCore, start: ReaderStart) -> None:
        broker = self._reader_at(core, self.name, start)
        broker.open()
        self._joined.append(core)
        self._brokers.append(broker)

    @property
    def positions(self) -> dict[PartitionName, int]:
        """Raises LocalProtocolError: positions are those of one broker."""
        raise positions_of_one_broker("positions")

    def assign(self, partitions: Collection[PartitionName] | None) -> NoReturn:
        """Raises LocalProtocolError: partitions are those of one broker."""
        raise positions_of_one_broker("assign(…)")


def open_reader(reader: Reader | Readers) -> None:
    """Load the positions of a new reader, which is closed where that fails."""
    try:
        reader._open()  # noqa: SLF001  # not the user's call
    except BaseException:
        reader.close()
        raise
