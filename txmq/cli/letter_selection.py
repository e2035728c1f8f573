"""Options that name or select dead letters, for `txmq dlq`, `plan` and `policy`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from txmq.cli.parsers import MessagePlace, is_number, parse_moment, parse_name, parse_place
from txmq.model.letter_filter import InvalidFilter, parse_filter

STATES = ("open", "replaying", "abandoned", "local")
RANGE = re.compile(r"(\d{0,9})\.\.(\d{0,9})")

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
        metavar="NAME=VALUE",
        help="Only letters with this property; can be repeated. Names: topic, key, error, "
        "fingerprint, text, header (NAME or NAME=VALUE), attempts (3, 3.. or 3..5), "
        "replays (at most so many), "
        "from and to (time of death, or how long ago: 2h), "
        "state (open, replaying, abandoned, local; by default open).",
    ),
]
Saved = Annotated[
    str | None,
    typer.Option(
        "--select", parser=parse_name, metavar="NAME", help="Only letters of a saved selection."
    ),
]
Filter = Annotated[
    str | None,
    typer.Option(
        "--filter",
        "-f",
        metavar="TEXT",
        help='Only letters of a filter as in the console: error:ValueError age>1h key:"a b".',
    ),
]


def parse_text(text: str, group: str) -> dict[str, Any]:
    """Parse a filter of the console's language into a selection of letters."""
    try:
        found = parse_filter(text, time.time_ns() // 1_000)
    except InvalidFilter as error:
        pointer = f"{text}\n{' ' * error.position}^"
        raise typer.BadParameter(f"{error.message}: {error.hint}\n{pointer}") from None
    if found.group not in (None, group):
        raise typer.BadParameter(f"the filter is for group {found.group}, not for {group}")
    return found.select


def chosen_letters(
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
    return {"letters": letters} if letters else selection_args(where, saved)


def selection_args(where: list[str] | None, saved: str | None) -> dict[str, Any]:
    """Return the arguments of a call for the letters that are selected."""
    if saved is not None and where:
        raise typer.BadParameter("use either --where or --select")
    return {"select": parse_selection(where)} if saved is None else {"saved": saved}


def parse_selection(texts: list[str] | None) -> dict[str, Any]:
    """Parse properties like "error=ValueError" into a selection."""
    selection: dict[str, Any] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if name not in PROPERTIES or not equals:
            raise typer.BadParameter(
                f"invalid property {text!r}: use NAME=VALUE, with one of the names "
                f"{', '.join(PROPERTIES)}"
            )
        parsed = PROPERTIES[name](value)
        states = parsed.get("states", [])
        if states:
            parsed = {"states": [*selection.pop("states", ()), *states]}
        for field in parsed.keys() & selection.keys():
            raise typer.BadParameter(f"{name} is given twice: {selection[field]!r} and {value!r}")
        selection |= parsed
    return selection


def _field(name: str, parse: Callable[[str], object] = str) -> Callable[[str], dict[str, Any]]:
    return lambda value: {name: parse(value)}


def _attempts(text: str) -> dict[str, Any]:
    if is_number(text):
        return {"min_attempts": int(text), "max_attempts": int(text)}
    found = RANGE.fullmatch(text)
    if found is None or text == "..":
        raise typer.BadParameter(f"invalid attempts {text!r}: use 3, 3.., ..5 or 3..5")
    low, high = found.groups()
    if low and high and int(low) > int(high):
        raise typer.BadParameter(f"invalid attempts {text!r}: the first number is the smaller one")
    return {
        name: int(number)
        for name, number in (("min_attempts", low), ("max_attempts", high))
        if number
    }


def _count(text: str) -> int:
    if not is_number(text):
        raise typer.BadParameter(f"invalid number {text!r}: use 0, 1, 2, …")
    return int(text)


def _header(text: str) -> list[str | None]:
    name, equals, value = text.partition("=")
    if not name:
        raise typer.BadParameter(f"invalid header {text!r}: use NAME or NAME=VALUE")
    return [name, value if equals else None]


def _state(text: str) -> list[str]:
    if text not in STATES:
        raise typer.BadParameter(f"invalid state {text!r}: use {', '.join(STATES)}")
    return [text]


PROPERTIES: dict[str, Callable[[str], dict[str, Any]]] = {
    "topic": _field("topic", parse_name),
    "key": _field("key"),
    "error": _field("error_type"),
    "fingerprint": _field("fingerprint"),
    "text": _field("text"),
    "header": _field("header", _header),
    "attempts": _attempts,
    "replays": _field("max_replays", _count),
    "from": _field("died_from", parse_moment),
    "to": _field("died_before", parse_moment),
    "state": _field("states", _state),
}
