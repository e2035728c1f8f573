"""`txmq group reset` and `skip`: other positions of a consumer group."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import typer

from txmq.cli.command import CommandSession
from txmq.cli.options import By, Group, Topic, Yes
from txmq.cli.parsers import is_number, parse_moment, parse_name
from txmq.errors import UnknownPartition

RESET_COLUMNS = ("partition", "before", "after", "again", "skipped", "back")


class ResetTarget(NamedTuple):
    """Target of a reset, in one partition or in all of them."""

    offset: str | int
    partition: int | None = None


def _parse_target(text: str) -> ResetTarget:
    if text in ("first", "last"):
        return ResetTarget(text)
    partition, separator, offset = text.partition("=")
    if not separator:
        return ResetTarget(parse_moment(text))
    if not (is_number(partition) and is_number(offset)):
        raise typer.BadParameter(f"invalid target {text!r}: use PARTITION=OFFSET")
    return ResetTarget(int(offset), int(partition))


To = Annotated[
    list[ResetTarget],
    typer.Option(
        parser=_parse_target,
        metavar="first|last|TIME|AGO|PARTITION=OFFSET",
        help="New offset, or the first one of a time, or of so long AGO, as 2h. "
        "PARTITION=OFFSET sets one partition, and can be repeated.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--preview", "--dry-run", help="Show the effect, and change nothing.")
]
Reprocess = Annotated[
    bool,
    typer.Option(
        "--reprocess", help="Let inboxes apply messages again that they have applied before."
    ),
]


def reset(  # its options
    session: CommandSession,
    group: Group,
    topic: Topic,
    *,
    to: To,
    reprocess: Reprocess = False,
    dry_run: DryRun = False,
    by: By,
    yes: Yes = False,
) -> None:
    """Move a consumer group to other offsets of a topic. Failed messages at or above
    them return to their place.
    """
    args = {"group": group, "topic": topic, "to": _wire_targets(to), "reprocess": reprocess}
    args |= by._asdict()
    if dry_run or not (yes or session.out.as_json):
        session.out.show(_reset_rows(session.client.call("group.reset", **args, dry_run=True)))
    if not dry_run:
        session.out.confirm(f"Move group {group} to these offsets?", yes=yes)
        session.out.show(_reset_rows(session.client.call("group.reset", **args)))


def _wire_targets(targets: list[ResetTarget]) -> str | int | dict[str, str | int]:
    """Return the targets as the call expects them."""
    if len(targets) == 1 and targets[0].partition is None:
        return targets[0].offset
    if any(target.partition is None for target in targets):
        raise typer.BadParameter("invalid targets: several --to must all be PARTITION=OFFSET")
    return {str(target.partition): target.offset for target in targets}


def _reset_rows(reply: dict[str, Any]) -> dict[str, Any]:
    rows = [dict(zip(RESET_COLUMNS, row, strict=False)) for row in reply["positions"]]
    return reply | {"positions": rows}


def skip(
    session: CommandSession,
    group: Group,
    *,
    topic: Annotated[
        str | None, typer.Option(parser=parse_name, metavar="TOPIC", help="Only this topic.")
    ] = None,
    partition: Annotated[
        int | None, typer.Option(min=0, help="Only this partition of the topic.")
    ] = None,
    dry_run: DryRun = False,
    by: By,
    yes: Yes = False,
) -> None:
    """Skip the backlog of a consumer group. Retries and dead letters stay."""
    if partition is not None and topic is None:
        raise typer.BadParameter(
            "the topic of the partition is missing: add --topic TOPIC", param_hint="--partition"
        )
    named = {"group": group, **by._asdict()}
    moves = [named | move for move in _end_resets(session, group, topic, partition)]
    if dry_run or not (yes or session.out.as_json):
        for move in moves:
            session.out.show(
                _reset_rows(session.client.call("group.reset", **move, dry_run=True)) | _topic(move)
            )
    if not dry_run:
        session.out.confirm(f"Skip these messages in group {group}?", yes=yes)
        for move in moves:
            session.out.show(_reset_rows(session.client.call("group.reset", **move)) | _topic(move))


def _topic(move: dict[str, Any]) -> dict[str, Any]:
    return {"topic": move["topic"]}


def _end_resets(
    session: CommandSession, group: str, topic: str | None, partition: int | None
) -> list[dict[str, Any]]:
    """Return the resets to the ends of partitions."""
    if partition is None and topic is not None:
        return [{"topic": topic, "to": "last"}]
    shown = session.client.call("group.show", group=group)
    if partition is None:
        return [{"topic": name, "to": "last"} for name in shown["topics"]]
    for position in shown["positions"]:
        if (position["topic"], position["partition"]) == (topic, partition):
            return [{"topic": topic, "to": {str(partition): position["end"]}}]
    raise UnknownPartition(
        f"group {group} does not read {topic}/{partition}",
        hint=f"list its partitions with: txmq group show {group}",
    )
