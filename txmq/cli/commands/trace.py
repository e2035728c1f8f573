"""`txmq trace`: the life of a key or a message, without the name of a topic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from txmq.cli.command import CommandSession, broker_command
from txmq.cli.database import open_database
from txmq.cli.options import MessageIdFilter
from txmq.cli.output import FAILED
from txmq.cli.status_line import StatusLine
from txmq.client.protocol.calls import calls_by
from txmq.client.protocol.life_events import LifeEvent, events_of, name_of
from txmq.client.protocol.lives import delivery_steps, life_steps, search_steps
from txmq.faces import run

if TYPE_CHECKING:
    from txmq.tx.postgres.session import Connection

app = typer.Typer()
COLUMNS = ("at", "message", "what", "who", "text")
MAX_NAMES = 100  # of messages, in the summary of a page


@broker_command(app, "trace", example="txmq trace --key o-17 --html o-17.html")
def trace(
    session: CommandSession,
    *,
    key: Annotated[str | None, typer.Option(help="Key of the messages.")] = None,
    message: MessageIdFilter = None,
    dsn: Annotated[
        str | None,
        typer.Option(metavar="DSN", help="Database with the inbox of the consumers."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one HTML page with a time line.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of messages.")] = 20,
) -> None:
    """Show the life of a key or a message in all topics: transaction, decision,
    deliveries, failures, what operators did, and with --dsn the inbox.
    """
    if (key is None) == (message is None):
        raise typer.BadParameter("use either --key or --id")
    found, more = find_everywhere(session, key=key, message=message, limit=limit)
    for one in found:
        run(life_steps(calls_by(session.client.call), one))
    run(delivery_steps(calls_by(session.client.call), found))
    if dsn is not None:
        _add_inbox(session, dsn, found)
    events = events_of(found)
    if html is not None:
        _write_page(html, f"key {key}" if message is None else f"message {message}", found, events)
    shown: dict[str, Any] = {"messages": found, "more": more}
    if session.out.as_json:
        session.out.show(shown | {"events": [event._asdict() for event in events]})
    elif found:
        session.out.show({"events": [event._asdict() for event in events]}, columns=COLUMNS)
    else:
        print("no message has this key or id: not sent, or removed by retention")
    if more:
        session.out.print_note(f"there are more than {limit} messages: use --limit")
    if not found:
        raise typer.Exit(FAILED)


def find_everywhere(
    session: CommandSession,
    *,
    key: str | None,
    message: str | None,
    limit: int,
    bodies: bool = False,
) -> tuple[list[dict[str, Any]], bool]:
    """Return the messages of a key or an id in all topics, and whether there are more.
    Where it takes several calls, a terminal shows how far the search has come.
    """
    line = StatusLine()

    def show_place(place: object) -> None:
        line.show(f"searching {place} …")

    call = calls_by(session.client.call)
    try:
        return run(search_steps(call, key, message, limit, bodies=bodies, told=show_place))
    finally:
        line.clear()


def find_by_id(session: CommandSession, message: str) -> dict[str, Any] | None:
    """Return a message of any topic by its id, with its body."""
    found, _more = find_everywhere(session, key=None, message=message, limit=1, bodies=True)
    return found[0] if found else None


def _add_inbox(session: CommandSession, dsn: str, found: list[dict[str, Any]]) -> None:
    """Add whether each group's inbox has the effect of a message."""
    log_id = session.client.call("broker.show")["log_id"]
    with open_database(dsn, "trace") as connection:
        for message in found:
            life = message.get("life")
            if not life:
                continue
            message["inbox"] = [
                {
                    "group": group["group"],
                    "epoch": group["epoch"],
                    "applied": _is_applied(connection, log_id, life, group),
                }
                for group in life["groups"]
            ]


def _is_applied(
    connection: Connection, log_id: str, life: dict[str, Any], group: dict[str, Any]
) -> bool:
    from txmq.tx.postgres.blocking import applied
    from txmq.tx.postgres.inbox import Position

    topic, partition = life["topic_id"], life["partition"]
    position = Position(group["group"], log_id, topic, partition, group["epoch"])
    return applied(connection, position).covers(life["offset"])


def _write_page(
    file: Path, title: str, found: list[dict[str, Any]], events: Sequence[LifeEvent]
) -> None:
    from txmq.cli.life_page import page

    names = ", ".join(name_of(message) for message in found[:MAX_NAMES])
    file.write_text(page(title, f"{len(found)} messages: {names}", events), encoding="utf-8")
