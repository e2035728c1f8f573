"""The first page: the state of the broker, its rates, and what needs an operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.admin.console.charts import Chart, chart
from txmq.admin.console.page import Page, Reader, Refused, View

if TYPE_CHECKING:
    from collections.abc import Sequence

BUSIEST = 8  # topics and groups
SPANS = {"hour": "an hour", "day": "a day"}
# name of the series, title, and the filter that shows a value
CHARTS = (
    ("in_rate", "Messages in", "rate"),
    ("out_rate", "Messages processed", "rate"),
    ("bytes_rate", "Bytes in", "bytes"),
    ("flush_ms", "Slowest flush", "ms"),
    ("lag", "Lag of all groups", "count"),
    ("undecided", "Undecided transactions", "count"),
    ("in_doubt", "In doubt", "count"),
    ("letters", "Dead letters", "count"),
)


class NamedChart(NamedTuple):
    """A chart with its title; `unit` says how its values are shown."""

    title: str
    unit: str
    chart: Chart


async def overview(reader: Reader) -> View:
    """Show numbers, charts and alarms, and the busiest topics and groups."""
    shown = await reader.ask("broker.show")
    alarms = (await reader.ask("broker.alarms"))["alarms"]
    stats = await reader.ask("broker.stats", limit=BUSIEST)
    span = reader.text("span") if reader.text("span") in SPANS else "hour"
    in_doubt = await reader.ask("tx.list", state="in-doubt", limit=5)
    return View(
        "overview.html",
        {
            "shown": shown,
            "raised": alarms,
            "stats": stats,
            "in_doubt": in_doubt["transactions"],
            "charts": await charts(reader, CHARTS, span),
            "span": span,
            "spans": SPANS,
        },
    )


async def charts(
    reader: Reader, wanted: Sequence[tuple[str, str, str]], span: str
) -> list[NamedChart]:
    """Return charts of series that the broker keeps by itself."""
    names = [name for name, _title, _unit in wanted]
    try:
        reply = await reader.ask("broker.series", names=names, span=span)
    except Refused:
        return []
    series = reply["series"]
    return [NamedChart(title, unit, chart(series.get(name, ()))) for name, title, unit in wanted]


PAGES = (Page("", "Overview", overview, "Overview", "o"),)
