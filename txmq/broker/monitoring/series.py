"""Series of numbers for charts: rings of a fixed size.

All series are sampled together: the last hour at 10 s, and the last day at 5 min, each
point the mean of the samples in between. What was not sampled is a gap. At most
`MAX_SERIES` are kept; one that got no sample for a day is forgotten. What is over goes
to the log, step by step (`core/series.py`), and comes back after a restart.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from math import isnan, nan
from typing import Literal

from txmq.core.series import (
    DAY_STEPS,
    HOUR_STEPS,
    MEANS,
    POINTS,
    SAMPLE_S,
    NoteSeries,
    StoredStep,
    Values,
    mean,
)

Span = Literal["hour", "day"]
FINE = HOUR_STEPS * POINTS
STEPS_S: dict[Span, int] = {"hour": SAMPLE_S, "day": SAMPLE_S * POINTS}
MAX_SERIES = 256  # about 6 kB each


class _Ring:
    """The newest values of all series, by number. A place tells which number it has."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._numbers = array("q", [-1] * size)
        self._columns: dict[str, array[float]] = {}
        self.first = self.last = -1

    def put(self, number: int, values: Mapping[str, float | None]) -> None:
        """Put the values of a number; a name without one has a gap."""
        place = number % self._size
        self._numbers[place] = number
        for name in values.keys() - self._columns.keys():
            self._columns[name] = array("d", [nan] * self._size)
        for name, column in self._columns.items():
            value = values.get(name)
            column[place] = nan if value is None else value
        self.first = number if self.first < 0 else min(self.first, number)
        self.last = max(self.last, number)

    def between(self, name: str, first: int, end: int) -> list[float | None]:
        """Return the values of numbers from `first` to before `end`, None for gaps."""
        column, found = self._columns[name], list[float | None]()
        for number in range(first, end):
            place = number % self._size
            known = self._numbers[place] == number and not isnan(column[place])
            found.append(round(column[place], 3) if known else None)
        return found

    def newest(self, name: str) -> list[float | None]:
        """Return all values from the first number on; [] = there is no such name."""
        if name not in self._columns:
            return []
        return self.between(name, max(self.first, self.last + 1 - self._size), self.last + 1)

    def forget(self, name: str) -> None:
        """Drop a series."""
        self._columns.pop(name, None)


class SeriesStore:
    """Series by name. `last` is the number of the last sample, -1 = there is none."""

    def __init__(self, most: int = MAX_SERIES, stored: Iterable[StoredStep] = ()) -> None:
        """`stored` are steps of an earlier run."""
        self._most = most
        self._fine, self._coarse = _Ring(FINE), _Ring(DAY_STEPS)
        self._seen: dict[str, int] = {}  # number of the last sample, by name
        for row in sorted(stored, key=lambda row: row.step):
            self._restore(row)

    def __len__(self) -> int:
        return len(self._seen)

    @property
    def last(self) -> int:
        return self._fine.last

    def sample(self, number: int, values: Mapping[str, float]) -> NoteSeries | None:
        """Add a sample of each name; what is not named has a gap. Names beyond the
        limit take the place of those that have been gone the longest, if any.

        Return the step that this sample has ended, if one has.
        """
        before, step = self.last // POINTS, number // POINTS
        ended = self._end(before) if self.last >= 0 and before != step else None
        self._fine.put(number, self._admitted(number, values))
        return ended

    def unfinished(self) -> NoteSeries | None:
        """Return the step of the last sample as it is, if there is one."""
        return self._step(self.last // POINTS) if self.last >= 0 else None

    def _end(self, step: int) -> NoteSeries:
        ended, behind = self._step(step), (step + 1) * POINTS
        self._coarse.put(step, {name: mean(values) for name, values in ended.series})
        for name, seen in list(self._seen.items()):
            if behind - seen > DAY_STEPS * POINTS:
                self._forget(name)
        return ended

    def _step(self, step: int) -> NoteSeries:
        first = step * POINTS
        found = {name: self._fine.between(name, first, first + POINTS) for name in self._seen}
        return NoteSeries(step, tuple(_named(found)))

    def _restore(self, row: StoredStep) -> None:
        if row.kind == MEANS:
            values = {name: value for name, (value,) in row.series}
            self._coarse.put(row.step, self._admitted(row.step * POINTS, values))
            return
        columns = {name: _spread(values) for name, values in row.series}
        for nth in range(POINTS):
            number = row.step * POINTS + nth
            values = {name: column[nth] for name, column in columns.items()}
            if set(values.values()) != {None}:
                self._fine.put(number, self._admitted(number, values))

    def _admitted(self, number: int, values: Mapping[str, float | None]) -> dict[str, float]:
        """Return the values whose names there is room for."""
        known = {name: value for name, value in values.items() if value is not None}
        found = {name: value for name, value in known.items() if self._has_room(name, known)}
        self._seen.update(dict.fromkeys(found, number))
        return found

    def _has_room(self, name: str, wanted: Mapping[str, float]) -> bool:
        if name in self._seen:
            return True
        if len(self._seen) >= self._most:
            gone = ((seen, one) for one, seen in self._seen.items() if one not in wanted)
            _seen, oldest = min(gone, default=(0, None))
            if oldest is None:
                return False
            self._forget(oldest)
        self._seen[name] = 0
        return True

    def _forget(self, name: str) -> None:
        del self._seen[name]
        self._fine.forget(name)
        self._coarse.forget(name)

    def names(self) -> list[str]:
        """Return the names of all series, in their order."""
        return sorted(self._seen)

    def points(self, name: str, span: Span) -> list[float | None]:
        """Return the points of a series, the oldest first and None for gaps; [] = there
        is no such series. The last one of a day is the last whole 5 minutes.
        """
        return (self._fine if span == "hour" else self._coarse).newest(name)

    def end_s(self, span: Span) -> int:
        """Return the time of the last point, in seconds."""
        last = self._fine.last if span == "hour" else self._coarse.last + 1
        return max(0, last) * STEPS_S[span]


def _named(found: Mapping[str, list[float | None]]) -> Iterable[tuple[str, Values]]:
    """Yield the series of which something is known."""
    for name, values in found.items():
        exact = tuple(_short(value) for value in values)
        if set(exact) != {None}:
            yield name, exact[:1] if len(set(exact)) == 1 else exact


def _short(value: float | None) -> float | None:
    """Return a value that takes little room in the log."""
    return int(value) if value is not None and value.is_integer() else value


def _spread(values: Values) -> Values:
    return values * POINTS if len(values) == 1 else values
