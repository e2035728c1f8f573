"""`txmq message`: find, show and recall single messages."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from txmq.cli.command import CommandSession, broker_command
from txmq.cli.message_search import (
    MOST_READ,
    BodyFilter,
    HeaderFilter,
    MostRead,
    SearchBounds,
    Within,
    bounded_search,
    find_by_id,
)
from txmq.cli.options import (
    KeyFilter,
    Limit,
    MessageIdFilter,
    NextPage,
    PartitionFilter,
    StoredBefore,
    StoredFrom,
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
from txmq.model.measures import counted
from txmq.model.printable import escape_unprintable

app = typer.Typer(
    name="message", no_args_is_help=True, help="Find, show and recall single messages."
)
FOUND_COLUMNS = ("message_id", "topic", "partition", "offset", "key", "tag", "stored_at", "body")
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
    limit: Limit = 100,
) -> None:
    """List delayed messages, those that are due next first."""
    session.show(
        "message.delayed", columns=COLUMNS, topic=topic, after=_parse_next(after, 2), limit=limit
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


@broker_command(
    app, "find", example="txmq message find orders --in-body '$.customer.id=17' --from 2h"
)
def find(  # noqa: PLR0913  # its options
    session: CommandSession,
    topic: Annotated[
        str | None,
        typer.Argument(
            metavar="TOPIC", parser=parse_name, help="Name of the topic; without it, all topics."
        ),
    ] = None,
    *,
    key: KeyFilter = None,
    message: MessageIdFilter = None,
    body: BodyFilter = None,
    header: HeaderFilter = None,
    start: StoredFrom = None,
    end: StoredBefore = None,
    partition: PartitionFilter = None,
    offset: Annotated[int, typer.Option(min=0, help="First offset, with --partition.")] = 0,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of messages.")] = 100,
    most_read: MostRead = MOST_READ,
    within: Within = "60s",  # type: ignore[assignment]  # typer parses it
    after: NextPage = None,
) -> None:
    """Find messages by key, id, body, header, time and place, in the order of topics,
    partitions and offsets. Bodies and headers have no index: all messages of that time
    are read for them, as far as --most-read and --within allow.
    """
    wanted: dict[str, Any] = {"key": key, "id": message, "body": body, "header": header}
    bounds, at = SearchBounds(most_read, within), _parse_next(after, 3 if topic is None else 2)
    if topic is not None:
        place = {"topic": topic, "partition": partition, "offset": offset}
    elif partition is not None or set(wanted.values()) == {None}:
        raise typer.BadParameter("name a TOPIC, or use --key, --id, --in-body or --header alone")
    else:
        place = {}
    wanted |= place | {"start": start, "end": end, "bodies": True}
    found = bounded_search(session, wanted, limit, bounds, after=at)
    rows = list(map(with_decoded_body, found.messages))
    shown = {"messages": rows, "more": found.next is not None, "read": found.read}
    following = {"next": found.next} if session.out.as_json else {}
    session.out.show(shown | following, columns=FOUND_COLUMNS)
    if found.next is not None and len(rows) < limit:
        on = ",".join(map(str, found.next))
        session.out.print_note(
            f"stopped at {found.at}, after {counted(found.read, 'message')}: go on with "
            f"--after {on}, or narrow the search by TOPIC, --from and --to"
        )


def _parse_next(text: str | None, count: int) -> tuple[int, ...] | None:
    if text is None:
        return None
    numbers = [number.strip() for number in text.strip("[] ").split(",")]
    if len(numbers) == count and all(map(is_number, numbers)):
        return tuple(map(int, numbers))
    raise typer.BadParameter(f"invalid page {text!r}: use `next` of the page before")
