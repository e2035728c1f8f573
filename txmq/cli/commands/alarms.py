"""`txmq alarms`: conditions that need an operator."""

from __future__ import annotations

import typer

from txmq.cli.command import CommandSession, broker_command
from txmq.cli.output import FAILED

app = typer.Typer()


@broker_command(app, "alarms", example="txmq alarms --json")
def alarms(session: CommandSession) -> None:
    """Show the alarms that are raised. Exit status 1: there are some."""
    reply = session.client.call("broker.alarms")
    session.out.show(reply)
    if reply["alarms"]:
        raise typer.Exit(FAILED)
