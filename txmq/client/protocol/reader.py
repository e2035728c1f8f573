"""What a reader without a group does, without I/O: what it asks for, what comes of it,
where it is. For both faces.

It reads every message of its partitions, in the order of each. Its positions are saved
every few seconds, before it begins to read other partitions, and when it is closed:
never ahead of what was processed, so after a crash messages may come again, and none is
missed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from txmq.client.log import get_logger
from txmq.client.protocol.consumer.fetched import Parcel, delivered_messages
from txmq.client.protocol.consumer.settings import microseconds_ago
from txmq.client.protocol.conversation import returned
from txmq.client.protocol.offsets import Offsets, Spot
from txmq.client.protocol.sender.topics import shape_of
from txmq.errors import LocalProtocolError, OffsetOutOfRange
from txmq.model.message import ReceivedMessage, check_name, micros
from txmq.wire.calls import encode_call
from txmq.wire.chunks import Chunk, unpack_chunks
from txmq.wire.headers import Opcode, Read, pack_read

SAVE_S = 5.0  # between two times that positions are saved, as MetaQ and RocketMQ do it
LOOK_S = 30.0  # between two looks for partitions that a topic has grown
POLL_S = 20.0
READ_BYTES = 1 << 20  # of one answer, which is what waits here of each partition
STARTS = ("first", "last")
Start = Literal["first", "last"] | datetime | timedelta | int
T = TypeVar("T")
log = get_logger()


class Ask(NamedTuple):
    """A request to the broker that may be made twice."""

    opcode: int
    payload: bytes


Plan: TypeAlias = Generator[Ask, bytes, T]  # gives requests, gets the payloads of their replies


class Look(NamedTuple):
    """Which partitions there are to read, and where those begin that have no position
    yet.
    """

    chosen: tuple[Spot, ...]
    starts: dict[Spot, int]


class Reading:
    """For one thread."""

    def __init__(self, name: str, topics: Iterable[str], start: Start) -> None:
        """`start`: where partitions begin that have no position yet; those that a topic
        has grown, at the first.
        """
        if isinstance(topics, str) or not (names := list(topics)):
            raise LocalProtocolError(
                f"{topics!r} are no topics", hint='a sequence of names: topics=["orders"]'
            )
        self.name = check_name(name, "reader")
        self._topics = [check_name(topic, "topic") for topic in dict.fromkeys(names)]
        self._start = _checked(start)
        self._done: dict[Spot, int] = {}  # the next message to process
        self._positions: dict[Spot, int] = {}  # the next message to hand out
        self._ready: deque[ReceivedMessage] = deque()
        self._chosen: frozenset[Spot] | None = None
        self._asked: set[Spot] = set()
        self._last: ReceivedMessage | None = None
        self.dirty = False  # whether the positions have changed since they were saved
        self.missed = 0  # messages that retention had dropped before they were read

    @property
    def positions(self) -> dict[Spot, int]:
        """The next message to process of each partition."""
        return dict(self._done)

    def load(self, saved: Offsets) -> None:
        """These positions were saved. Called once, first of all."""
        self._done = dict(saved)

    def choose(self, partitions: Collection[Spot] | None) -> None:
        """Reads only these partitions from the next look on, or (None) all. What waits
        here is forgotten.
        """
        self._chosen = None if partitions is None else frozenset(partitions)
        self._ready.clear()
        self._positions.clear()
        self._asked.clear()

    def look(self) -> Plan[Look | None]:
        """Finds out which partitions there are; None = the same as before."""
        wanted: list[Spot] = []
        for topic in self._topics:
            described = yield _call("topic.describe", names=[topic], create=True)
            wanted += [
                (topic, number) for number in range(shape_of(topic, returned(described)).partitions)
            ]
        chosen = tuple(spot for spot in wanted if self._chosen is None or spot in self._chosen)
        if chosen == tuple(self._positions):
            return None
        return Look(
            chosen, (yield from self._starts([spot for spot in chosen if spot not in self._done]))
        )

    def adopt(self, look: Look) -> None:
        """Reads these partitions from now on. What was processed before must have been
        saved.
        """
        self._done |= look.starts
        self._positions = {
            spot: self._positions.get(spot, self._done[spot]) for spot in look.chosen
        }
        self.dirty = self.dirty or bool(look.starts)

    def _starts(self, spots: Collection[Spot]) -> Plan[dict[Spot, int]]:
        known = {
            topic for topic, _partition in self._done
        }  # so that what they have more of now is new
        starts, shown = {}, dict[str, Any]()
        for topic, partition in spots:
            if topic not in shown:
                shown[topic] = returned((yield _call("topic.show", name=topic)))
            first, end = shown[topic]["firsts"][partition], shown[topic]["ends"][partition]
            if self._start == "first" or topic in known:
                starts[topic, partition] = first
            elif self._start == "last":
                starts[topic, partition] = end
            else:
                starts[topic, partition] = yield from _at(
                    (topic, partition), first, end, self._start
                )
        return starts

    @property
    def is_dry(self) -> bool:
        """Whether nothing waits here to be handed out."""
        return not self._ready

    def asks(self) -> Iterator[tuple[Spot, Ask]]:
        """What nobody has asked for yet."""
        for spot, offset in self._positions.items():
            if spot not in self._asked:
                self._asked.add(spot)
                yield spot, _read(spot, offset, round(POLL_S * 1_000), READ_BYTES)

    def answered(self, spot: Spot, payload: bytes) -> None:
        """The reply to what was asked for that partition."""
        self._asked.discard(spot)
        found = unpack_chunks(payload)
        for chunk in found.chunks:
            self._ready.extend(messages_of(chunk, self._positions[spot]))
        self._positions[spot] = max(found.next_offset, self._positions[spot])

    def passed(self, spot: Spot, error: OffsetOutOfRange) -> None:
        """Retention was faster: it goes on with the first message that is kept. Raises
        the error if there is none.
        """
        self._asked.discard(spot)
        first = error.detail.get("first")
        if not isinstance(first, int) or first <= self._positions[spot]:
            raise error
        self.missed += first - self._positions[spot]
        log.warning(
            "reader.passed", reader=self.name, topic=spot[0], partition=spot[1], missed=self.missed
        )
        self._positions[spot] = self._done[spot] = first
        self.dirty = True

    def lost(self) -> None:
        """The connection is gone, and with it what was asked for."""
        self._asked.clear()

    def take(self) -> ReceivedMessage | None:
        """The next message to hand out, if it is there. The one before must have been
        `processed`.
        """
        self._last = self._ready.popleft() if self._ready else None
        return self._last

    def processed(self) -> None:
        """The message handed out last is."""
        message, self._last = self._last, None
        if message is not None:
            self._done[message.topic, message.partition] = message.offset + 1
            self.dirty = True

    def give_up(self) -> None:
        """The message handed out last does not count as processed."""
        self._last = None


def messages_of(chunk: Chunk, start: int) -> Iterator[ReceivedMessage]:
    """The messages of a chunk from an offset on: its batch may begin before the one
    that was asked for.
    """
    parcel = Parcel(chunk, owner=None, epoch=0, now=0.0)
    return map(
        ReceivedMessage._make,
        delivered_messages(parcel, parcel.view, max(start, parcel.start), parcel.end),
    )


class Reads:
    """What a reader of either face tells of itself."""

    _reading: Reading

    @property
    def name(self) -> str:
        """What its positions are kept under."""
        return self._reading.name

    @property
    def positions(self) -> dict[Spot, int]:
        """The next message to process of each partition."""
        return self._reading.positions

    @property
    def missed(self) -> int:
        """Messages that retention had dropped before they were read."""
        return self._reading.missed


def _at(spot: Spot, first: int, end: int, at: int) -> Plan[int]:
    """The first offset that was stored at that time or later."""
    while first < end:
        middle = (first + end) // 2
        chunks = unpack_chunks((yield _read(spot, middle, 0, 1))).chunks
        if chunks and chunks[0].stored_at < at:
            first = (
                max(middle, chunks[0].base_offset + chunks[0].first_row + chunks[0].rows - 1) + 1
            )
        else:
            end = middle
    return end


def _checked(start: Start) -> Literal["first", "last"] | int:
    """Times in microseconds. Raises LocalProtocolError for a start that cannot be
    meant.
    """
    if isinstance(start, timedelta):
        return time.time_ns() // 1_000 - microseconds_ago(start)
    if not isinstance(start, str):
        return micros(start)
    if start not in STARTS:
        raise LocalProtocolError(
            f"start is {start!r}", hint='"first", "last", a time, or a timedelta ago'
        )
    return start


def _call(name: str, /, **args: object) -> Ask:
    return Ask(Opcode.CALL, encode_call(name, args))


def _read(spot: Spot, offset: int, wait_ms: int, size: int) -> Ask:
    return Ask(Opcode.READ, pack_read(Read(spot[1], offset, wait_ms, size, spot[0])))
