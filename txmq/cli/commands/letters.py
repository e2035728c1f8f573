"""`txmq dlq`: dead letters, seen, replayed, abandoned."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from txmq.cli.command import Session, remote
from txmq.cli.options import Group, Operator, Place, Reason, Yes, place_of
from txmq.cli.output import FAILED, body_fields

app = typer.Typer(no_args_is_help=True, help="Dead letters.")
AT_ONCE = 1_000  # as many as a broker takes in one call
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
    Place,
    typer.Argument(
        parser=place_of, metavar="TOPIC/PARTITION/OFFSET", help="Where the message was."
    ),
]
Letters = Annotated[
    list[Place] | None,
    typer.Argument(parser=place_of, metavar="TOPIC/PARTITION/OFFSET", help="Which letters."),
]
All = Annotated[bool, typer.Option("--all", help="All letters of the group.")]


@remote(app, "list")
def list_(
    session: Session,
    group: Group,
    *,
    after: Annotated[
        int, typer.Option(min=0, help="Go on behind this number: `next` of the page before.")
    ] = 0,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many at most.")] = 100,
    bodies: Annotated[
        bool, typer.Option("--bodies", help="With the bodies of the messages.")
    ] = False,
) -> None:
    """List a group's letters, in the order in which they died."""
    reply = session.client.call("dlq.list", group=group, after=after, limit=limit, bodies=bodies)
    reply["letters"] = [_readable(letter) for letter in reply["letters"]]
    session.out.show(reply, columns=COLUMNS)


@remote(app, "show")
def show(session: Session, group: Group, letter: Letter) -> None:
    """Show a letter: its message, and why it died."""
    session.out.show(_readable(session.client.call("dlq.show", group=group, **letter._asdict())))


@remote(app, "stats")
def stats(session: Session, group: Group) -> None:
    """Count a group's letters by error, topic and age."""
    session.show("dlq.stats", group=group)


@remote(app, "replay")
def replay(
    session: Session,
    group: Group,
    letter: Letters = None,
    *,
    everything: All = False,
    operator: Operator,
    reason: Reason = "",
    yes: Yes = False,
) -> None:
    """Deliver letters again, each in the order of its key."""
    letters = _chosen(session, group, letter, everything=everything)
    if everything:
        session.out.confirm(f"Replay {len(letters)} letters of group {group}?", yes=yes)
    _carry_out(session, "dlq.replay", letters, group=group, operator=operator, reason=reason)


@remote(app, "abandon")
def abandon(
    session: Session,
    group: Group,
    letter: Letters = None,
    *,
    everything: All = False,
    operator: Operator,
    reason: Reason,
    yes: Yes = False,
) -> None:
    """Close letters for ever: their messages will not be processed."""
    letters = _chosen(session, group, letter, everything=everything)
    if everything:
        session.out.confirm(f"Abandon {len(letters)} letters of group {group}?", yes=yes)
    _carry_out(session, "dlq.abandon", letters, group=group, operator=operator, reason=reason)


def _chosen(
    session: Session, group: str, letters: list[Place] | None, *, everything: bool
) -> list[Place]:
    if bool(letters) == everything:
        raise typer.BadParameter("give either the places of letters or --all")
    return list(_open(session, group)) if everything else letters or []


def _open(session: Session, group: str) -> Iterator[Place]:
    """The letters that wait for somebody to decide: all listed before any is touched,
    for some may die again.
    """
    after = 0
    while after is not None:
        reply = session.client.call("dlq.list", group=group, after=after, limit=AT_ONCE)
        after = reply["next"]
        for row in reply["letters"]:
            if row["state"] == "dead":
                yield Place(row["topic"], row["partition"], row["offset"])


def _carry_out(session: Session, call: str, letters: list[Place], **args: object) -> None:
    """Ends with status 1 where some were refused."""
    done: list[Any] = []
    refused: list[Any] = []
    for start in range(0, len(letters), AT_ONCE):
        reply = session.client.call(call, letters=letters[start : start + AT_ONCE], **args)
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


def _readable(letter: dict[str, Any]) -> dict[str, Any]:
    """The letter with its body, where it has come along, as text if it is text."""
    body = letter.pop("body", None)
    return letter | body_fields(b64decode(body)) if body is not None else letter
