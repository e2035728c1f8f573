"""`txmq stats`: rates, sizes, and how long the disk takes."""

from __future__ import annotations

from typing import Annotated

import typer

from txmq.cli.command import Session, remote

Limit = Annotated[
    int,
    typer.Option(min=1, max=1_000, help="At most so many topics and groups, the busiest first."),
]


def add_to(app: typer.Typer) -> None:
    """Make it a command of `app`."""
    remote(app, "stats")(stats)


def stats(session: Session, *, limit: Limit = 20) -> None:
    """Show rates and sizes of the busiest topics and groups, and how long flushes
    take.
    """
    reply = session.client.call("broker.stats", limit=limit)
    if not session.out.as_json and "flush" in reply:  # the histogram is for programs
        reply["flush"] = {
            name: value for name, value in reply["flush"].items() if name != "buckets"
        }
    session.out.show(reply)
