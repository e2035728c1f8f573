"""Acks on their way: collected, joined to ranges, and kept until the broker has confirmed them."""

from __future__ import annotations

from collections.abc import Iterable

from txmq.wire.headers import Acked

RANGES_AT_ONCE = 10_000


class AckBook:
    """What is acked here and not yet confirmed. One request is under way at a time; what comes meanwhile waits."""

    def __init__(self) -> None:
        self._pending: list[Acked] = []
        self._under_way: tuple[Acked, ...] = ()
        self._number = 1  # of what is pending
        self._confirmed = self._covers = 0  # up to which number all is confirmed; will be, by what is under way
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

    def add(self, acked: Acked, now: float) -> int:
        """Takes an ack in. Returns a number for `confirmed`."""
        self._pending.append(acked)
        if self.since is None:
            self.since, self.news = now, True
        return self._number

    def take(self) -> tuple[Acked, ...]:
        """What goes into the next request."""
        joined = join(self._pending)
        self._under_way, self._pending = tuple(joined[:RANGES_AT_ONCE]), joined[RANGES_AT_ONCE:]
        self._covers = self._confirmed
        if not self._pending:
            self.since = None
            self._covers = self._number
            self._number += 1
        return self._under_way

    def confirm(self) -> None:
        """The broker has what was under way."""
        self._under_way = ()
        self._confirmed = self._covers

    def put_back(self, now: float) -> None:
        """What was under way may or may not have arrived: it goes out again."""
        self._pending[:0] = self._under_way
        self._under_way = ()
        if self._pending and self.since is None:
            self.since = now

    def confirmed(self, number: int) -> bool:
        """Whether the ack with this number has reached the broker's log."""
        return number <= self._confirmed

    def ranges(self) -> list[Acked]:
        """All that is not confirmed."""
        return [*self._under_way, *self._pending]


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
