"""Reading without a consumer group: requests, replies, positions; for all faces.

A reader reads every message of its partitions, in the order of each. Its positions are
saved every few seconds, before it begins to read other partitions, and when it is
closed. They are never ahead of what was processed: after a crash messages may be read
again, and none is missed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

from txmq.client.log import get_logger
from txmq.client.protocol.consumer.fetched import FetchedBatch, build_messages
from txmq.client.protocol.consumer.settings import checked_topics, span_in_microseconds
from txmq.client.protocol.offsets import Offsets, ReadBatch, ReadPosition
from txmq.client.protocol.sender.topics import parse_description
from txmq.client.protocol.typed.bodies import Topics
from txmq.errors import LocalProtocolError, LogChanged, OffsetOutOfRange, Throttled, TopicReplaced
from txmq.model.message import ReceivedMessage, check_name, to_micros
from txmq.model.topic_partition import PartitionName
from txmq.wire.chunks import Chunk, unpack_chunks
from txmq.wire.data_requests import Opcode, Read, pack_read

SAVE_S = 5.0  # between two saves of the positions, as in MetaQ and RocketMQ
REFRESH_S = 30.0  # between two searches for partitions that a topic has grown
POLL_S = 20.0
PAUSE_S = 0.1  # after a refusal that names no pause
READ_BYTES = 1 << 20  # of one reply: so much waits locally of each partition
STARTS = ("first", "last")
BEGIN_ANEW = "drop the reader's saved positions to begin anew: FileOffsets has them in NAME.json"
ReaderStart = Literal["first", "last"] | datetime | timedelta | int
log = get_logger()


class ReaderRequest(NamedTuple):
    """A request to the broker that can be repeated."""

    opcode: int
    payload: bytes


ReadRequest = Callable[[int, bytes], Awaitable[bytes]]


class ReaderBroker(Protocol):
    """The broker, for requests that may be repeated."""

    async def call(
        self, name: str, args: dict[str, Any], *, repeat: bool = False
    ) -> dict[str, Any]: ...
    async def request(self, opcode: int, payload: bytes, *, repeat: bool = False) -> bytes: ...


class Discovery(NamedTuple):
    """The partitions to read, and the first offsets of those without a position."""

    partitions: tuple[PartitionName, ...]
    starts: dict[PartitionName, int]


class ReaderState:
    """The positions and fetched messages of a reader at one broker. For one thread.

    `unsaved`: the positions have changed since they were saved. `missed` counts the
    messages that retention had dropped before they were read.
    """

    def __init__(self, name: str, topics: Topics, start: ReaderStart) -> None:
        """`start` is for partitions without a position. Partitions that a topic has
        grown are read from their first message.
        """
        self.name = check_name(name, "reader")
        self._topics = checked_topics(topics)
        self._start = _checked(start)
        self._processed: dict[PartitionName, int] = {}  # the next message to process
        # Batches that were read of each partition, from that of the next message to
        # process on, with their first offsets and their ends.
        self._batches: dict[PartitionName, deque[tuple[int, int, ReadBatch]]] = {}
        self._topic_ids: dict[str, int] = {}
        # On this connection it is not known yet that the last batch is still there.
        self._unverified: set[PartitionName] = set()
        self._read: dict[PartitionName, int] = {}  # the next message to request
        self._ready: deque[ReceivedMessage] = deque()
        self._assigned: frozenset[PartitionName] | None = None
        self._in_flight: set[PartitionName] = set()
        self._last: ReceivedMessage | None = None
        self._paused_until = float("-inf")
        self.unsaved = False
        self.missed = 0

    @property
    def positions(self) -> dict[PartitionName, int]:
        """The next message to process of each partition."""
        return {name: self._position(name, offset) for name, offset in self._processed.items()}

    def _position(self, name: PartitionName, offset: int) -> int:
        """Return an offset with the batch before it, if that was read."""
        batches = self._batches.get(name, deque())
        while batches and batches[0][1] < offset:
            batches.popleft()
        known = bool(batches) and batches[0][0] < offset
        return ReadPosition(offset, batches[0][2]) if known else offset

    def load(self, saved: Offsets) -> None:
        """Begin with saved positions."""
        self._processed = dict(saved)
        for name, offset in saved.items():
            if isinstance(offset, ReadPosition):
                self._batches[name] = deque([(offset - 1, int(offset), offset.batch)])
                self._topic_ids[name[0]] = offset.batch.topic_id

    def assign(self, partitions: Collection[PartitionName] | None) -> None:
        """Read only these partitions from the next `discover` on, or (None) all.

        Messages that wait locally are dropped.
        """
        self._assigned = None if partitions is None else frozenset(partitions)
        self._ready.clear()
        self._read.clear()
        self._in_flight.clear()
        for name, batches in self._batches.items():  # those of dropped messages go, too
            while batches and batches[-1][0] >= self._processed.get(name, 0):
                batches.pop()

    async def discover(self, broker: ReaderBroker) -> Discovery | None:
        """Find the partitions to read; None = the same as before.

        Raises TopicReplaced.
        """
        existing: list[PartitionName] = []
        for topic in self._topics:
            create = topic not in self._topic_ids
            args = {"names": [topic], "create": create}
            described = await broker.call("topic.describe", args, repeat=True)
            found = parse_description(topic, described)
            if found.topic_id != self._topic_ids.setdefault(topic, found.topic_id):
                why = f"topic {topic!r} was deleted and made again since it was read"
                raise TopicReplaced(f"reader {self.name!r}: {why}", hint=BEGIN_ANEW)
            existing += [(topic, number) for number in range(found.partitions)]
        names = tuple(name for name in existing if self._assigned is None or name in self._assigned)
        if names == tuple(self._read):
            return None
        new = [name for name in names if name not in self._processed]
        return Discovery(names, await self._starts(broker, new))

    def adopt(self, discovery: Discovery) -> None:
        """Read these partitions from now on. The positions before must be saved."""
        self._processed |= discovery.starts
        before = self._read
        self._read = {
            name: before.get(name, int(self._processed[name])) for name in discovery.partitions
        }
        self._unverified |= self._read.keys() - before.keys()
        self.unsaved = self.unsaved or bool(discovery.starts)

    async def _starts(
        self, broker: ReaderBroker, names: Collection[PartitionName]
    ) -> dict[PartitionName, int]:
        # Of a topic with positions, a partition without one has grown since.
        read_before = {topic for topic, _partition in self._processed}
        starts, shown = {}, dict[str, Any]()
        read = partial(broker.request, repeat=True)
        for topic, partition in names:
            if topic not in shown:
                shown[topic] = await broker.call("topic.show", {"name": topic}, repeat=True)
            first, end = shown[topic]["firsts"][partition], shown[topic]["ends"][partition]
            if self._start == "first" or topic in read_before:
                starts[topic, partition] = first
            elif self._start == "last":
                starts[topic, partition] = end
            else:
                name = (topic, partition)
                starts[name] = await offset_at_time(read, name, first, end, self._start)
        return starts

    @property
    def is_empty(self) -> bool:
        """True if no message waits locally."""
        return not self._ready

    def next_reads(self, now: float) -> Iterator[tuple[PartitionName, ReaderRequest]]:
        """Return a request for each partition that has none in flight; none in a pause
        that the broker has asked for.

        The first one on a connection begins with the last message that was read, and
        shows whether that is still there.
        """
        if self.pause_s(now):
            return
        for name, offset in self._read.items():
            if name not in self._in_flight:
                self._in_flight.add(name)
                verify = self._last_batch(name) is not None and name in self._unverified
                wait_ms = 0 if verify else round(POLL_S * 1_000)
                topic_id = self._topic_ids.get(name[0], 0)
                yield name, _read(name, offset - verify, wait_ms, READ_BYTES, topic_id)

    def received(self, name: PartitionName, payload: bytes) -> None:
        """Accept the reply to a read of that partition. Raises LogChanged."""
        self._in_flight.discard(name)
        reply = unpack_chunks(payload)
        if name in self._unverified:
            self._verify(name, reply.chunks)
        batches, topic_id = self._batches.setdefault(name, deque()), self._topic_ids.get(name[0], 0)
        for chunk in reply.chunks:
            start = chunk.base_offset + chunk.first_row
            end = start + chunk.rows
            if end > self._read[name]:
                self._ready.extend(decode_messages(chunk, self._read[name]))
                batches.append((start, end, ReadBatch(topic_id, chunk.stored_at, chunk.position)))
        self._read[name] = max(reply.next_offset, self._read[name])

    def throttled(self, name: PartitionName, refused: Throttled, now: float) -> None:
        """Read nothing more until the pause is over that the broker asks for. The limit
        is the user's, so a read of another partition would be refused as well.
        """
        self._in_flight.discard(name)
        pause = refused.retry_after_s or PAUSE_S
        self._paused_until = max(self._paused_until, now + pause)

    def pause_s(self, now: float) -> float:
        """Return the seconds until more may be read."""
        return max(0.0, self._paused_until - now)

    def _last_batch(self, name: PartitionName) -> ReadBatch | None:
        """Return the batch of the last message that was read."""
        batches = self._batches.get(name)
        return batches[-1][2] if batches else None

    def _verify(self, name: PartitionName, chunks: Sequence[Chunk]) -> None:
        """Raise LogChanged unless the first of these chunks is the last batch read."""
        self._unverified.discard(name)
        last = self._last_batch(name)
        if last is not None and (
            not chunks or (chunks[0].stored_at, chunks[0].position) != last[1:]
        ):
            raise self._restored(name)

    def _restored(self, name: PartitionName) -> LogChanged:
        return LogChanged(
            f"message {self._read[name] - 1} of {name[0]}/{name[1]}, which reader {self.name!r}"
            " has read, is not the same any more: the log was restored from a backup",
            hint=BEGIN_ANEW,
        )

    def skip_to_retained(self, name: PartitionName, error: OffsetOutOfRange) -> None:
        """Go on with the first retained message. Raises the error if there is none."""
        self._in_flight.discard(name)
        first, end = error.detail.get("first"), error.detail.get("end")
        if isinstance(end, int) and end < self._read[name]:
            raise self._restored(name) from error
        if isinstance(first, int) and first == self._read[name] and name in self._unverified:
            self._unverified.discard(name)  # retention has removed all that was read
            return
        if not isinstance(first, int) or first <= self._read[name]:
            raise error
        self.missed += first - self._read[name]
        log.warning(
            "reader.passed", reader=self.name, topic=name[0], partition=name[1], missed=self.missed
        )
        self._read[name] = self._processed[name] = first
        self._unverified.discard(name)
        self._batches.pop(name, None)
        self.unsaved = True

    def disconnected(self) -> None:
        """Forget the requests in flight. The broker may come back with another log's
        contents.
        """
        self._in_flight.clear()
        self._unverified.update(self._read)

    def next_message(self) -> ReceivedMessage | None:
        """Return the next message, if one waits locally. `mark_processed` comes first
        for the message before.
        """
        self._last = self._ready.popleft() if self._ready else None
        return self._last

    def mark_processed(self) -> None:
        """Count the last message as processed."""
        message, self._last = self._last, None
        if message is not None:
            self._processed[message.topic, message.partition] = message.offset + 1
            self.unsaved = True

    def discard_last(self) -> None:
        """Do not count the last message as processed."""
        self._last = None


def decode_messages(chunk: Chunk, start: int) -> Iterator[ReceivedMessage]:
    """Return the messages of a chunk from an offset on.

    The chunk's batch may begin below the offset that was requested.
    """
    fetched = FetchedBatch(chunk, owner=None, epoch=0, now=0.0)
    return map(
        ReceivedMessage._make,
        build_messages(fetched, fetched.view, max(start, fetched.start), fetched.end),
    )


async def offset_at_time(
    request: ReadRequest, name: PartitionName, first: int, end: int, at: int
) -> int:
    """Return the first offset that was stored at that time or later.

    `request` sends a READ to the broker, and returns the reply.
    """
    while first < end:
        middle = (first + end) // 2
        found = await request(*_read(name, middle, 0, 1))
        chunks = unpack_chunks(found).chunks
        if chunks and chunks[0].stored_at < at:
            first = (
                max(middle, chunks[0].base_offset + chunks[0].first_row + chunks[0].rows - 1) + 1
            )
        else:
            end = middle
    return end


def _checked(start: ReaderStart) -> Literal["first", "last"] | int:
    """Return a start, a time in µs. Raises LocalProtocolError for an invalid one."""
    if isinstance(start, timedelta):
        return time.time_ns() // 1_000 - span_in_microseconds(start)
    if not isinstance(start, str):
        return to_micros(start)
    if start not in STARTS:
        raise LocalProtocolError(
            f"start is {start!r}",
            hint='use "first", "last", a time, or timedelta(hours=2) for two hours ago',
        )
    return start


def _read(
    name: PartitionName, offset: int, wait_ms: int, size: int, topic_id: int = 0
) -> ReaderRequest:
    request = Read(name[1], offset, wait_ms, size, name[0], topic_id)
    return ReaderRequest(Opcode.READ, pack_read(request))


class Found(NamedTuple):
    """The messages of a read, and the offset of the next one to read."""

    messages: list[ReceivedMessage]
    next_offset: int


def read_payload(topic: str, partition: int, offset: int, wait_s: float) -> bytes:
    """Return the request to read from an offset on."""
    return pack_read(Read(partition, offset, round(wait_s * 1_000), READ_BYTES, topic))


def found_in(payload: bytes, offset: int) -> Found:
    """Return what the reply to a read from that offset on has."""
    found = unpack_chunks(payload)
    messages = [message for chunk in found.chunks for message in decode_messages(chunk, offset)]
    return Found(messages, found.next_offset)


def positions_of_one_broker(call: str) -> LocalProtocolError:
    """Return the error for a call that names partitions to a reader of several
    brokers.
    """
    return LocalProtocolError(
        f"{call} names partitions of one broker, and this reader has several",
        hint="use a reader of each broker: cluster.clients[0].reader(…)",
    )
