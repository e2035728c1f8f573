"""Acks on their way: collected, joined to ranges, and kept until the broker has
confirmed them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from txmq.wire.headers import Acked

RANGES_AT_ONCE = 10_000
REMEMBERED = 64  # answers that refused something, for those who wait for an ack


class _Refused(NamedTuple):
    """What an answer to acks with numbers above `first`, up to `last`, refused."""

    first: int
    last: int
    ranges: Sequence[Acked]


@dataclass(slots=True)
class _Run:
    """Offsets that were acked one after the other."""

    topic: str
    partition: int
    start: int
    end: int

    @property
    def acked(self) -> Acked:
        return Acked(self.topic, self.partition, self.start, self.end)


class AckBook:
    """What is acked here and not yet confirmed. One request is under way at a time;
    what comes meanwhile waits.
    """

    def __init__(self) -> None:
        self._pending: list[_Run] = []
        self._under_way: tuple[Acked, ...] = ()
        self._number = 1  # of what is pending
        self._confirmed = self._covers = (
            0  # up to which number all is confirmed; will be, by what is under way
        )
        self._last = 0  # the last number of what is under way
        self._refused: deque[_Refused] = deque(maxlen=REMEMBERED)
        self.since: float | None = None  # when the oldest pending one came
        self.news = False  # since then nobody has looked when to send; for those who look to reset

    @property
    def empty(self) -> bool:
        """Whether everything is confirmed."""
        return not self._pending and not self._under_way

    @property
    def due(self) -> bool:
        """Whether a request could go out now."""
        return bool(self._pending) and not self._under_way

    def add(self, topic: str, partition: int, start: int, end: int, now: float) -> int:
        """Takes the ack of a range in. Returns a number for `confirmed`."""
        last = self._pending[-1] if self._pending else None
        if (
            last is not None
            and last.end == start
            and last.partition == partition
            and last.topic == topic
        ):
            last.end = end
        else:
            self._pending.append(_Run(topic, partition, start, end))
        if self.since is None:
            self.since, self.news = now, True
        return self._number

    def take(self) -> tuple[Acked, ...]:
        """What goes into the next request."""
        joined = join(run.acked for run in self._pending)
        self._under_way = tuple(joined[:RANGES_AT_ONCE])
        self._pending = [_Run(*rest) for rest in joined[RANGES_AT_ONCE:]]
        self._covers, self._last = self._confirmed, self._number
        if not self._pending:
            self.since = None
            self._covers = self._number
            self._number += 1
        return self._under_way

    def confirm(self, refused: tuple[Acked, ...] = ()) -> None:
        """The broker has what was under way, except for what it `refused`: that comes
        again, to whomever.
        """
        self._under_way = ()
        if refused:
            self._refused.append(_Refused(self._confirmed, self._last, refused))
        self._confirmed = self._covers

    def put_back(self, now: float) -> None:
        """What was under way may or may not have arrived: it goes out again."""
        self._pending[:0] = [_Run(*acked) for acked in self._under_way]
        self._under_way = ()
        if self._pending and self.since is None:
            self.since = now

    def confirmed(self, number: int) -> bool:
        """Whether the ack with this number has reached the broker's log."""
        return number <= self._confirmed

    def refused(self, number: int, place: Acked) -> bool:
        """Whether anything there, acked with this number and confirmed a moment ago,
        came too late.
        """
        topic, partition, start, end = place
        answers = (
            answer.ranges for answer in self._refused if answer.first < number <= answer.last
        )
        return any(
            one.topic == topic
            and one.partition == partition
            and one.start < end
            and start < one.end
            for ranges in answers
            for one in ranges
        )

    def ranges(self) -> list[Acked]:
        """All that is not confirmed."""
        return [*self._under_way, *(run.acked for run in self._pending)]


def join(ranges: Iterable[Acked]) -> list[Acked]:
    """The same offsets in as few ranges as possible."""
    joined: list[Acked] = []
    for topic, partition, start, end in sorted(ranges):
        if joined:
            last = joined[-1]
            if last.end >= start and last.partition == partition and last.topic == topic:
                if end > last.end:
                    joined[-1] = Acked(topic, partition, last.start, end)
                continue
        joined.append(Acked(topic, partition, start, end))
    return joined
