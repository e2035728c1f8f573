"""Options that name or select failed messages, for `txmq dlq`, `retry`, `plan` and
`policy`.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, NamedTuple

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


class Selected(NamedTuple):
    """Letters by their properties, or by a saved selection; all where neither is
    given.
    """

    where: Where = None
    select: Saved = None

    def args(self, group: str) -> dict[str, Any]:
        """Return the arguments of a call for these letters."""
        if self.select is None:
            return {"select": parse_selection(self.where, group)}
        if self.where:
            raise typer.BadParameter("use either --where or --select")
        return {"saved": self.select}


class ChosenLetters(NamedTuple):
    """Letters that are named, or selected in one of three ways."""

    letter: Letters = None
    everything: AllLetters = False
    where: Where = None
    select: Saved = None

    def args(self, group: str) -> dict[str, Any]:
        """Return the arguments of a call for these letters."""
        selected = bool(self.where) or self.select is not None
        if bool(self.letter) + self.everything + selected != 1:
            raise typer.BadParameter(
                "select the letters: use either TOPIC/PARTITION/OFFSET, --all, --where or --select"
            )
        if self.letter:
            return {"letters": self.letter}
        return Selected(self.where, self.select).args(group)


class ChosenRetries(NamedTuple):
    """Messages that are retried, and are named or selected."""

    message: RetriedPlaces = None
    everything: AllRetries = False
    where: RetriedWhere = None

    def args(self, group: str) -> dict[str, Any]:
        """Return the arguments of a call for these messages."""
        if bool(self.message) + self.everything + bool(self.where) != 1:
            raise typer.BadParameter(
                "select the messages: use either TOPIC/PARTITION/OFFSET, --all or --where"
            )
        if self.message:
            return {"letters": self.message}
        return {"select": retried(parse_selection(self.where, group))}


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
