"""`txmq message`: single messages."""

from __future__ import annotations

from base64 import b64decode
from typing import Annotated, Any

import typer

from txmq.cli.command import Session, remote
from txmq.cli.options import Topic, name_of, time_of
from txmq.cli.output import FAILED, body_fields

app = typer.Typer(no_args_is_help=True, help="Single messages.")
PAGE = 1_000
FOUND = ("message_id", "partition", "offset", "key", "tag", "stored_at", "body")
COLUMNS = ("message_id", "topic", "partition", "due_at", "size")

Id = Annotated[str, typer.Argument(metavar="ID", help="Id of the message.")]
From = Annotated[
    int | None,
    typer.Option(
        "--from", parser=time_of, metavar="TIME", help="Stored then or later, as 2026-07-01."
    ),
]
Ids = Annotated[list[str], typer.Argument(metavar="ID", help="Ids of messages.")]


@remote(app, "delayed")
def delayed(
    session: Session,
    *,
    topic: Annotated[
        str | None, typer.Option(parser=name_of, metavar="TOPIC", help="Only those of this topic.")
    ] = None,
    after: Annotated[
        str | None,
        typer.Option(metavar="NUMBER,NUMBER", help="Go on here: `next` of the page before."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many at most.")] = 100,
) -> None:
    """List the messages that wait for their time of delivery, the next ones first."""
    session.show("message.delayed", columns=COLUMNS, topic=topic, after=_pair(after), limit=limit)


@remote(app, "recall")
def recall(session: Session, message: Ids) -> None:
    """Take messages back that wait for their time of delivery: all of them, or none
    where it is too late for one.
    """
    session.show("message.recall", ids=message)


@remote(app, "show")
def show(session: Session, message: Id) -> None:
    """Show a message that waits for its time, or is of a transaction. Others: `txmq
    message find TOPIC --id ID`.
    """
    found = session.client.call("message.show", id=message, bodies=True)["message"]
    if found is None:
        session.out.show({"message": None})
        raise typer.Exit(FAILED)
    session.out.show(readable(found))


@remote(app, "find")
def find(  # its options
    session: Session,
    topic: Topic,
    *,
    key: Annotated[str | None, typer.Option(help="Only messages with this key.")] = None,
    message: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="Only the message of this id.")
    ] = None,
    start: From = None,
    end: Annotated[
        int | None, typer.Option("--to", parser=time_of, metavar="TIME", help="Stored before.")
    ] = None,
    partition: Annotated[int | None, typer.Option(min=0, help="Only in this partition.")] = None,
    offset: Annotated[int, typer.Option(min=0, help="From this offset on, with --partition.")] = 0,
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = 100,
) -> None:
    """Find messages of a topic, by key, id, time and place; in the order of partitions
    and offsets.
    """
    wanted = {
        "key": key,
        "id": message,
        "start": start,
        "end": end,
        "partition": partition,
        "offset": offset,
    }
    rows: list[dict[str, Any]] = []
    following: Any = None
    while len(rows) < limit:
        room = min(limit - len(rows), PAGE)
        page = session.client.call(
            "message.find", topic=topic, **wanted, after=following, limit=room, bodies=True
        )
        rows += map(readable, page["messages"])
        following = page["next"]
        if following is None:
            break
    session.out.show({"messages": rows, "more": following is not None}, columns=FOUND)


def readable(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its body as text, if it is text."""
    body = message.pop("body", None)
    return message | body_fields(b64decode(body)) if body is not None else message


def _pair(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, _, second = text.strip("[] ").partition(",")
    try:
        return int(first), int(second)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no `next` of a page") from None
