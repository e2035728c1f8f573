"""Options that name or select failed messages, for `txmq dlq`, `retry`, `plan` and
`policy`.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from txmq.cli.parsers import MessagePlace, parse_name, parse_place
from txmq.model.letter_filter import InvalidFilter, parse_filter, retried

Letters = Annotated[
    list[MessagePlace] | None,
    typer.Argument(
        parser=parse_place, metavar="TOPIC/PARTITION/OFFSET", help="Places of the dead letters."
    ),
]
AllLetters = Annotated[bool, typer.Option("--all", help="All open dead letters of the group.")]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        "-w",
        metavar="FILTER",
        help="Only letters with these properties, as in the console; can be repeated: "
        'error:ValueError age>1h key:"a b". Names: topic, key, error, fingerprint, text, '
        "header (NAME or NAME=VALUE), body (part of it, or $.path=VALUE), attempts, replays, age, "
        "after and before (time of death), state (open, replaying, abandoned, local, retrying or "
        "any; by default open).",
    ),
]
RetriedPlaces = Annotated[
    list[MessagePlace] | None,
    typer.Argument(
        parser=parse_place, metavar="TOPIC/PARTITION/OFFSET", help="Places of the messages."
    ),
]
AllRetries = Annotated[bool, typer.Option("--all", help="All messages that are retried.")]
RetriedWhere = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        "-w",
        metavar="FILTER",
        help="Only messages with these properties, as for txmq dlq; age is the time since the "
        "first failure, state is retrying, replaying (was dead) or local (at a consumer).",
    ),
]
Saved = Annotated[
    str | None,
    typer.Option(
        "--select", parser=parse_name, metavar="NAME", help="Only letters of a saved selection."
    ),
]


def chosen_letters(
    group: str,
    letters: list[MessagePlace] | None,
    where: list[str] | None,
    saved: str | None,
    *,
    everything: bool,
) -> dict[str, Any]:
    """Return the arguments of a call for the letters that are named, or selected in one
    of three ways.
    """
    ways = bool(letters) + everything + (bool(where) or saved is not None)
    if ways != 1:
        raise typer.BadParameter(
            "select the letters: use either TOPIC/PARTITION/OFFSET, --all, --where or --select"
        )
    return {"letters": letters} if letters else selection_args(group, where, saved)


def chosen_retries(
    group: str, places: list[MessagePlace] | None, where: list[str] | None, *, everything: bool
) -> dict[str, Any]:
    """Return the arguments of a call for the messages that are named, or selected."""
    if bool(places) + everything + bool(where) != 1:
        raise typer.BadParameter(
            "select the messages: use either TOPIC/PARTITION/OFFSET, --all or --where"
        )
    if places:
        return {"letters": places}
    return {"select": retried(parse_selection(where, group))}


def selection_args(group: str, where: list[str] | None, saved: str | None) -> dict[str, Any]:
    """Return the arguments of a call for the letters that are selected."""
    if saved is not None and where:
        raise typer.BadParameter("use either --where or --select")
    return {"select": parse_selection(where, group)} if saved is None else {"saved": saved}


def parse_selection(filters: list[str] | None, group: str | None = None) -> dict[str, Any]:
    """Parse filters of letters of a group, None = of any, into a selection."""
    text = " ".join(filters or ())
    try:
        found = parse_filter(text, time.time_ns() // 1_000)
    except InvalidFilter as error:
        pointer = f"{text}\n{' ' * error.position}^"
        raise typer.BadParameter(f"{error.message}: {error.hint}\n{pointer}") from None
    if found.group not in (None, group):
        whose = "any group" if group is None else group
        raise typer.BadParameter(f"the filter is for group {found.group}, not for {whose}")
    return found.select
