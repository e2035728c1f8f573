"""A simulated partition, as hostile as Kafka and its clients have been seen to be.

Each writer has a queue, of which one record at a time is under way. A request or its
answer is lost and tried again; what is tried again is taken for a duplicate, without an
offset, or appended a second time and acknowledged at either place. A record is given up
with an error, which comes after all the same or never. Copies come seconds later, also
after the writer is gone. Readers fall behind, and offsets have gaps. The partition is
away for a while, for all or for one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Protocol

from tests.simulation.clock import SimulatedClock
from txmq.store.shared.partition import CaughtUp, Deliver, Lost, Reported


class Topic:
    """The one partition of a topic: all records that it ever took, by offset.

    `trouble` is a factor of all faults, 0 without any.
    """

    def __init__(self, clock: SimulatedClock, rng: Random) -> None:
        self.clock, self.rng = clock, rng
        self.trouble = 1.0
        # of a request, of its answer, of a reader; records that a reader gets at once
        self.request_s, self.report_s, self.read_s, self.batch = 0.003, 0.002, 0.005, 20
        self.records: list[tuple[int, bytes]] = []
        self.first = 0  # what is before this offset was forgotten
        self.is_away = False
        self.counts: Counter[str] = Counter()
        self.next_offset = 0

    def append(self, data: bytes) -> int:
        if self.records and self.has(0.01):  # as a control record of Kafka's takes a place
            self.next_offset += 1
        offset, self.next_offset = self.next_offset, self.next_offset + 1
        self.records.append((offset, data))
        return offset

    def cut(self, records: int) -> None:
        """Lose the last records, as an unclean election does."""
        del self.records[-records:]
        self.next_offset = self.records[-1][0] + 1

    def has(self, share: float) -> bool:
        """Return whether a fault of this share happens now."""
        return self.rng.random() < share * self.trouble


class Machine(Protocol):
    """The machine of a writer: it may stand still, and then no callback comes."""

    is_cut_off: bool  # from the partition

    def when_awake(self, call: Callable[[], None]) -> None: ...


class SimulatedPartition:
    """The partition as one process of one machine sees it."""

    def __init__(self, topic: Topic, machine: Machine) -> None:
        self._topic, self._machine = topic, machine
        self._queue: deque[tuple[bytes, Reported]] = deque()
        self._is_under_way = self._is_closed = False
        self._next, self._told = 0, -1

    def produce(self, data: bytes, reported: Reported) -> None:
        self._queue.append((data, reported))
        self._send_next()

    def read_from(self, offset: int, deliver: Deliver, caught_up: CaughtUp, lost: Lost) -> None:
        self._next = offset
        self._callbacks = deliver, caught_up, lost
        self._read_later()

    def forget_before(self, offset: int) -> None:
        self._topic.first = max(self._topic.first, offset)

    def close(self) -> None:
        """Give up; what is queued may come all the same."""
        self._is_closed = True

    @property
    def _is_away(self) -> bool:
        return self._topic.is_away or self._machine.is_cut_off

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        self._topic.clock.callLater(seconds * self._topic.rng.uniform(0.3, 3.0), call)

    def _tell(self, call: Callable[[], None]) -> None:
        def told() -> None:
            if not self._is_closed:
                call()

        self._machine.when_awake(told)

    # writing: the network goes on while the machine stands still

    def _send_next(self) -> None:
        if self._queue and not self._is_under_way:
            self._is_under_way = True
            data, reported = self._queue.popleft()
            self._later(self._topic.request_s, partial(self._arrive, data, reported, 0, None))

    def _arrive(self, data: bytes, reported: Reported, tries: int, taken_at: int | None) -> None:
        topic = self._topic
        again = partial(self._arrive, data, reported, tries + 1)
        if self._is_away or topic.has(0.05):
            if tries > 8 or topic.has(0.05):
                self._give_up(data, reported)
            else:
                self._later(0.1, partial(again, taken_at))
            return
        if taken_at is None:
            offset: int | None = topic.append(data)
        elif topic.has(0.5):  # another producer id after an error: it is not recognised
            topic.counts["appended twice"] += 1
            offset = topic.rng.choice([taken_at, topic.append(data)])
        else:
            topic.counts["taken for a duplicate"] += 1
            offset = None
        if topic.has(0.05):
            self._later(0.1, partial(again, taken_at if offset is None else offset))
            return
        if topic.has(0.02):
            topic.counts["late copies"] += 1
            self._later(1.0, partial(topic.append, data))  # type: ignore[arg-type]  # the offset is not for us
        if topic.has(0.02):
            offset = None
        self._report(reported, None, offset)

    def _give_up(self, data: bytes, reported: Reported) -> None:
        topic = self._topic
        topic.counts["given up"] += 1
        if topic.rng.random() < 0.4:
            topic.counts["given up and appended"] += 1
            self._later(0.3, partial(topic.append, data))  # type: ignore[arg-type]  # the offset is not for us
        self._report(reported, TimeoutError("the record timed out"), None)

    def _report(self, reported: Reported, error: Exception | None, offset: int | None) -> None:
        def report() -> None:
            if self._is_away:
                self._later(0.1, report)
                return
            self._tell(partial(reported, error, offset))
            self._is_under_way = False
            self._send_next()

        self._later(self._topic.report_s, report)

    # reading

    def _read_later(self) -> None:
        delay = 0.5 if self._topic.has(0.01) else self._topic.read_s
        self._later(delay, lambda: self._tell(self._read))

    def _read(self) -> None:
        topic = self._topic
        deliver, caught_up, lost = self._callbacks
        if not self._is_away:
            if not topic.first <= self._next <= topic.next_offset:
                lost(topic.first)
                return
            at = bisect_left(topic.records, (self._next,))
            for offset, data in topic.records[at : at + topic.rng.randint(1, topic.batch)]:
                if not self._is_closed:
                    self._next = offset + 1
                    deliver(offset, data)
            if self._next == topic.next_offset != self._told and not self._is_closed:
                self._told = self._next
                caught_up(self._next)
        if not self._is_closed:
            self._read_later()
