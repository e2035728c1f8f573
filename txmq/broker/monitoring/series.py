"""Series of numbers for small charts: rings of a fixed size, in memory.

All series are sampled together: the last hour at 10 s, and the last day at 5 min, each
point the mean of the samples in between. What was not sampled is a gap. At most
`MAX_SERIES` are kept; one that got no sample for a day is forgotten.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from math import isnan, nan
from typing import Literal

Span = Literal["hour", "day"]
SAMPLE_S = 10
FINE, COARSE = 360, 288  # points
FINE_PER_COARSE = 30
STEPS_S: dict[Span, int] = {"hour": SAMPLE_S, "day": SAMPLE_S * FINE_PER_COARSE}
MAX_SERIES = 256  # about 6 kB each


class _Series:
    """The points of one name; a ring of each kind. `seen` is its last sample."""

    __slots__ = ("coarse", "fine", "seen")

    def __init__(self) -> None:
        self.fine, self.coarse = array("d", [nan] * FINE), array("d", [nan] * COARSE)
        self.seen = 0


class SeriesStore:
    """Series by name."""

    def __init__(self, most: int = MAX_SERIES) -> None:
        self._most = most
        self._series: dict[str, _Series] = {}
        self._samples = 0

    def __len__(self) -> int:
        return len(self._series)

    def sample(self, values: Mapping[str, float]) -> None:
        """Add a sample of each name; what is not named has a gap. Names beyond the
        limit take the place of those that have been gone the longest, if any.
        """
        for name in values:
            if name not in self._series and self._has_room(values):
                self._series[name] = _Series()
        at = self._samples
        self._samples += 1
        place, ends = at % FINE, self._samples % FINE_PER_COARSE == 0
        for name, series in list(self._series.items()):
            value = values.get(name, nan)
            series.fine[place] = value
            if not isnan(value):
                series.seen = self._samples
            if ends:
                series.coarse[at // FINE_PER_COARSE % COARSE] = _mean(series.fine, place)
                if self._samples - series.seen >= COARSE * FINE_PER_COARSE:
                    del self._series[name]

    def _has_room(self, wanted: Mapping[str, float]) -> bool:
        if len(self._series) < self._most:
            return True
        gone = ((one.seen, name) for name, one in self._series.items() if name not in wanted)
        _seen, oldest = min(gone, default=(0, None))
        if oldest is None:
            return False
        del self._series[oldest]
        return True

    def names(self) -> list[str]:
        """Return the names of all series, in their order."""
        return sorted(self._series)

    def points(self, name: str, span: Span) -> list[float | None]:
        """Return the points of a series, the oldest first and None for gaps; [] = there
        is no such series. The last one of a day is the last whole 5 minutes.
        """
        series = self._series.get(name)
        if series is None:
            return []
        ring, taken = (
            (series.fine, self._samples)
            if span == "hour"
            else (series.coarse, self._samples // FINE_PER_COARSE)
        )
        return list(_in_order(ring, taken))


def _mean(ring: array[float], last: int) -> float:
    values = [ring[(last - back) % FINE] for back in range(FINE_PER_COARSE)]
    known = [value for value in values if not isnan(value)]
    return sum(known) / len(known) if known else nan


def _in_order(ring: array[float], taken: int) -> Iterator[float | None]:
    size = len(ring)
    for number in range(max(0, taken - size), taken):
        value = ring[number % size]
        yield None if isnan(value) else round(value, 3)
