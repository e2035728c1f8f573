"""`txmq alarms`: conditions that need an operator."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from txmq.cli.command import CommandSession, broker_command
from txmq.cli.output import FAILED

app = typer.Typer()


class Action(StrEnum):
    """Actions beside the showing of alarms."""

    TEST = "test"


@broker_command(app, "alarms", example="txmq alarms --json")
def alarms(
    session: CommandSession,
    action: Annotated[
        Action | None,
        typer.Argument(
            metavar="[test]",
            help="test: send a test alarm to each receiver; exit status 1: one did not take it.",
        ),
    ] = None,
) -> None:
    """Show the alarms that are raised. Exit status 1: there are some."""
    if action is Action.TEST:
        reply = session.client.call("alarms.test")
        session.out.show(reply)
        failed = any(one["error"] for one in reply["receivers"])
    else:
        reply = session.client.call("broker.alarms")
        session.out.show(reply)
        failed = bool(reply["alarms"])
    if failed:
        raise typer.Exit(FAILED)
