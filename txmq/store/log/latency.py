"""Histogram of flush times, at the cost of one bisection per flush."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from txmq.model.units import SECOND

BOUNDS_US = (
    50, 100, 150, 200, 300, 400, 600, 800, 1_200, 2_000, 3_000, 5_000, 10_000, 20_000, 50_000,
    100_000, 300_000, 1_000_000,
)  # fmt: skip


class Latencies:
    """Counts of durations per bucket of `BOUNDS_US`; the last bucket has no bound."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_US) + 1)
        self.total_us = self.max_us = self.count = 0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        micros = round(seconds * SECOND)
        self.counts[bisect_left(BOUNDS_US, micros)] += 1
        self.count += 1
        self.total_us += micros
        self.max_us = max(self.max_us, micros)

    def quantile(self, fraction: float) -> int:
        """Return a duration that this share of all did not exceed.

        It is the bound of a bucket, or the longest duration.
        """
        rank = fraction * self.count
        for bound, cumulative in zip(BOUNDS_US, accumulate(self.counts), strict=False):
            if cumulative >= rank:
                return min(bound, self.max_us)
        return self.max_us
