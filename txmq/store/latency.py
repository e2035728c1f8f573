"""How long flushes take: a histogram that costs a bisection each."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

BOUNDS_US = (
    50, 100, 150, 200, 300, 400, 600, 800, 1_200, 2_000, 3_000, 5_000, 10_000, 20_000, 50_000, 100_000, 300_000,
    1_000_000,
)  # fmt: skip


class Latencies:
    """Counts of durations, in microseconds, by the lowest of `BOUNDS_US` that they do
    not exceed; the last has none.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_US) + 1)
        self.total_us = self.most_us = self.count = 0

    def observe(self, seconds: float) -> None:
        """One more."""
        micros = round(seconds * 1_000_000)
        self.counts[bisect_left(BOUNDS_US, micros)] += 1
        self.count += 1
        self.total_us += micros
        self.most_us = max(self.most_us, micros)

    def quantile(self, share: float) -> int:
        """A duration that such a share of all did not exceed: the bound of its bucket,
        or the longest seen.
        """
        wanted = share * self.count
        for bound, reached in zip(BOUNDS_US, accumulate(self.counts), strict=False):
            if reached >= wanted:
                return min(bound, self.most_us)
        return self.most_us
