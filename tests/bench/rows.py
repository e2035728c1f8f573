"""Benchmarks, and their results: the rows of `bench.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from tests.bench.database import BenchDatabase

AREAS = "aio|cluster|console|consumer|flow|letters|recover|spark|store|tx"
ROW_ID = rf"^({AREAS})\.[a-z0-9_]+(\.[a-z0-9_]+)*$"
Text = Annotated[str, Field(min_length=1)]


class Goal(NamedTuple):
    """A bound on the ratio to the yardstick, or on the value without a yardstick."""

    relation: Literal["<=", ">="]
    limit: float

    def met_by(self, figure: float) -> bool:
        return figure <= self.limit if self.relation == "<=" else figure >= self.limit


def at_most(limit: float) -> Goal:
    return Goal("<=", limit)


def at_least(limit: float) -> Goal:
    return Goal(">=", limit)


class Row(BaseModel):
    """One figure.

    `yardstick` has the unit of `value`. `ratio` is value / yardstick, or both are None.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    id: Annotated[str, Field(pattern=ROW_ID)]
    what: Text
    unit: Text
    value: float
    yardstick: float | None
    ratio: float | None
    goal: Text | None
    met: bool | None

    @model_validator(mode="after")
    def _belong_together(self) -> Self:
        if (self.yardstick is None) != (self.ratio is None):
            raise ValueError("a row has both a yardstick and a ratio, or neither")
        if (self.goal is None) != (self.met is None):
            raise ValueError("a row has both a goal and its judgement, or neither")
        return self


ROWS = TypeAdapter(list[Row])


def row(
    row_id: str,
    what: str,
    unit: str,
    value: float,
    *,
    yardstick: float | None = None,
    goal: Goal | None = None,
) -> Row:
    """Return a row with its ratio and the judgement of its goal."""
    ratio = None if yardstick is None else value / yardstick
    subject, figure = ("value", value) if ratio is None else ("ratio", ratio)
    return Row(
        id=row_id,
        what=what,
        unit=unit,
        value=value,
        yardstick=yardstick,
        ratio=ratio,
        goal=None if goal is None else f"{subject} {goal.relation} {goal.limit:g}",
        met=None if goal is None else goal.met_by(figure),
    )


@dataclass(frozen=True, slots=True)
class Run:
    """The parameters of a run.

    `directory` is empty at the start, and on the disk to measure.
    """

    directory: Path
    scale: float
    database: BenchDatabase

    def count(self, full: int) -> int:
        """Return the scaled number of repetitions; a full run makes `full`."""
        return max(1, round(full * self.scale))

    def seconds(self, full: float) -> float:
        """Return the scaled duration; a full run takes `full` seconds."""
        return max(0.1, full * self.scale)


Measure = Callable[[Run], Iterable[Row]]


class Benchmark(NamedTuple):
    """A measurement, and the common prefix of the ids of its rows."""

    prefix: str
    title: str
    measure: Measure

    def chosen_by(self, only: str) -> bool:
        """Return whether ids of its rows may begin with `only`."""
        return self.prefix.startswith(only) or only.startswith(self.prefix)

    def rows(self, run: Run, only: str) -> Iterable[Row]:
        """Measure; yield the rows whose ids begin with `only`."""
        for one in self.measure(run):
            if not one.id.startswith(self.prefix):
                raise ValueError(
                    f"row {one.id} does not begin with its benchmark's prefix {self.prefix}"
                )
            if one.id.startswith(only):
                yield one


def chosen_by(only: str, benchmarks: Sequence[Benchmark]) -> list[Benchmark]:
    """Return the benchmarks that may have rows whose ids begin with `only`. Where it
    begins with several prefixes, the longest one has these rows.
    """
    chosen = [one for one in benchmarks if one.chosen_by(only)]
    around = [one.prefix for one in chosen if only.startswith(one.prefix)]
    longest = max(around, key=len, default="")
    return [one for one in chosen if one.prefix == longest or one.prefix not in around]


def benchmark(prefix: str, title: str) -> Callable[[Measure], Benchmark]:
    """Make a Benchmark of the decorated function, for the list in
    `tests/bench/suite.py`.
    """
    return lambda measure: Benchmark(prefix, title, measure)
