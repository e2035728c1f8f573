"""Numbers of the broker over time, for charts, kept over a restart.

Samples are numbered by their time. `POINTS` of them are a step, which is one event. The
table has the samples of the last hour's steps, and the means of the last day's: each
step takes the row of the one an hour, or a day, before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.events.base import event
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.model.units import SECOND
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from txmq.core.events.base import RecordContext
    from txmq.core.state.state import State

SAMPLE_S = 10
POINTS = 30  # of a step
HOUR_STEPS, DAY_STEPS = 12, 288
SAMPLES, MEANS = 0, 1  # kinds of rows

Values = tuple[float | None, ...]  # of the samples of a step; one value = all are alike
Named = tuple[tuple[str, Values], ...]


class NoteSeries(NamedTuple):
    """Keep the samples of a step by the names of their series."""

    step: int
    series: Named


@event(59)
class SeriesNoted(NamedTuple):
    """The samples of a step that is over."""

    step: int
    series: Named


class StoredStep(NamedTuple):
    """A row of the table: values are samples, or the mean."""

    kind: int
    step: int
    series: Named


def number_at(at: int) -> int:
    """Return the number of the sample of a time."""
    return at // (SAMPLE_S * SECOND)


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of what is known; None = nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def stored(state: State) -> Iterator[StoredStep]:
    """Yield the rows of the table."""
    for key, row in state.tables[t.SERIES].range(b""):
        step, series = row
        named: Any = series
        yield StoredStep(t.SERIES_KEY.unpack(key)[0], step, named)


def decide_note(_state: State, command: NoteSeries, _now: int) -> Outcome:
    return Outcome((SeriesNoted(*command),), lazy=True)


def apply_noted(state: State, event: SeriesNoted, _context: RecordContext) -> None:
    step, series = event
    means = tuple((name, (mean(values),)) for name, values in series)
    table = state.tables[t.SERIES]
    table.put(t.SERIES_KEY.pack(SAMPLES, step % HOUR_STEPS), (step, series))
    table.put(t.SERIES_KEY.pack(MEANS, step % DAY_STEPS), (step, means))


DECIDERS: Deciders = {NoteSeries: decide_note}
APPLIERS: Appliers = {SeriesNoted: apply_noted}
