"""Reading without a group: nothing is leased or acked, and the reader keeps its own positions.

It reads every message of its partitions, in the order of each. Its positions are saved every few seconds, before it
begins to read other partitions, and when it is closed: never ahead of what was processed, so after a crash messages may
come again, and none is missed.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from datetime import datetime
from typing import Literal, Self

from txmq.client.connection import Connection
from txmq.client.consuming.parcels import Parcel
from txmq.client.conversation import result
from txmq.client.core import Core
from txmq.client.log import get_logger
from txmq.client.offsets import OffsetStore, Spot
from txmq.errors import ConnectionLost, LocalProtocolError, OffsetOutOfRange, TxmqError
from txmq.message import ReceivedMessage, check_name, micros
from txmq.wire.chunks import Chunk, unpack_chunks
from txmq.wire.frames import Frame
from txmq.wire.headers import Opcode, Read, pack_read

SAVE_S = 5.0  # between two times that positions are saved, as MetaQ and RocketMQ do it
LOOK_S = 30.0  # between two looks for partitions that a topic has grown
POLL_S = 20.0
DIAL_S = 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # between two connections
READ_BYTES = 1 << 20  # of one answer, which is what waits here of each partition
Start = Literal["first", "last"] | datetime
log = get_logger()


class Reader:
    """For one thread, and for use with `with`. Made by `client.reader`."""

    def __init__(self, core: Core, name: str, topics: Iterable[str], store: OffsetStore, start: Start) -> None:
        """`start`: where partitions begin that have no position yet; those that a topic has grown, at the first."""
        if isinstance(topics, str):
            raise LocalProtocolError(f"{topics!r} are no topics", hint='a sequence of names: topics=["orders"]')
        self._core, self._store, self._start = core, store, start
        self.name = check_name(name, "reader")
        self._topics = [check_name(topic, "topic") for topic in topics]
        self._positions: dict[Spot, int] = {}  # the next message to hand out
        self._done: dict[Spot, int] = {}  # the next message to process
        self._ready: deque[ReceivedMessage] = deque()
        self._chosen: frozenset[Spot] | None = None
        self._connection: Connection | None = None
        self._asked: dict[int, Spot] = {}
        self._last: ReceivedMessage | None = None
        self._saved_at = self._looked_at = 0.0
        self._pause, self._paused_until = FIRST_PAUSE_S, 0.0
        self._dirty = self.closed = False
        self.missed = 0  # messages that retention had dropped before they were read

    @property
    def positions(self) -> dict[Spot, int]:
        """The next message to process of each partition."""
        return dict(self._done)

    def open(self) -> None:
        """Finds its positions. Called once, by `client.reader`. Raises UnknownTopic, LogChanged, as a call does."""
        self._done = dict(self._store.load(self.name, self._core.log_id))
        self._look(fresh=True)
        self._saved_at = time.monotonic()

    def assign(self, partitions: Collection[Spot] | None) -> None:
        """Reads only these partitions from now on, or (None) all. What was handed out before counts as processed."""
        self.commit()
        self._chosen = None if partitions is None else frozenset(partitions)
        self._forget()
        self._look(fresh=True)

    def _look(self, *, fresh: bool) -> None:
        """Which partitions there are, and where new ones begin."""
        self._looked_at = time.monotonic()
        wanted: list[Spot] = []
        for topic in self._topics:
            shape = self._core.topics.refresh(topic)
            wanted += [(topic, partition) for partition in range(shape.partitions)]
        chosen = [spot for spot in wanted if self._chosen is None or spot in self._chosen]
        if chosen == list(self._positions):
            return
        if not fresh:
            self.commit()
        known = {topic for topic, _partition in self._done}
        starts = self._starts([spot for spot in chosen if spot not in self._done], known)
        self._done.update(starts)
        self._positions = {spot: self._positions.get(spot, self._done[spot]) for spot in chosen}
        self._dirty = self._dirty or bool(starts)

    def _starts(self, spots: Collection[Spot], known: Collection[str]) -> dict[Spot, int]:
        """`known`: topics that it has positions of, so that what they have more of now is new."""
        starts = {}
        topics = dict.fromkeys(topic for topic, _partition in spots)
        shown = {topic: self._core.call("topic.show", {"name": topic}, repeat=True) for topic in topics}
        for topic, partition in spots:
            first, end = shown[topic]["firsts"][partition], shown[topic]["ends"][partition]
            if self._start == "first" or topic in known:
                starts[topic, partition] = first
            elif self._start == "last":
                starts[topic, partition] = end
            else:
                starts[topic, partition] = self._at(topic, partition, first, end, micros(self._start))
        return starts

    def _at(self, topic: str, partition: int, first: int, end: int, at: int) -> int:
        """The first offset that was stored at that time or later."""
        while first < end:
            middle = (first + end) // 2
            chunks = unpack_chunks(self._core.request(Opcode.READ, _read((topic, partition), middle, 0, 1))).chunks
            if chunks and chunks[0].stored_at < at:
                first = max(middle, chunks[0].base_offset + chunks[0].first_row + chunks[0].rows - 1) + 1
            else:
                end = middle
        return end

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """Messages, until it is closed. One is processed when the next one is asked for."""
        while not self.closed:
            message = self.receive(POLL_S)
            if message is not None:
                yield message

    def receive(self, timeout: float | None = None) -> ReceivedMessage | None:
        """The next message; None after `timeout` seconds without one, and once it is closed.

        The message before it counts as processed. Lost connections are survived silently. Raises why it cannot go on.
        """
        self._processed()
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.closed:
            self._save_now_and_then()
            if self._ready:
                message = self._last = self._ready.popleft()
                return message
            left = POLL_S if deadline is None else deadline - time.monotonic()
            if left <= 0 and deadline is not None:
                return None
            self._fetch(max(0.0, min(left, self._saved_at + SAVE_S - time.monotonic())))
        return None

    def commit(self) -> None:
        """Saves the positions now; the message handed out last counts as processed."""
        self._processed()
        self._save()

    def _processed(self) -> None:
        message, self._last = self._last, None
        if message is not None:
            self._done[message.topic, message.partition] = message.offset + 1
            self._dirty = True

    def _save_now_and_then(self) -> None:
        now = time.monotonic()
        if now - self._saved_at >= SAVE_S:
            self._save()
        if now - self._looked_at >= LOOK_S:
            try:
                self._look(fresh=False)
            except TxmqError as error:
                if not error.retriable:
                    raise
                log.info("reader.not_looked", reader=self.name, error=str(error))

    def _save(self) -> None:
        self._saved_at = time.monotonic()
        if self._dirty:
            self._store.save(self.name, self._core.log_id, self._done)
            self._dirty = False

    def _fetch(self, patience: float) -> None:
        """Asks for what nobody has asked for, and waits for an answer."""
        now = time.monotonic()
        if now < self._paused_until:
            time.sleep(min(patience, self._paused_until - now))
            return
        try:
            connection = self._connection or self._connect()
            for spot, offset in self._positions.items():
                if spot not in self._asked.values():
                    payload = _read(spot, offset, round(POLL_S * 1_000), READ_BYTES)
                    self._asked[connection.write(Opcode.READ, payload, now + DIAL_S)] = spot
            if select.select([connection.socket], [], [], patience)[0]:
                for frame in connection.receive(now + patience + DIAL_S):
                    self._take(frame)
        except (TxmqError, OSError) as error:
            self._lost(error)

    def _connect(self) -> Connection:
        self._connection = connection = self._core.dial(time.monotonic() + DIAL_S)
        self._pause = FIRST_PAUSE_S
        return connection

    def _lost(self, error: TxmqError | OSError) -> None:
        """Another connection may help, after a pause that grows, unless the error says that none will."""
        self._disconnect()
        if isinstance(error, TxmqError) and not error.retriable and not isinstance(error, ConnectionLost):
            raise error
        log.warning("reader.disconnected", reader=self.name, error=str(error))
        self._paused_until = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)

    def _take(self, frame: Frame) -> None:
        spot = self._asked.pop(frame.correlation)
        try:
            found = unpack_chunks(result(frame))
        except OffsetOutOfRange as error:
            self._passed(spot, error)
            return
        for chunk in found.chunks:
            self._ready.extend(_messages(chunk, self._positions[spot]))
        self._positions[spot] = max(found.next_offset, self._positions[spot])

    def _passed(self, spot: Spot, error: OffsetOutOfRange) -> None:
        """Retention was faster: it goes on with the first message that is kept."""
        first = error.detail.get("first")
        if not isinstance(first, int) or first <= self._positions[spot]:
            raise error
        self.missed += first - self._positions[spot]
        log.warning("reader.passed", reader=self.name, topic=spot[0], partition=spot[1], missed=self.missed)
        self._positions[spot] = self._done[spot] = first
        self._dirty = True

    def _forget(self) -> None:
        """What waits here is read again if need be."""
        self._disconnect()
        self._ready.clear()
        self._positions.clear()

    def _disconnect(self) -> None:
        self._asked.clear()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        """Saves the positions and ends. The message handed out last does not count as processed: see `commit`."""
        if self.closed:
            return
        self.closed = True
        self._last = None
        self._disconnect()
        try:
            self._save()
        finally:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read(spot: Spot, offset: int, wait_ms: int, size: int) -> bytes:
    return pack_read(Read(spot[1], offset, wait_ms, size, spot[0]))


def _messages(chunk: Chunk, start: int) -> Iterator[ReceivedMessage]:
    """Of a chunk, whose batch may begin before the offset that was asked for."""
    parcel = Parcel(chunk, owner=None, epoch=0, now=0.0)
    for offset in range(max(start, parcel.start), parcel.end):
        yield ReceivedMessage(*parcel.message(offset))
