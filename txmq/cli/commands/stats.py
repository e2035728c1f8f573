"""`txmq stats`: rates, sizes and flush times; `txmq settings`: those of the broker."""

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
    """Add the commands to `app`."""
    broker_command(app, "stats")(stats)
    broker_command(app, "settings")(settings)


def stats(session: CommandSession, *, limit: Limit = 20) -> None:
    """Show rates and sizes of the busiest topics and groups, and flush times."""
    reply = session.client.call("broker.stats", limit=limit)
    if not session.out.as_json and "flush" in reply:  # programs get the histogram
        reply["flush"] = {
            name: value for name, value in reply["flush"].items() if name != "buckets"
        }
    session.out.show(reply)


def settings(session: CommandSession) -> None:
    """Show the broker's settings, without what may hold a secret."""
    sections = session.client.call("broker.settings")["settings"]
    if session.out.as_json:
        session.out.show({"settings": sections})
    else:
        session.out.show(
            {
                f"{section}.{name}": value
                for section, fields in sections.items()
                for name, value in (fields if isinstance(fields, dict) else {"": fields}).items()
            }
        )
