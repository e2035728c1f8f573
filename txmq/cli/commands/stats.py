"""`txmq stats`: rates, sizes and flush times."""

from __future__ import annotations

from typing import Annotated

import typer

from txmq.cli.command import CommandSession, broker_command

Limit = Annotated[
    int,
    typer.Option(
        min=1, max=1_000, help="Maximum number of topics and of groups, the busiest first."
    ),
]


def add_to(app: typer.Typer) -> None:
    """Add the command to `app`."""
    broker_command(app, "stats")(stats)


def stats(session: CommandSession, *, limit: Limit = 20) -> None:
    """Show rates and sizes of the busiest topics and groups, and flush times."""
    reply = session.client.call("broker.stats", limit=limit)
    if not session.out.as_json and "flush" in reply:  # programs get the histogram
        reply["flush"] = {
            name: value for name, value in reply["flush"].items() if name != "buckets"
        }
    session.out.show(reply)
