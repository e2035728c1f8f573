"""`txmq clock`: the broker's time, and the confirmation of its machine's clock."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from txmq.cli.command import CommandSession, broker_command
from txmq.cli.options import Operator
from txmq.cli.output import FAILED

app = typer.Typer()
Confirm = Annotated[
    bool,
    typer.Option(
        "--confirm",
        help="Follow the machine's clock, forward or back, and end all doubt about the time.",
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Confirm although the clocks of databases differ.")
]
Reason = Annotated[
    str, typer.Option(help="Reason for --confirm, recorded in the log of the broker's process.")
]


@broker_command(app, "clock", example="txmq clock --confirm --reason 'NTP works again'")
def clock(
    session: CommandSession,
    *,
    confirm: Confirm = False,
    force: Force = False,
    reason: Reason = "not given",
    operator: Operator,
) -> None:
    """Show the broker's time, the clocks of its machine and databases, and the time
    that retention goes by. Exit status 1: the machine's clock is not believed.
    """
    if confirm:
        reply = session.client.call("clock.confirm", operator=operator, reason=reason, force=force)
    else:
        reply = session.client.call("clock.show")
    session.out.show(reply if session.out.as_json else _all_databases(reply))
    if not reply["believed"]:
        raise typer.Exit(FAILED)


def _all_databases(reply: dict[str, Any]) -> dict[str, Any]:
    """Return a reply with one table of databases, those of unknown clocks included."""
    unknown = reply.pop("not_compared")
    rows = [{"name": one["name"], "at": None, "not_compared": one["reason"]} for one in unknown]
    return {**reply, "databases": [*reply["databases"], *rows]}
