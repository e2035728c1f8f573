"""`txmq audit`: what operators did, from the audit topic."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

from txmq.cli.command import PAGE, CommandSession, broker_command
from txmq.cli.options import Limit, StoredBefore, StoredFrom
from txmq.cli.output import format_time
from txmq.cli.parsers import parse_name
from txmq.model.printable import escape_unprintable

app = typer.Typer()
FOLLOW_S = 0.5  # between two looks at the topic
SHORT = ("at", "operator", "call", "reason")
COLUMNS = ("at", "operator", "via", "call", "about", "reason", "result")

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Wait for more, until interrupted.")]


@broker_command(app, "audit", example="txmq audit --operator ada --from 2h")
def audit(  # noqa: PLR0913  # its options
    session: CommandSession,
    *,
    operator: Annotated[
        str | None, typer.Option(parser=parse_name, metavar="NAME", help="Only this operator.")
    ] = None,
    call: Annotated[
        str | None, typer.Option(help="Only this call, or the calls that begin so: dlq.")
    ] = None,
    group: Annotated[str | None, typer.Option(help="Only about this consumer group.")] = None,
    topic: Annotated[
        str | None, typer.Option(parser=parse_name, metavar="TOPIC", help="Only about this topic.")
    ] = None,
    about: Annotated[
        str | None, typer.Option(help="Only about this thing, such as tx:TOKEN or plan:NAME.")
    ] = None,
    start: StoredFrom = None,
    end: StoredBefore = None,
    limit: Limit = 100,
    follow: Follow = False,
) -> None:
    """Show what operators did, the newest last: who, what, when, why, and how much."""
    if group is not None and about is not None:
        raise typer.BadParameter("use either --group or --about")
    wanted: dict[str, Any] = {
        "operator": operator,
        "call": call,
        "topic": topic,
        "about": about if group is None else f"group:{group}",
        "start": start,
        "end": end,
    }
    entries, following = _newest(session, wanted, limit)
    if not follow:
        session.out.show({"entries": entries}, columns=COLUMNS)
        return
    try:
        while True:
            for entry in entries:
                session.out.print_line(entry, text_line(entry))
            page = session.client.call("audit.list", after=following, limit=PAGE, **wanted)
            entries = page["entries"]
            following = page["end"] if page["next"] is None else page["next"]
            if not entries and page["next"] is None:
                time.sleep(FOLLOW_S)
    except KeyboardInterrupt:  # the usual end
        return


def _newest(
    session: CommandSession, wanted: dict[str, Any], limit: int
) -> tuple[list[dict[str, Any]], int]:
    """Return the newest entries, oldest first, and the offset behind all of them."""
    found: list[dict[str, Any]] = []
    after: int | None = None
    end: int | None = None
    while len(found) < limit:
        page = session.client.call(
            "audit.list", newest=True, after=after, limit=min(PAGE, limit - len(found)), **wanted
        )
        end = page["end"] if end is None else end
        found += page["entries"]
        after = page["next"]
        if after is None:
            break
    return found[::-1], end or 0


def brief_entries(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return entries about one thing for a table."""
    return [{name: entry[name] for name in SHORT} for entry in entries]


def text_line(entry: dict[str, Any]) -> str:
    """Return an entry as one line of text."""
    if "damaged" in entry:
        return f"{format_time(entry['at'])} damaged: {escape_unprintable(str(entry['damaged']))}"
    words = [entry["operator"] or "-", entry["call"], entry["about"], entry["reason"]]
    words += [f"{name}={value}" for name, value in entry["result"].items()]
    text = " ".join(escape_unprintable(str(word)) for word in words if word)
    return f"{format_time(entry['at'])} {text}"
