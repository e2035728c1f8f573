"""`txmq alarms`: what an operator has to know of."""

from __future__ import annotations

import typer

from txmq.cli.command import Session, remote
from txmq.cli.output import FAILED


def add_to(app: typer.Typer) -> None:
    """Make it a command of `app`."""
    remote(app, "alarms")(alarms)


def alarms(session: Session) -> None:
    """Show the alarms that are raised; the exit status is 1 if there are any."""
    reply = session.client.call("broker.alarms")
    session.out.show(reply)
    if reply["alarms"]:
        raise typer.Exit(FAILED)
