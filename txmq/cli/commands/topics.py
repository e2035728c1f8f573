"""`txmq topic`: topics and their partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from txmq.cli.command import Session, remote
from txmq.cli.options import Topic, Yes
from txmq.cli.units import flush_of, limit_ms, limit_octets, octets_or_default, policy_of, switch_of

app = typer.Typer(no_args_is_help=True, help="Topics and their partitions.")
Partitions = Annotated[
    int, typer.Option(min=1, max=4_096, help="How many partitions; they can only become more.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Can be repeated. retention=7d, retention-size=10GiB, letters=30d (dead ones), policy=archive, "
        "flush=sync or 10ms,1000, max-message=64KiB, writable=no, readable=no. "
        "The value default is what the broker has, none is no limit.",
    ),
]
SETTINGS: dict[str, tuple[str, Callable[[str], object]]] = {
    "retention": ("retention_ms", limit_ms),
    "retention-size": ("retention_bytes", limit_octets),
    "letters": ("letters_ms", limit_ms),
    "policy": ("policy", policy_of),
    "flush": ("flush", flush_of),
    "max-message": ("message_bytes", octets_or_default),
    "writable": ("writable", switch_of),
    "readable": ("readable", switch_of),
}


def settings_of(texts: list[str] | None) -> dict[str, Any]:
    """What stands in such texts as "retention=7d", as the calls take it."""
    found = {}
    for text in texts or ():
        name, _, value = text.partition("=")
        if name not in SETTINGS:
            raise typer.BadParameter(
                f"{text!r} sets nothing: NAME=VALUE is needed, with one of {', '.join(SETTINGS)}"
            )
        field, measured = SETTINGS[name]
        found[field] = measured(value)
    return found


@remote(app, "create")
def create(
    session: Session, topic: Topic, partitions: Partitions = 8, *, settings: Settings = None
) -> None:
    """Create a topic; what is not set here is as the broker has it."""
    session.show("topic.create", name=topic, partitions=partitions, **settings_of(settings))


@remote(app, "alter")
def alter(session: Session, topic: Topic, *, settings: Settings = None) -> None:
    """Change settings of a topic while it is in use; those not named stay as they
    are.
    """
    session.show("topic.alter", name=topic, **settings_of(settings))


@remote(app, "list")
def list_(session: Session) -> None:
    """List all topics."""
    session.show("topic.list")


@remote(app, "show")
def show(session: Session, topic: Topic) -> None:
    """Show a topic: where its partitions begin and end, how large it is, its settings,
    and which groups read it.
    """
    session.show("topic.show", name=topic)


@remote(app, "set")
def set_(session: Session, topic: Topic, partitions: Partitions) -> None:
    """Give a topic more partitions."""
    session.show("topic.grow", name=topic, partitions=partitions)


@remote(app, "delete")
def delete(session: Session, topic: Topic, *, yes: Yes = False) -> None:
    """Delete a topic and its messages."""
    session.out.confirm(f"Delete topic {topic} and all of its messages?", yes=yes)
    session.show("topic.delete", name=topic)
