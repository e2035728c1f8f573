"""The first page: the state of the broker, its rates, and what needs an operator."""

from __future__ import annotations

from txmq.admin.console.charts import charts
from txmq.admin.console.page import Page, PageRequest, View

BUSIEST = 8  # topics and groups
SPANS = {"hour": "an hour", "day": "a day"}
# name of the series, title, and the filter that shows a value
CHARTS = (
    ("in_rate", "Messages in", "rate"),
    ("out_rate", "Processed", "rate"),
    ("bytes_rate", "Bytes in", "bytes"),
    ("flush_ms", "Slowest flush", "ms"),
    ("unprocessed", "Unprocessed, all groups", "count"),
    ("undecided", "Undecided", "count"),
    ("in_doubt", "In doubt", "count"),
    ("letters", "Dead letters", "count"),
)


# pages that show more of an alarm than the one thing that it names: path and text;
# {name} is that of the thing
TOPICS = ("topics", "Topics and their sizes")
XA = ("transactions/xa", "XA branches")
PAGES_OF_ALARMS = {
    **dict.fromkeys(("disk.full", "disk.low", "disk.trouble", "disk.behind"), TOPICS),
    "retention.passed_group": ("groups", "Groups"),
    "retention.held": ("transactions", "Undecided transactions"),
    "transaction.oldest_undecided": ("transactions", "Undecided transactions"),
    "transaction.in_doubt": ("transactions?state=in-doubt", "Transactions in doubt"),
    "transaction.open": ("transactions?state=open", "Transactions without their last part"),
    "transaction.conflict": ("transactions?state=conflicts", "Refused decisions"),
    "heuristic.mixed": ("transactions/xa?heuristic=yes", "Heuristic decisions"),
    **dict.fromkeys(("xa.orphan", "xa.needs_operator", "xa.lost_branch", "xa.unreachable"), XA),
    **dict.fromkeys(
        ("cluster.no_follower", "cluster.node_silent", "cluster.node_behind"),
        ("cluster", "Nodes"),
    ),
    "group.letters": ("letters/{name}", "Dead letters"),
    **dict.fromkeys(("plan.paused", "plan.waiting"), ("plans", "Replay plans")),
    **dict.fromkeys(
        ("resolver.unreachable", "resolver.blocked", "resolver.refused", "resolver.missing"),
        ("settings", "Settings of resolvers"),
    ),
}


async def overview(request: PageRequest) -> View:
    """Show numbers, charts and alarms, and the busiest topics and groups."""
    shown = await request.ask("broker.show")
    alarms = (await request.ask("broker.alarms"))["alarms"]
    stats = await request.ask("broker.stats", limit=BUSIEST)
    span = request.text("span") if request.text("span") in SPANS else "hour"
    in_doubt = await request.ask("tx.list", state="in-doubt", limit=5)
    cluster = await request.ask("cluster.describe")
    return View(
        "overview.html",
        {
            "shown": shown,
            "raised": alarms,
            "pages": PAGES_OF_ALARMS,
            "stats": stats,
            "in_doubt": in_doubt["transactions"],
            "cluster": cluster,
            "charts": await charts(request, CHARTS, span),
            "span": span,
            "spans": SPANS,
        },
    )


PAGES = (Page("", "Overview", overview, "Overview", "o", needs="broker.show"),)
