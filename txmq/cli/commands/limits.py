"""`txmq limits`: what the broker throttles now, and why."""

from __future__ import annotations

import typer

from txmq.cli.command import CommandSession, broker_command


def add_to(app: typer.Typer) -> None:
    """Add the command to `app`."""
    broker_command(app, "limits")(limits)


def limits(session: CommandSession) -> None:
    """Show what waits for the disk, and what was refused since the start."""
    session.out.show(session.client.call("broker.show")["throttled"])
