"""Small charts from the broker's series: lines of SVG, with their times and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from txmq.model.units import SECOND

if TYPE_CHECKING:
    from txmq.admin.console.page import PageRequest

WIDTH, HEIGHT = 240, 60  # units of a chart; the page stretches it
LEAST = 12  # values of a chart
SPOTS = 30  # parts of a chart that tell their time and value
POINTS = 120  # of one line: a longer series is thinned, so that peaks stay

Value = float | None  # None = not known, as while the broker was down


class Chart(NamedTuple):
    """A chart for a template: `lines` and `areas` are points of SVG. `shown` is the
    newest value, and `top` the largest; None = nothing is known yet.
    """

    lines: tuple[str, ...]
    areas: tuple[str, ...]
    shown: Value
    top: Value


class Spot(NamedTuple):
    """A part of a chart: where it is, the time at its end, and its largest value."""

    x: float
    width: float
    at: int
    value: float


class NamedChart(NamedTuple):
    """A chart with its title, from the time `begin` to `end`; `unit` says how its
    values are shown.
    """

    title: str
    unit: str
    chart: Chart
    begin: int
    end: int
    spots: tuple[Spot, ...] = ()


def chart(values: Sequence[Value]) -> Chart:
    """Draw values, the oldest first. A gap of unknown values is a gap of the line."""
    thin = list(_thinned(values))
    known = [one for one in thin if one is not None]
    top = max(known, default=None)
    scale = (HEIGHT - 2) / top if top else 0.0
    step = WIDTH / max(1, len(thin) - 1)
    lines, areas = list[str](), list[str]()
    for first, run in _runs(thin):
        points = [
            ((first + number) * step, round(HEIGHT - 1 - value * scale, 1))
            for number, value in enumerate(run)
        ]
        if len(points) == 1:  # a value between two gaps, or at the edge of the chart
            [(x, y)] = points
            points = [(max(0.0, x - step / 4), y), (min(float(WIDTH), x + step / 4), y)]
        text = " ".join(f"{x:.1f},{y}" for x, y in points)
        lines.append(text)
        areas.append(f"{points[0][0]:.1f},{HEIGHT} {text} {points[-1][0]:.1f},{HEIGHT}")
    newest = next((one for one in reversed(values) if one is not None), None)
    return Chart(tuple(lines), tuple(areas), newest, top)


def _thinned(values: Sequence[Value]) -> Iterator[Value]:
    """Yield at most `POINTS` values: of neighbours, the largest."""
    width = -(-len(values) // POINTS) or 1
    for at in range(0, len(values), width):
        known = [one for one in values[at : at + width] if one is not None]
        yield max(known) if known else None


def spots(values: Sequence[Value], begin: int, step: int) -> Iterator[Spot]:
    """Yield parts of a chart whose values are known; the first value is of `begin`, and
    each further one `step` microseconds later.
    """
    size = -(-len(values) // SPOTS) or 1
    scale = WIDTH / max(1, len(values))
    for first in range(0, len(values), size):
        part = values[first : first + size]
        known = [value for value in part if value is not None]
        if known:
            at = begin + (first + len(part) - 1) * step
            yield Spot(round(first * scale, 1), round(len(part) * scale, 1), at, max(known))


def _runs(values: Sequence[Value]) -> Iterator[tuple[int, list[float]]]:
    """Yield runs of known values, each with the place of its first one."""
    run: list[float] = []
    for number, value in enumerate((*values, None)):
        if value is not None:
            run.append(value)
        elif run:
            yield number - len(run), run
            run = []


async def charts(
    request: PageRequest, wanted: Sequence[tuple[str, str, str]], span: str
) -> list[NamedChart]:
    """Return charts of series that the broker keeps by itself."""
    names = [name for name, _title, _unit in wanted]
    reply = await request.ask("broker.series", names=names, span=span)
    found: list[NamedChart] = []
    for name, title, unit in wanted:
        values = since_known(reply["series"].get(name, ()))
        step, end = reply["step_s"] * SECOND, reply["end"]
        begin = end - max(0, len(values) - 1) * step
        told = tuple(spots(values, begin, step))
        found.append(NamedChart(title, unit, chart(values), begin, end, told))
    return found


def since_known(values: Sequence[Value]) -> Sequence[Value]:
    """Return values from the first known one on, at least `LEAST` of them: after a
    start the chart grows with what there is.
    """
    first = next((at for at, one in enumerate(values) if one is not None), len(values))
    return values[max(0, min(first, len(values) - LEAST)) :]
