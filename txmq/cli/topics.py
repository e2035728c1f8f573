"""`txmq topic`: topics and their partitions."""

from __future__ import annotations

from typing import Annotated

import typer

from txmq.cli.command import Session, remote
from txmq.cli.options import Topic, Yes

app = typer.Typer(no_args_is_help=True, help="Topics and their partitions.")
Partitions = Annotated[int, typer.Option(min=1, max=4_096, help="How many partitions; they can only become more.")]


@remote(app, "create")
def create(session: Session, topic: Topic, partitions: Partitions = 8) -> None:
    """Create a topic."""
    session.show("topic.create", name=topic, partitions=partitions)


@remote(app, "list")
def list_(session: Session) -> None:
    """List all topics."""
    session.show("topic.list")


@remote(app, "show")
def show(session: Session, topic: Topic) -> None:
    """Show a topic: where its partitions end, and which groups read it."""
    session.show("topic.show", name=topic)


@remote(app, "set")
def set_(session: Session, topic: Topic, partitions: Partitions) -> None:
    """Give a topic more partitions."""
    session.show("topic.grow", name=topic, partitions=partitions)


@remote(app, "delete")
def delete(session: Session, topic: Topic, *, yes: Yes = False) -> None:
    """Delete a topic and its messages."""
    session.confirm(f"Delete topic {topic} and all of its messages?", yes=yes)
    session.show("topic.delete", name=topic)
