"""`txmq message`: find, show and recall single messages."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from txmq.cli.command import PAGE, CommandSession, broker_command
from txmq.cli.commands.trace import find_by_id
from txmq.cli.options import (
    KeyFilter,
    MessageIdFilter,
    NextPage,
    PartitionFilter,
    StoredBefore,
    StoredFrom,
    Topic,
)
from txmq.cli.output import FAILED
from txmq.cli.parsers import (
    MessagePlace,
    is_number,
    parse_message,
    parse_message_or_place,
    parse_name,
)
from txmq.cli.rows import with_decoded_body
from txmq.model.printable import escape_unprintable

app = typer.Typer(
    name="message", no_args_is_help=True, help="Find, show and recall single messages."
)
FOUND_COLUMNS = ("message_id", "partition", "offset", "key", "tag", "stored_at", "body")
COLUMNS = ("message_id", "topic", "partition", "due_at", "size")

IdOrPlace = Annotated[
    Any,  # typer takes no union
    typer.Argument(
        parser=parse_message_or_place,
        metavar="ID|TOPIC/PARTITION/OFFSET",
        help="Id of the message, or its place, as logs name it.",
    ),
]
Ids = Annotated[
    list[str], typer.Argument(parser=parse_message, metavar="ID", help="Ids of messages.")
]


@broker_command(app, "delayed", example="txmq message delayed --topic orders")
def delayed(
    session: CommandSession,
    *,
    topic: Annotated[
        str | None,
        typer.Option(parser=parse_name, metavar="TOPIC", help="Only messages of this topic."),
    ] = None,
    after: NextPage = None,
    limit: Annotated[
        int, typer.Option(min=1, max=10_000, help="Maximum number of messages.")
    ] = 100,
) -> None:
    """List delayed messages, those that are due next first."""
    session.show(
        "message.delayed", columns=COLUMNS, topic=topic, after=_parse_page_start(after), limit=limit
    )


@broker_command(app, "recall", example="txmq message recall 019a0000000070008000000000000001-0")
def recall(session: CommandSession, message: Ids) -> None:
    """Recall delayed messages: all of them, or none if one is already due."""
    session.show("message.recall", ids=message)


@broker_command(app, "show", example="txmq message show 019a0000000070008000000000000001-0")
def show(session: CommandSession, message: IdOrPlace) -> None:
    """Show a message by its id (delayed, of a transaction, or in any topic), or by its
    place.
    """
    if isinstance(message, MessagePlace):
        reply, named = _find_at(session, message), f"is at {'/'.join(map(str, message))}"
    else:
        reply, named = _find_by_id(session, message), f"has the id {message}"
    if reply is None:
        if session.out.as_json:
            session.out.show({"message": None})
        else:
            print(
                f"no message {escape_unprintable(named)}: it was not sent, or "
                "retention has removed it"
            )
        raise typer.Exit(FAILED)
    session.out.show(with_decoded_body(reply))


def _find_at(session: CommandSession, place: MessagePlace) -> dict[str, Any] | None:
    topic, partition, offset = place
    found = session.client.call(
        "message.find", topic=topic, partition=partition, offset=offset, limit=1, bodies=True
    )["messages"]
    return next((one for one in found if one["offset"] == offset), None)


def _find_by_id(session: CommandSession, message: str) -> dict[str, Any] | None:
    reply: dict[str, Any] | None
    reply = session.client.call("message.show", id=message, bodies=True)["message"]
    if reply is None or (reply["state"] == "published" and reply.get("offset") is None):
        return find_by_id(session, message) or reply
    return reply


@broker_command(app, "find", example="txmq message find orders --key o-17 --from 2h")
def find(  # noqa: PLR0913  # its options
    session: CommandSession,
    topic: Topic,
    *,
    key: KeyFilter = None,
    message: MessageIdFilter = None,
    start: StoredFrom = None,
    end: StoredBefore = None,
    partition: PartitionFilter = None,
    offset: Annotated[int, typer.Option(min=0, help="First offset, with --partition.")] = 0,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of messages.")] = 100,
) -> None:
    """Find messages of a topic by key, id, time and place, in the order of partitions
    and offsets.
    """
    query = {
        "key": key,
        "id": message,
        "start": start,
        "end": end,
        "partition": partition,
        "offset": offset,
    }
    rows: list[dict[str, Any]] = []
    next_page: Any = None
    while len(rows) < limit:
        size = min(limit - len(rows), PAGE)
        page = session.client.call(
            "message.find", topic=topic, **query, after=next_page, limit=size, bodies=True
        )
        rows += map(with_decoded_body, page["messages"])
        next_page = page["next"]
        if next_page is None:
            break
    session.out.show({"messages": rows, "more": next_page is not None}, columns=FOUND_COLUMNS)


def _parse_page_start(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, _, second = text.strip("[] ").partition(",")
    if is_number(first) and is_number(second.strip()):
        return int(first), int(second)
    raise typer.BadParameter(f"invalid page {text!r}: use `next` of the page before")
