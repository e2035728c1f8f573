"""`txmq group`: consumer groups, their positions and settings."""

from __future__ import annotations

from typing import Annotated

import typer

from txmq.cli.command import CommandSession, broker_command
from txmq.cli.commands.group_resets import reset, skip
from txmq.cli.commands.group_settings import alter
from txmq.cli.group_view import readable_group
from txmq.cli.options import By, Group, Yes
from txmq.cli.parsers import parse_name

app = typer.Typer(
    name="group", no_args_is_help=True, help="List, pause, reset, clone and delete consumer groups."
)
COLUMNS = (
    "group",
    "unprocessed",
    "age_ms",
    "state",
    "mode",
    "members",
    "unsettled",
    "leased",
    "retrying",
    "at_consumers",
    "parked",
    "fences",
    "letters",
    "topics",
)
OneTopic = Annotated[str | None, typer.Argument(metavar="[TOPIC]", help="Only this topic.")]


@broker_command(app, "list", example="txmq group list")
def list_(session: CommandSession) -> None:
    """List all consumer groups."""
    session.show_list("group.list", "groups", columns=COLUMNS)


@broker_command(app, "show", example="txmq group show billing")
def show(session: CommandSession, group: Group) -> None:
    """Show a consumer group: what is unprocessed and why, members, positions, fenced
    keys.
    """
    reply = session.client.call("group.show", group=group)
    session.out.show(reply if session.out.as_json else readable_group(reply))


@broker_command(app, "pause", example="txmq group pause billing orders --reason 'the bank is down'")
def pause(session: CommandSession, group: Group, topic: OneTopic = None, *, by: By) -> None:
    """Stop deliveries to a consumer group, of one topic or all. Members may finish the
    messages that they have.
    """
    session.show("group.pause", group=group, topic=topic, **by._asdict())


@broker_command(app, "resume", example="txmq group resume billing orders")
def resume(session: CommandSession, group: Group, topic: OneTopic = None, *, by: By) -> None:
    """Resume deliveries to a paused consumer group, of one topic or all."""
    session.show("group.resume", group=group, topic=topic, **by._asdict())


broker_command(app, "alter", example="txmq group alter billing --table 10,60,600 --lease 30")(alter)
broker_command(app, "reset", example="txmq group reset billing orders --to 2h --preview")(reset)
broker_command(app, "skip", example="txmq group skip billing --topic orders --preview")(skip)


@broker_command(app, "clone", example="txmq group clone billing billing-2")
def clone(
    session: CommandSession,
    group: Group,
    to: Annotated[
        str, typer.Argument(metavar="NEW", parser=parse_name, help="Name of the new group.")
    ],
    *,
    by: By,
) -> None:
    """Create a consumer group at the positions of an existing one. Dead letters are not
    copied.
    """
    session.show("group.clone", group=group, to=to, **by._asdict())


@broker_command(app, "delete", example="txmq group delete billing")
def delete(session: CommandSession, group: Group, *, by: By, yes: Yes = False) -> None:
    """Delete a consumer group without members: its positions, retries and dead
    letters.
    """
    session.out.confirm(f"Delete group {group}, its retries and dead letters?", yes=yes)
    session.show("group.delete", group=group, **by._asdict())
