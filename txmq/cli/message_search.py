"""Searches for messages of one topic or of all: criteria, bounds and progress."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from txmq.cli.command import CommandSession
from txmq.cli.parsers import parse_body_criterion, parse_duration, parse_header_criterion
from txmq.cli.status_line import StatusLine
from txmq.client.protocol.calls import calls_by
from txmq.client.protocol.lives import Searched, search_messages
from txmq.faces import run
from txmq.model.measures import counted

CALL_MS = 1_000  # of a search in all topics, between two looks at its bounds
PATIENCE_S = 60.0
MOST_READ = 10_000_000  # messages

BodyFilter = Annotated[
    str | None,
    typer.Option(
        "--in-body",
        parser=parse_body_criterion,
        metavar="TEXT|PATH=VALUE",
        help="Only messages with this text in the body, or with this value at a path of their "
        "JSON body: $.customer.id=17. A text that begins with $ begins with \\$ here.",
    ),
]
HeaderFilter = Annotated[
    Any,  # typer takes no tuple of a value that may be missing
    typer.Option(
        "--header",
        parser=parse_header_criterion,
        metavar="NAME[=VALUE]",
        help="Only messages with this header.",
    ),
]
MostRead = Annotated[
    int, typer.Option(min=1, metavar="N", help="Stop once so many messages were read.")
]
Within = Annotated[
    float,
    typer.Option(parser=parse_duration, metavar="DURATION", help="Stop after this time."),
]


class SearchBounds:
    """The bounds of one search, and the line that shows how far it is."""

    def __init__(self, most_read: int = MOST_READ, seconds: float = PATIENCE_S) -> None:
        self._most_read = most_read
        self._until = time.monotonic() + seconds
        self._line = StatusLine()

    def go_on(self, searched: Searched) -> bool:
        """Show how far a search has come; False = it has come to its bounds."""
        found = f"{counted(searched.read, 'message')} read, {len(searched.messages):,} found"
        self._line.show(f"searching {searched.at}: {found} …")
        return searched.read < self._most_read and time.monotonic() < self._until

    def clear(self) -> None:
        """Clear the line."""
        self._line.clear()


def bounded_search(
    session: CommandSession,
    wanted: dict[str, Any],
    limit: int,
    bounds: SearchBounds | None = None,
    *,
    after: Any = None,  # noqa: ANN401  # `next` of another search
) -> Searched:
    """Search all topics, or the one that is named: see `search_messages`."""
    bounds, call = bounds or SearchBounds(), calls_by(session.client.call)
    found = search_messages(call, wanted, limit, told=bounds.go_on, after=after, within_ms=CALL_MS)
    try:
        return run(found)
    finally:
        bounds.clear()


def find_by_id(session: CommandSession, message: str) -> dict[str, Any] | None:
    """Return a message of any topic by its id, with its body."""
    found = bounded_search(session, {"id": message, "bodies": True}, 1).messages
    return found[0] if found else None
