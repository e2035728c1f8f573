"""`txmq stats`: rates, sizes and flush times."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from txmq.cli.command import CommandSession, broker_command

app = typer.Typer()
Limit = Annotated[
    int,
    typer.Option(
        min=1, max=1_000, help="Maximum number of topics and of groups, the busiest first."
    ),
]


class HistorySpan(StrEnum):
    """Time that the series of a history cover."""

    HOUR = "hour"
    DAY = "day"


History = Annotated[
    HistorySpan | None,
    typer.Option(help="Show series of the last hour (each 10 s) or the last day (each 5 min)."),
]
MOST_NAMES = 100  # of a call of broker.series


@broker_command(app, "stats", example="txmq stats --history hour")
def stats(session: CommandSession, *, limit: Limit = 20, history: History = None) -> None:
    """Show rates and sizes of the busiest topics and groups, and flush times."""
    if history is not None:
        _show_history(session, history)
        return
    reply = session.client.call("broker.stats", limit=limit)
    if not session.out.as_json and "flush" in reply:  # programs get the histogram
        reply["flush"] = {
            name: value for name, value in reply["flush"].items() if name != "buckets"
        }
    session.out.show(reply)


def _show_history(session: CommandSession, span: HistorySpan) -> None:
    """Show the broker's series: for people in short, for programs all points."""
    names = session.client.call("broker.series")["names"]
    reply: dict[str, Any] = {"series": {}}
    for first in range(0, len(names), MOST_NAMES):
        some = names[first : first + MOST_NAMES]
        page = session.client.call("broker.series", names=some, span=span.value)
        reply = page | {"series": reply["series"] | page["series"]}
    if session.out.as_json:
        session.out.show(reply)
        return
    rows = []
    for name, points in reply["series"].items():
        known = [point for point in points if point is not None]
        ends = {"lowest": min(known), "highest": max(known), "last": known[-1]} if known else {}
        rows.append({"name": name, **ends})
    session.out.show({"series": rows}, columns=("name", "last", "lowest", "highest"))
