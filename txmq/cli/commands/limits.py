"""`txmq limits`: what the broker throttles now, and why."""

from __future__ import annotations

import typer

from txmq.cli.command import CommandSession, broker_command

app = typer.Typer()


@broker_command(app, "limits", example="txmq limits")
def limits(session: CommandSession) -> None:
    """Show what waits for the disk, and what was refused since the start."""
    session.out.show(session.client.call("broker.show")["throttled"])
