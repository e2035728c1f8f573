"""`txmq group`: consumer groups, where they are, and where they go on."""

from __future__ import annotations

import re
import time
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

import typer

from txmq.cli.command import Session, remote
from txmq.cli.commands.group_view import readable
from txmq.cli.options import Group, Operator, Reason, Topic, Yes, is_number, name_of, time_of
from txmq.cli.units import milliseconds
from txmq.errors import ConfigError, UnknownPartition
from txmq.model.retry import MAX_STEPS, RetryPolicy

app = typer.Typer(no_args_is_help=True, help="Consumer groups.")
CLASSES = "A class of errors, one of its bases, or MODULE.*; may be given again."
AGO = re.compile(r"\d+[a-z]+")
CHANGES = ("partition", "before", "after", "again", "skipped", "back")
COLUMNS = (
    "group",
    "mode",
    "state",
    "members",
    "topics",
    "lag",
    "lag_ms",
    "leased",
    "retrying",
    "fences",
    "letters",
)


class Exhausted(StrEnum):
    """What becomes of a message that failed for good, in an ordered group of its
    key.
    """

    PARK = "park"
    BLOCK = "block"
    SKIP = "skip"


class Target(NamedTuple):
    """Where to go on: `where` in all partitions, or at an offset in one of them."""

    where: str | int
    partition: int | None = None


def _target_of(text: str) -> Target:
    if text in ("first", "last"):
        return Target(text)
    partition, found, offset = text.partition("=")
    if not found:
        return Target(_ago(text) if AGO.fullmatch(text) else time_of(text))
    if not (is_number(partition) and is_number(offset)):
        raise typer.BadParameter(f"{text!r} is not of the form PARTITION=OFFSET")
    return Target(int(offset), int(partition))


def _ago(text: str) -> int:
    return time.time_ns() // 1_000 - milliseconds(text) * 1_000


To = Annotated[
    list[Target],
    typer.Option(
        parser=_target_of,
        metavar="first|last|TIME|AGO|PARTITION=OFFSET",
        help="Where to go on, in all partitions (AGO: 2h) or in one; then it may be given again.",
    ),
]
DryRun = Annotated[bool, typer.Option("--preview", "--dry-run", help="Only show what it would do.")]
OneTopic = Annotated[str | None, typer.Argument(metavar="[TOPIC]", help="One topic of it.")]
Reprocess = Annotated[
    bool, typer.Option("--reprocess", help="Let the inbox take again what it has seen.")
]


def _delays_of(text: str) -> list[int]:
    """Microseconds of "10,30,60"."""
    try:
        return list(RetryPolicy.table(*map(float, text.split(","))).delays)
    except (ValueError, ConfigError):
        raise typer.BadParameter(
            f"{text!r} is no table of delays: seconds like 10,30,60 are needed"
        ) from None


def _growing_of(text: str) -> list[int]:
    """Microseconds of the delays from FIRST to LONGEST, each FACTOR times the one
    before.
    """
    try:
        first, factor, longest = map(float, text.split(","))
        policy = RetryPolicy.exponential(
            initial_s=first, factor=factor, max_s=longest, attempts=MAX_STEPS
        )
    except (ValueError, ConfigError):
        raise typer.BadParameter(f"{text!r} is not FIRST,FACTOR,LONGEST like 5,2,7200") from None
    return list(policy.delays)


Table = Annotated[
    Any, typer.Option(parser=_delays_of, metavar="S,S,...", help="Delays of retries, in seconds.")
]
Exponential = Annotated[
    Any,
    typer.Option(
        parser=_growing_of, metavar="FIRST,FACTOR,LONGEST", help="Delays that grow, in seconds."
    ),
]


@remote(app, "list")
def list_(session: Session) -> None:
    """List all groups."""
    session.show("group.list", columns=COLUMNS)


@remote(app, "show")
def show(session: Session, group: Group) -> None:
    """Show a group: members, positions, lag, fenced keys."""
    reply = session.client.call("group.show", group=group)
    session.out.show(reply if session.out.as_json else readable(reply))


@remote(app, "pause")
def pause(
    session: Session,
    group: Group,
    topic: OneTopic = None,
    *,
    operator: Operator,
    reason: Reason = "",
) -> None:
    """Stop deliveries to a group, of one topic or all; what its members have already,
    they may finish.
    """
    session.show("group.pause", group=group, topic=topic, operator=operator, reason=reason)


@remote(app, "resume")
def resume(
    session: Session,
    group: Group,
    topic: OneTopic = None,
    *,
    operator: Operator,
    reason: Reason = "",
) -> None:
    """Deliver to a paused group again, or a paused topic of it."""
    session.show("group.resume", group=group, topic=topic, operator=operator, reason=reason)


@remote(app, "alter")
def alter(  # its options
    session: Session,
    group: Group,
    *,
    table: Table = None,
    exponential: Exponential = None,
    attempts: Annotated[
        int | None, typer.Option(min=0, help="Retries before a message is a dead letter.")
    ] = None,
    jitter: Annotated[
        float | None, typer.Option(min=0, max=1, help="Fraction by which delays are spread.")
    ] = None,
    dead: Annotated[
        list[str] | None, typer.Option(metavar="CLASS", help=f"Not to be retried. {CLASSES}")
    ] = None,
    postpone: Annotated[
        list[str] | None, typer.Option(metavar="CLASS", help=f"Not to be counted. {CLASSES}")
    ] = None,
    on_exhausted: Annotated[
        Exhausted | None, typer.Option(help="What becomes of it after the last retry.")
    ] = None,
    lease: Annotated[
        float | None, typer.Option(min=1, help="Seconds that a delivery may take unextended.")
    ] = None,
    session_s: Annotated[
        float | None, typer.Option("--session", min=1, help="Seconds a member may be silent.")
    ] = None,
    consume_timeout: Annotated[
        float | None, typer.Option(min=1, help="Seconds a handler may hold a message.")
    ] = None,
    max_parked: Annotated[
        int | None, typer.Option(min=0, help="Messages that may wait behind a failed key.")
    ] = None,
    span: Annotated[
        int | None, typer.Option(min=0, help="Messages delivered ahead of one not done with.")
    ] = None,
    flood_keys: Annotated[
        int | None, typer.Option(min=0, help="Keys that fail alike before it is guarded.")
    ] = None,
    operator: Operator,
    reason: Reason = "",
) -> None:
    """Change a group's settings. From then on members that ask for others get these."""
    named = {"attempts": attempts, "jitter": jitter, "dead": dead, "postpone": postpone}
    changes = {field: value for field, value in named.items() if value is not None}
    if delays := exponential or table:
        changes = {"delays": delays, "attempts": None} | changes
    retry = None
    if changes:
        retry = session.client.call("group.show", group=group)["settings"]["retry"] | changes
    policy = None if on_exhausted is None else on_exhausted.value
    session.show(
        "group.alter", group=group, on_exhausted=policy, retry=retry, lease_ms=_ms(lease),
        session_ms=_ms(session_s), consume_timeout_ms=_ms(consume_timeout), max_parked=max_parked,
        flood_keys=flood_keys, span=span, operator=operator, reason=reason,
    )  # fmt: skip


def _ms(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1_000)


@remote(app, "reset")
def reset(  # its options
    session: Session,
    group: Group,
    topic: Topic,
    *,
    to: To,
    reprocess: Reprocess = False,
    dry_run: DryRun = False,
    operator: Operator,
    reason: Reason = "",
    yes: Yes = False,
) -> None:
    """Let a group go on from other offsets of a topic. What had failed at or above them
    is back in its place.
    """
    args = {"group": group, "topic": topic, "to": _wire(to), "reprocess": reprocess}
    args |= {"operator": operator, "reason": reason}
    if dry_run or not (yes or session.out.as_json):
        session.out.show(_changes(session.client.call("group.reset", **args, dry_run=True)))
    if not dry_run:
        session.out.confirm(f"Let group {group} go on from there?", yes=yes)
        session.out.show(_changes(session.client.call("group.reset", **args)))


def _wire(targets: list[Target]) -> str | int | dict[str, str | int]:
    """The targets as the call takes them."""
    if len(targets) == 1 and targets[0].partition is None:
        return targets[0].where
    if any(target.partition is None for target in targets):
        raise typer.BadParameter("several --to must all be of the form PARTITION=OFFSET")
    return {str(target.partition): target.where for target in targets}


def _changes(reply: dict[str, Any]) -> dict[str, Any]:
    rows = [dict(zip(CHANGES, row, strict=False)) for row in reply["positions"]]
    return reply | {"positions": rows}


@remote(app, "skip")
def skip(  # its options
    session: Session,
    group: Group,
    *,
    topic: Annotated[
        str | None, typer.Option(parser=name_of, metavar="TOPIC", help="Of one topic only.")
    ] = None,
    partition: Annotated[
        int | None, typer.Option(min=0, help="Of one partition of the topic only.")
    ] = None,
    dry_run: DryRun = False,
    operator: Operator,
    reason: Reason = "",
    yes: Yes = False,
) -> None:
    """Skip the backlog of a group: it goes on with what comes from now on. Retries and
    dead letters stay.
    """
    if partition is not None and topic is None:
        raise typer.BadParameter(
            "a partition is one of a topic: --topic TOPIC", param_hint="--partition"
        )
    named = {"group": group, "operator": operator, "reason": reason}
    moves = [named | move for move in _ends(session, group, topic, partition)]
    if dry_run or not (yes or session.out.as_json):
        for move in moves:
            session.out.show(
                _changes(session.client.call("group.reset", **move, dry_run=True)) | _topic(move)
            )
    if not dry_run:
        session.out.confirm(f"Let group {group} skip all that?", yes=yes)
        for move in moves:
            session.out.show(_changes(session.client.call("group.reset", **move)) | _topic(move))


def _topic(move: dict[str, Any]) -> dict[str, Any]:
    return {"topic": move["topic"]}


def _ends(
    session: Session, group: str, topic: str | None, partition: int | None
) -> list[dict[str, Any]]:
    """Resets to the ends."""
    if partition is None and topic is not None:
        return [{"topic": topic, "to": "last"}]
    shown = session.client.call("group.show", group=group)
    if partition is None:
        return [{"topic": name, "to": "last"} for name in shown["topics"]]
    for place in shown["positions"]:
        if (place["topic"], place["partition"]) == (topic, partition):
            return [{"topic": topic, "to": {str(partition): place["end"]}}]
    raise UnknownPartition(
        f"group {group} does not read {topic}/{partition}", hint=f"see: txmq group show {group}"
    )


@remote(app, "clone")
def clone(
    session: Session,
    group: Group,
    to: Annotated[
        str, typer.Argument(metavar="NEW", parser=name_of, help="Name of the new group.")
    ],
    *,
    operator: Operator,
    reason: Reason = "",
) -> None:
    """Make a group that goes on where this one stands; dead letters stay here."""
    session.show("group.clone", group=group, to=to, operator=operator, reason=reason)


@remote(app, "delete")
def delete(
    session: Session, group: Group, *, operator: Operator, reason: Reason = "", yes: Yes = False
) -> None:
    """Forget a group without members: its positions, retries and dead letters."""
    session.out.confirm(f"Forget group {group}, its retries and dead letters?", yes=yes)
    session.show("group.delete", group=group, operator=operator, reason=reason)
