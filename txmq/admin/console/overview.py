"""The first page: the state of the broker, its rates, and what needs an operator."""

from __future__ import annotations

from txmq.admin.console.charts import charts
from txmq.admin.console.page import Page, Reader, View

BUSIEST = 8  # topics and groups
SPANS = {"hour": "an hour", "day": "a day"}
# name of the series, title, and the filter that shows a value
CHARTS = (
    ("in_rate", "Messages in", "rate"),
    ("out_rate", "Processed", "rate"),
    ("bytes_rate", "Bytes in", "bytes"),
    ("flush_ms", "Slowest flush", "ms"),
    ("lag", "Lag, all groups", "count"),
    ("undecided", "Undecided", "count"),
    ("in_doubt", "In doubt", "count"),
    ("letters", "Dead letters", "count"),
)


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


PAGES = (Page("", "Overview", overview, "Overview", "o"),)
