"""`txmq alarms`: conditions that need an operator."""

from __future__ import annotations

import typer

from txmq.cli.command import CommandSession, broker_command
from txmq.cli.output import FAILED


def add_to(app: typer.Typer) -> None:
    """Add the command to `app`."""
    broker_command(app, "alarms")(alarms)


def alarms(session: CommandSession) -> None:
    """Show the alarms that are raised. Exit status 1: there are some."""
    reply = session.client.call("broker.alarms")
    session.out.show(reply)
    if reply["alarms"]:
        raise typer.Exit(FAILED)
