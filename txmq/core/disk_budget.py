"""Budget of bytes on their way to the disk, judged by what earlier writes took.

A write takes a fixed time and a time for each byte. Both come from a straight line
through the sizes and times of recent writes. Decisions and acks wait for what is in the
log before them, so the bytes there may double the fixed time, and no more.
"""

from __future__ import annotations

WRITES = 64  # that count: three seconds of a disk that is behind, so that a pause is no trend
SPREAD = 0.01  # below this relative variance of sizes, writes say nothing about the rate
QUICK_S = 0.01  # of bytes; on a disk whose fixed time is shorter
LEAST_BYTES = 256 << 10
UNKNOWN_BYTES = 4 << 20  # while all writes were alike: the first burst tells the rate
LONGEST_S = 5.0


class DiskBudget:
    """A budget in `bytes`: all that may be unflushed before sends have to wait."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.bytes = min(most, UNKNOWN_BYTES)
        self._slope: float | None = None  # seconds for each byte, once writes tell
        self._fixed_s = 0.0
        self._size = self._time = self._square = self._product = 0.0  # means
        self._writes = 0

    def observe(self, size: int, seconds: float) -> None:
        """Take the size and time of a write that was synced into account."""
        self._writes = min(WRITES, self._writes + 1)
        weight = 1 / self._writes
        self._size += weight * (size - self._size)
        self._time += weight * (seconds - self._time)
        self._square += weight * (size * size - self._square)
        self._product += weight * (size * seconds - self._product)
        variance = self._square - self._size * self._size
        if variance > SPREAD * self._size * self._size:
            self._slope = max(0.0, (self._product - self._size * self._time) / variance)
        if self._slope is None:
            self._fixed_s = self._time
            return
        self._fixed_s = max(0.0, self._time - self._slope * self._size)
        allowed = max(self._fixed_s, QUICK_S)
        fitting = allowed / self._slope if self._slope * self._most > allowed else self._most
        self.bytes = min(self._most, max(LEAST_BYTES, int(fitting)))

    def seconds_for(self, size: int) -> float:
        """Return how long the disk takes for so many bytes, 5 s at most."""
        return min(LONGEST_S, self._fixed_s + (self._slope or 0.0) * size)
