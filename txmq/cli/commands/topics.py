"""`txmq topic`: topics and their partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from txmq.cli.command import CommandSession, broker_command
from txmq.cli.commands import topic_schemas
from txmq.cli.commands.topic_schemas import schema_summary
from txmq.cli.options import By, Topic, Yes
from txmq.cli.parsers import (
    parse_flush,
    parse_policy,
    parse_size_limit,
    parse_size_or_default,
    parse_switch,
    parse_time_limit,
)

app = typer.Typer(name="topic", no_args_is_help=True, help="Create, alter, list and delete topics.")
app.add_typer(topic_schemas.app)
Partitions = Annotated[
    int, typer.Option(min=1, max=4_096, help="Number of partitions; it can only grow.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Setting; can be repeated: retention=7d, retention-size=10GiB, letters=30d (dead "
        "letters), policy=archive, flush=sync or 10ms,1000, max-message=64KiB, writable=no, "
        "readable=no, note=TEXT. Value default: the setting of the broker; none: no limit.",
    ),
]
TOPIC_SETTINGS: dict[str, tuple[str, Callable[[str], object]]] = {
    "retention": ("retention_ms", parse_time_limit),
    "retention-size": ("retention_bytes", parse_size_limit),
    "letters": ("letters_ms", parse_time_limit),
    "policy": ("policy", parse_policy),
    "flush": ("flush", parse_flush),
    "max-message": ("message_bytes", parse_size_or_default),
    "writable": ("writable", parse_switch),
    "readable": ("readable", parse_switch),
    "note": ("note", str),
}


def parse_settings(texts: list[str] | None) -> dict[str, Any]:
    """Parse settings like "retention=7d" into arguments of the calls."""
    settings = {}
    for text in texts or ():
        name, _, value = text.partition("=")
        if name not in TOPIC_SETTINGS:
            raise typer.BadParameter(
                f"invalid setting {text!r}: use NAME=VALUE, with one of the names "
                f"{', '.join(TOPIC_SETTINGS)}"
            )
        field, parse = TOPIC_SETTINGS[name]
        settings[field] = parse(value)
    return settings


@broker_command(
    app, "create", example="txmq topic create orders --partitions 16 --set retention=7d"
)
def create(
    session: CommandSession, topic: Topic, partitions: Partitions = 8, *, settings: Settings = None
) -> None:
    """Create a topic. Settings that are not given come from the broker."""
    session.show("topic.create", name=topic, partitions=partitions, **parse_settings(settings))


@broker_command(
    app, "alter", example="txmq topic alter orders --set retention=7d --set policy=archive"
)
def alter(session: CommandSession, topic: Topic, *, settings: Settings, by: By) -> None:
    """Change settings of a topic while it is in use. Other settings stay."""
    changes = parse_settings(settings)
    session.show("topic.alter", name=topic, **by._asdict(), **changes)


@broker_command(app, "list", example="txmq topic list --json")
def list_(
    session: CommandSession,
    *,
    own: Annotated[bool, typer.Option("--own", help="Also the broker's own topics.")] = False,
) -> None:
    """List all topics."""
    session.show_list("topic.list", "topics", own=own)


@broker_command(app, "show", example="txmq topic show orders")
def show(session: CommandSession, topic: Topic) -> None:
    """Show a topic: offsets, sizes, settings, schema, and its consumer groups."""
    shown = session.client.call("topic.show", name=topic)
    if shown.get("schema") and not session.out.as_json:
        shown |= {"schema": schema_summary(shown["schema"])}
    session.out.show(shown)


@broker_command(app, "set", example="txmq topic set orders --partitions 32")
def set_(session: CommandSession, topic: Topic, partitions: Partitions, *, by: By) -> None:
    """Add partitions to a topic."""
    session.show("topic.grow", name=topic, partitions=partitions, **by._asdict())


@broker_command(app, "delete", example="txmq topic delete orders")
def delete(session: CommandSession, topic: Topic, *, by: By, yes: Yes = False) -> None:
    """Delete a topic and its messages."""
    session.out.confirm(f"Delete topic {topic} and all of its messages?", yes=yes)
    session.show("topic.delete", name=topic, **by._asdict())
