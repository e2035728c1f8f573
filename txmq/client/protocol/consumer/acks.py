"""Acks until the broker has confirmed them: collected, and joined to ranges."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from txmq.model.topic_partition import PartitionName
from txmq.wire.data_requests import AckedRange

RANGES_PER_REQUEST = 10_000
REMEMBERED = 64  # replies with refused ranges, for callers that wait for an ack


class _RefusedRanges(NamedTuple):
    """The ranges refused in the reply to acks with numbers above `first`, up to
    `last`.
    """

    first: int
    last: int
    ranges: Sequence[AckedRange]


@dataclass(slots=True)
class _Range:
    """Offsets that were acked one after the other, or `filtered`: not wanted."""

    topic: str
    partition: int
    start: int
    end: int
    filtered: bool = False

    @property
    def acked(self) -> AckedRange:
        return AckedRange(self.topic, self.partition, self.start, self.end)


class PendingAcks:
    """Acks that the broker has not confirmed.

    One request is in flight at a time; acks that are added meanwhile wait for its
    reply. `since` is when the oldest waiting ack was added. `needs_wakeup`: set with
    `since`, and cleared by the thread that wakes the sender.
    """

    def __init__(self) -> None:
        self._pending: list[_Range] = []
        self._in_flight: list[_Range] = []
        self._number = 1  # of what is pending
        self._confirmed = 0  # all acks up to this number are confirmed
        self._covered = 0  # and up to this one, once the request in flight is
        self._last = 0  # the last number in the request in flight
        self._refused: deque[_RefusedRanges] = deque(maxlen=REMEMBERED)
        self.since: float | None = None
        self.needs_wakeup = False

    @property
    def empty(self) -> bool:
        """True if everything is confirmed."""
        return not self._pending and not self._in_flight

    @property
    def can_send(self) -> bool:
        """True if acks wait and no request is in flight."""
        return bool(self._pending) and not self._in_flight

    def add(
        self,
        topic: str,
        partition: int,
        start: int,
        end: int,
        now: float,
        *,
        filtered: bool = False,
    ) -> int:
        """Add the ack of a range. Return its number, for `is_confirmed`. `filtered`:
        the member's tags or selector passed over it.
        """
        last = self._pending[-1] if self._pending else None
        if (
            last is not None
            and last.end == start
            and last.partition == partition
            and last.topic == topic
            and last.filtered is filtered
        ):
            last.end = end
        else:
            self._pending.append(_Range(topic, partition, start, end, filtered))
        if self.since is None:
            self.since, self.needs_wakeup = now, True
        return self._number

    def begin_request(self) -> tuple[tuple[AckedRange, ...], tuple[AckedRange, ...]]:
        """Return the ranges of the next request, which is in flight from now on: what
        was processed, and what was filtered.
        """
        joined = [
            _Range(*one, filtered)
            for filtered in (False, True)
            for one in join(each.acked for each in self._pending if each.filtered is filtered)
        ]
        self._in_flight = joined[:RANGES_PER_REQUEST]
        self._pending = joined[RANGES_PER_REQUEST:]
        self._covered, self._last = self._confirmed, self._number
        if not self._pending:
            self.since = None
            self._covered = self._number
            self._number += 1
        processed, filtered = (
            tuple(each.acked for each in self._in_flight if each.filtered is which)
            for which in (False, True)
        )
        return processed, filtered

    def confirm(self, refused: tuple[AckedRange, ...] = ()) -> None:
        """End the request in flight. The broker delivers again what it `refused`."""
        self._in_flight = []
        if refused:
            self._refused.append(_RefusedRanges(self._confirmed, self._last, refused))
        self._confirmed = self._covered

    def resend(self, now: float) -> None:
        """Send the request in flight again: it may or may not have arrived."""
        self._pending[:0] = self._in_flight
        self._in_flight = []
        if self._pending and self.since is None:
            self.since = now

    def forget(self, partitions: Collection[PartitionName]) -> None:
        """Drop the acks of these partitions that are not in flight, as refused."""
        dropped = [each.acked for each in self._pending if each.acked[:2] in partitions]
        if not dropped:
            return
        self._refused.append(_RefusedRanges(self._confirmed, self._number, dropped))
        self._pending = [each for each in self._pending if each.acked[:2] not in partitions]
        if not self._pending:
            self.since = None
            self._covered = self._number
            self._number += 1
            if not self._in_flight:
                self._confirmed = self._covered

    def is_confirmed(self, number: int) -> bool:
        """Return whether the ack with this number has been answered."""
        return number <= self._confirmed

    def was_refused(self, number: int, place: AckedRange) -> bool:
        """Return whether the broker refused any of this range, acked with this number
        and answered a moment ago.
        """
        topic, partition, start, end = place
        replies = (reply.ranges for reply in self._refused if reply.first < number <= reply.last)
        return any(
            one.topic == topic
            and one.partition == partition
            and one.start < end
            and start < one.end
            for ranges in replies
            for one in ranges
        )

    def unconfirmed(self) -> list[AckedRange]:
        """Return all ranges that are not confirmed."""
        return [each.acked for each in (*self._in_flight, *self._pending)]


def join(ranges: Iterable[AckedRange]) -> list[AckedRange]:
    """Return the same offsets in as few ranges as possible."""
    joined: list[AckedRange] = []
    for topic, partition, start, end in sorted(ranges):
        if joined:
            last = joined[-1]
            if last.end >= start and last.partition == partition and last.topic == topic:
                if end > last.end:
                    joined[-1] = AckedRange(topic, partition, last.start, end)
                continue
        joined.append(AckedRange(topic, partition, start, end))
    return joined
