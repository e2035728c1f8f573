"""`txmq trace`: the life of a key or a message, without the name of a topic."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from txmq.cli.command import CommandSession, broker_command
from txmq.cli.life_events import LifeEvent, events_of, name_of
from txmq.cli.options import MessageIdFilter
from txmq.cli.output import FAILED, escape_controls
from txmq.errors import OffsetOutOfRange, RemoteProtocolError, UnknownTopic, UnknownTransaction

PAGE = 100
MAX_OPERATIONS = 100  # entries of the audit topic about one message
COLUMNS = ("at", "message", "what", "who", "text")


def add_to(app: typer.Typer) -> None:
    """Add the command to `app`."""
    broker_command(app, "trace")(trace)


def trace(
    session: CommandSession,
    *,
    key: Annotated[str | None, typer.Option(help="Key of the messages.")] = None,
    message: MessageIdFilter = None,
    dsn: Annotated[
        str | None, typer.Option(help="Database with the inbox of the consumers.")
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
        _add_life(session, one)
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
    if more and not session.out.as_json:
        print(f"there are more than {limit} messages: use --limit", file=sys.stderr)
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
    Where it takes several calls, the progress is told on a terminal.
    """
    found: list[dict[str, Any]] = []
    after: Any = None
    told = False
    while True:
        size = min(limit - len(found), PAGE)
        page = session.client.call(
            "message.search", key=key, id=message, after=after, limit=size, bodies=bodies
        )
        found += page["messages"]
        after = page["next"]
        if after is None or len(found) >= limit or (message is not None and found):
            break
        if sys.stderr.isatty():
            told = True
            place = escape_controls(str(page["at"]))
            print(f"\r\x1b[Ksearching {place} …", end="", file=sys.stderr, flush=True)
    if told:
        print("\r\x1b[K", end="", file=sys.stderr)
    more = after is not None and message is None
    return found[:limit], more or len(found) > limit


def find_by_id(session: CommandSession, message: str) -> dict[str, Any] | None:
    """Return a message of any topic by its id, with its body. A broker of an older
    version finds none.
    """
    try:
        found, _more = find_everywhere(session, key=None, message=message, limit=1, bodies=True)
    except RemoteProtocolError:
        return None
    return found[0] if found else None


def _add_life(session: CommandSession, message: dict[str, Any]) -> None:
    """Add what became of a message: in its transaction, in each group, by operators."""
    about: list[dict[str, Any]] = []
    if message.get("offset") is not None:
        place = [message["topic"], message["partition"], message["offset"]]
        try:
            message["life"] = session.client.call(
                "message.life", topic=place[0], partition=place[1], offset=place[2]
            )
        except (OffsetOutOfRange, UnknownTopic):  # retention was faster
            message["life"] = None
        else:
            message["transaction"] = message["life"].pop("transaction")
        about.append({"message": place})
    else:
        _add_transaction(session, message)
    token = _token_of(message)
    if token is not None:
        about.append({"about": f"tx:{token}"})
    message["audit"] = sorted(
        (entry for wanted in about for entry in operations(session, **wanted)),
        key=lambda entry: int(entry["at"]),
    )


def _add_transaction(session: CommandSession, message: dict[str, Any]) -> None:
    """Add the transaction of a message that has no offset, if it came with one."""
    token = message.get("token") or str(message["message_id"]).partition("-")[0]
    try:
        message["transaction"] = session.client.call("tx.show", token=token)
    except UnknownTransaction:  # a plain message that is delayed
        return


def _token_of(message: dict[str, Any]) -> str | None:
    transaction = message.get("transaction")
    return message.get("token") if transaction is None else str(transaction["token"])


def operations(session: CommandSession, **wanted: object) -> list[dict[str, Any]]:
    """Return the newest entries of the audit topic, oldest first. A broker of an older
    version has none.
    """
    try:
        page = session.client.call("audit.list", newest=True, limit=MAX_OPERATIONS, **wanted)
    except RemoteProtocolError:
        return []
    return [entry for entry in reversed(page["entries"]) if "damaged" not in entry]


def _add_inbox(session: CommandSession, dsn: str, found: list[dict[str, Any]]) -> None:
    """Add whether each group's inbox has the effect of a message."""
    from txmq.tx.postgres import blocking, inbox
    from txmq.tx.postgres.session import connect

    log_id = session.client.call("broker.show")["log_id"]
    with closing(connect(dsn, application_name="txmq trace")) as connection:
        for message, life in _with_life(found):
            message["inbox"] = [
                {
                    "group": group["group"],
                    "epoch": group["epoch"],
                    "applied": _is_applied(
                        blocking.applied(
                            connection,
                            inbox.Position(
                                group["group"],
                                log_id,
                                life["topic_id"],
                                life["partition"],
                                group["epoch"],
                            ),
                        ).ranges,
                        life["offset"],
                    ),
                }
                for group in life["groups"]
            ]


def _with_life(
    found: list[dict[str, Any]],
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    return ((message, message["life"]) for message in found if message.get("life"))


def _is_applied(ranges: tuple[tuple[int, int], ...], offset: int) -> bool:
    return any(start <= offset < end for start, end in ranges)


def _write_page(
    file: Path, title: str, found: list[dict[str, Any]], events: Sequence[LifeEvent]
) -> None:
    from txmq.cli.life_page import page

    names = ", ".join(name_of(message) for message in found[:PAGE])
    file.write_text(page(title, f"{len(found)} messages: {names}", events), encoding="utf-8")
