"""`txmq message`: single messages."""

from __future__ import annotations

from typing import Annotated

import typer

from txmq.cli.command import Session, remote
from txmq.cli.options import name_of

app = typer.Typer(no_args_is_help=True, help="Single messages.")
COLUMNS = ("message_id", "topic", "partition", "due_at", "size")

Id = Annotated[str, typer.Argument(metavar="ID", help="Id of the message.")]
Ids = Annotated[list[str], typer.Argument(metavar="ID", help="Ids of messages.")]


@remote(app, "delayed")
def delayed(
    session: Session,
    *,
    topic: Annotated[
        str | None, typer.Option(parser=name_of, metavar="TOPIC", help="Only those of this topic.")
    ] = None,
    after: Annotated[
        str | None, typer.Option(metavar="NUMBER,NUMBER", help="Go on here: `next` of the page before.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many at most.")] = 100,
) -> None:
    """List the messages that wait for their time of delivery, the next ones first."""
    session.show("message.delayed", columns=COLUMNS, topic=topic, after=_pair(after), limit=limit)


@remote(app, "recall")
def recall(session: Session, message: Ids) -> None:
    """Take messages back that wait for their time of delivery: all of them, or none where it is too late for one."""
    session.show("message.recall", ids=message)


def _pair(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, _, second = text.strip("[] ").partition(",")
    try:
        return int(first), int(second)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no `next` of a page") from None
