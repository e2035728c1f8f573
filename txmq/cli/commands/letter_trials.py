"""`txmq dlq try` delivers a dead letter to one member, to see what becomes of it."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from txmq.cli.command import CommandSession
from txmq.cli.commands.letter_edits import Letter
from txmq.cli.options import By, Group
from txmq.cli.output import FAILED
from txmq.cli.parsers import parse_duration, parse_name
from txmq.client.protocol.letter_changes import NO_ANSWER, TRIAL_POLL_S

Member = Annotated[
    str,
    typer.Option("--member", parser=parse_name, metavar="NAME", help="Member that gets it."),
]
TrialTimeout = Annotated[
    float,
    typer.Option(
        parser=parse_duration, metavar="DURATION", help="Time to wait for the outcome, as 30s."
    ),
]


def try_(
    session: CommandSession,
    group: Group,
    letter: Letter,
    *,
    member: Member,
    timeout: TrialTimeout = "30s",  # type: ignore[assignment]  # parsed
    by: By,
) -> None:
    """Deliver one dead letter once, to one member, and show the outcome.

    If the member fails it, it is a dead letter again. Exit status 1: it was not
    processed.
    """
    place = {"group": group, **letter._asdict()}
    tried = session.client.call("dlq.try", **place, member=member, **by._asdict())
    until = time.monotonic() + timeout
    while (outcome := _outcome(session, place, tried["number"]))["outcome"] == NO_ANSWER:
        if time.monotonic() >= until:
            break
        time.sleep(TRIAL_POLL_S)
    session.out.show(outcome)
    if outcome["outcome"] != "processed":
        raise typer.Exit(FAILED)


def _outcome(session: CommandSession, place: dict[str, Any], number: int) -> dict[str, Any]:
    """Return what is known of the outcome of a trial."""
    found = session.client.call("dlq.tried", **place, number=number)
    return {name: value for name, value in found.items() if value}
