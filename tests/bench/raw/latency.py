"""Percentiles of latencies, for benchmarks and for the yardstick programs.

The module uses only the standard library, as the yardstick programs do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile of `values`, which need no order."""
    if not values:
        raise ValueError("no percentile of an empty sequence")
    if not 0 < share <= 100:
        raise ValueError(f"invalid percentile {share}: use more than 0 and at most 100")
    return sorted(values)[math.ceil(share / 100 * len(values)) - 1]


def latency_us(took_s: Sequence[float]) -> dict[str, float]:
    """Return p50 and p99 in microseconds, of times in seconds."""
    return {"p50_us": percentile(took_s, 50) * 1e6, "p99_us": percentile(took_s, 99) * 1e6}
