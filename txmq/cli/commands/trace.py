"""`txmq trace`: the life of messages, and of what follows from them, in all topics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from txmq.cli.command import CommandSession, broker_command
from txmq.cli.database import open_database
from txmq.cli.message_search import (
    MOST_READ,
    BodyFilter,
    HeaderFilter,
    MostRead,
    SearchBounds,
    Within,
    bounded_search,
)
from txmq.cli.options import Limit, MessageIdFilter, StoredFrom
from txmq.cli.output import FAILED
from txmq.client.protocol.calls import calls_by
from txmq.client.protocol.life_events import LifeEvent, events_of, name_of, sequence_of
from txmq.client.protocol.lives import (
    Searched,
    add_deliveries,
    add_life,
    search_title,
    with_correlated,
)
from txmq.faces import run
from txmq.model.measures import counted

if TYPE_CHECKING:
    from txmq.tx.postgres.session import Connection

app = typer.Typer()
COLUMNS = {
    "sequence": ("at", "message", "key", "state"),
    "events": ("at", "message", "what", "who", "text"),
}
MAX_NAMES = 100  # of messages, in the summary of a page


@broker_command(app, "trace", example="txmq trace --key o-17 --html o-17.html")
def trace(  # noqa: PLR0913  # its options
    session: CommandSession,
    *,
    key: Annotated[str | None, typer.Option(help="Key of the messages.")] = None,
    message: MessageIdFilter = None,
    body: BodyFilter = None,
    header: HeaderFilter = None,
    start: StoredFrom = None,
    dsn: Annotated[
        str | None,
        typer.Option(metavar="DSN", help="Database with the inbox of the consumers."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one HTML page with a time line.")
    ] = None,
    limit: Limit = 20,
    most_read: MostRead = MOST_READ,
    within: Within = "60s",  # type: ignore[assignment]  # typer parses it
) -> None:
    """Show the life of messages in all topics: transaction, decision, deliveries,
    failures, what operators did, and with --dsn the inbox. What handlers sent because
    of them is among them, and what they were sent because of.
    """
    wanted = {"key": key, "id": message, "body": body, "header": header}
    named = {name: value for name, value in wanted.items() if value is not None}
    if not named or (message is not None and len(named) > 1):
        raise typer.BadParameter("use either --id, or --key, --in-body and --header")
    bounds = SearchBounds(most_read, within)
    searched = _search(session, wanted | {"start": start}, limit, bounds)
    found = searched.messages
    if dsn is not None:
        _add_inbox(session, dsn, found)
    events = events_of(found)
    if html is not None:
        _write_page(html, search_title(named), found, events)
    rows: dict[str, Any] = {"events": [event._asdict() for event in events]}
    if session.out.as_json:
        session.out.show({"messages": found, "more": searched.more} | rows)
    elif found:
        session.out.show(_sequence(found) | rows, columns=COLUMNS)
    elif searched.next is not None:
        print("no message was found as far as the search has come")
    else:
        print("no message has this key, id, body or header: not sent, or removed by retention")
    _note_rest(session, searched, limit)
    if not found:
        raise typer.Exit(FAILED)


def _search(
    session: CommandSession, wanted: dict[str, Any], limit: int, bounds: SearchBounds
) -> Searched:
    """Return what criteria find, and what follows from it, with their lives."""
    call = calls_by(session.client.call)
    searched = bounded_search(session, wanted, limit, bounds)
    try:
        searched = run(with_correlated(call, searched, limit, told=bounds.go_on))
    finally:
        bounds.clear()
    for one in searched.messages:
        run(add_life(call, one))
    run(add_deliveries(call, searched.messages))
    return searched


def _sequence(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the table of a sequence, where there is one."""
    rows = [
        step._asdict() | {"message": f"{step.indent}{step.name}"} for step in sequence_of(found)
    ]
    return {"sequence": rows} if len(rows) > 1 else {}


def _note_rest(session: CommandSession, searched: Searched, limit: int) -> None:
    """Say what was left out."""
    if searched.more and len(searched.messages) >= limit:
        session.out.print_note(f"there are more than {counted(limit, 'message')}: use --limit")
    elif searched.more:
        session.out.print_note(
            f"the search has stopped after {counted(searched.read, 'message')}, at {searched.at}: "
            "use --from, --within or --most-read"
        )


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
    about = f"{counted(len(found), 'message')}: {names}"
    file.write_text(page(title, about, events), encoding="utf-8")
