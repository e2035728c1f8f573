"""`txmq dlq`: list, replay and abandon dead letters."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from txmq.cli.command import CommandSession, broker_command
from txmq.cli.options import Group, Operator, Reason, Yes
from txmq.cli.output import FAILED, body_fields
from txmq.cli.parsers import MessagePlace, parse_place

app = typer.Typer(no_args_is_help=True, help="List, replay and abandon dead letters.")
MAX_LETTERS_PER_CALL = 1_000  # the limit of the broker
COLUMNS = (
    "topic",
    "partition",
    "offset",
    "key",
    "state",
    "attempts",
    "error_type",
    "error_text",
    "dead_at",
    "body",
)

Letter = Annotated[
    MessagePlace,
    typer.Argument(
        parser=parse_place, metavar="TOPIC/PARTITION/OFFSET", help="Place of the message."
    ),
]
Letters = Annotated[
    list[MessagePlace] | None,
    typer.Argument(
        parser=parse_place, metavar="TOPIC/PARTITION/OFFSET", help="Places of the dead letters."
    ),
]
All = Annotated[bool, typer.Option("--all", help="All open dead letters of the group.")]


@broker_command(app, "list")
def list_(
    session: CommandSession,
    group: Group,
    *,
    after: Annotated[
        int, typer.Option(min=0, help="Start after this number: `next` of the previous page.")
    ] = 0,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of letters.")] = 100,
    bodies: Annotated[bool, typer.Option("--bodies", help="Include bodies of messages.")] = False,
) -> None:
    """List the dead letters of a group, in the order in which they failed."""
    reply = session.client.call("dlq.list", group=group, after=after, limit=limit, bodies=bodies)
    reply["letters"] = [_with_body_text(letter) for letter in reply["letters"]]
    if not session.out.as_json:  # tracebacks are for `dlq show`
        for letter in reply["letters"]:
            letter["error_text"] = _last_line(letter["error_text"])
    session.out.show(reply, columns=COLUMNS)


@broker_command(app, "show")
def show(session: CommandSession, group: Group, letter: Letter) -> None:
    """Show a dead letter: its message, its last error, and its attempts.

    Of the attempts the first and the last eight are kept.
    """
    shown = _with_body_text(session.client.call("dlq.show", group=group, **letter._asdict()))
    if not session.out.as_json:
        for attempt in shown.get("history", ()):
            attempt["error_text"] = _last_line(attempt["error_text"])
    session.out.show(shown)


@broker_command(app, "stats")
def stats(session: CommandSession, group: Group) -> None:
    """Count the dead letters of a group by error, topic and age."""
    session.show("dlq.stats", group=group)


@broker_command(app, "replay")
def replay(
    session: CommandSession,
    group: Group,
    letter: Letters = None,
    *,
    everything: All = False,
    operator: Operator,
    reason: Reason = "",
    yes: Yes = False,
) -> None:
    """Deliver dead letters again, in the order of their keys."""
    letters = _selected_letters(session, group, letter, everything=everything)
    if everything:
        session.out.confirm(f"Replay {len(letters)} letters of group {group}?", yes=yes)
    _send_letters(session, "dlq.replay", letters, group=group, operator=operator, reason=reason)


@broker_command(app, "abandon")
def abandon(
    session: CommandSession,
    group: Group,
    letter: Letters = None,
    *,
    everything: All = False,
    operator: Operator,
    reason: Reason,
    yes: Yes = False,
) -> None:
    """Close dead letters for good. Their messages will not be processed."""
    letters = _selected_letters(session, group, letter, everything=everything)
    if everything:
        session.out.confirm(f"Abandon {len(letters)} letters of group {group}?", yes=yes)
    _send_letters(session, "dlq.abandon", letters, group=group, operator=operator, reason=reason)


def _selected_letters(
    session: CommandSession, group: str, letters: list[MessagePlace] | None, *, everything: bool
) -> list[MessagePlace]:
    if bool(letters) == everything:
        raise typer.BadParameter("select the letters: use either TOPIC/PARTITION/OFFSET or --all")
    return list(_open_letters(session, group)) if everything else letters or []


def _open_letters(session: CommandSession, group: str) -> Iterator[MessagePlace]:
    """Return the letters that are not abandoned.

    The caller reads all of them before it replays any, because a replayed message may
    fail again and be listed again.
    """
    after = 0
    while after is not None:
        reply = session.client.call(
            "dlq.list", group=group, after=after, limit=MAX_LETTERS_PER_CALL
        )
        after = reply["next"]
        for row in reply["letters"]:
            if row["state"] == "dead":
                yield MessagePlace(row["topic"], row["partition"], row["offset"])


def _send_letters(
    session: CommandSession, call: str, letters: list[MessagePlace], **args: object
) -> None:
    """Replay or abandon letters, and show the result.

    Exit status 1: the broker refused some of them.
    """
    done: list[Any] = []
    refused: list[Any] = []
    for start in range(0, len(letters), MAX_LETTERS_PER_CALL):
        reply = session.client.call(
            call, letters=letters[start : start + MAX_LETTERS_PER_CALL], **args
        )
        done += reply["done"]
        refused += reply["refused"]
    rows = [
        {"topic": topic, "partition": at, "offset": offset, "why": why}
        for topic, at, offset, why in refused
    ]
    session.out.show(
        {"done": done, "refused": rows} if session.out.as_json or refused else {"done": len(done)}
    )
    if refused:
        raise typer.Exit(FAILED)


def _last_line(text: str) -> str:
    """Return what a traceback ends with: the error itself."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _with_body_text(letter: dict[str, Any]) -> dict[str, Any]:
    body = letter.pop("body", None)
    return letter | body_fields(b64decode(body)) if body is not None else letter
