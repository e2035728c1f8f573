"""`txmq group`: consumer groups, where they are, and where they go on."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import typer

from txmq.cli.command import Session, remote
from txmq.cli.options import Group, Operator, Reason, Topic, Yes, is_number, time_of

app = typer.Typer(no_args_is_help=True, help="Consumer groups.")
COLUMNS = ("group", "mode", "state", "members", "topics", "lag", "leased", "retrying", "fences", "letters")


class Target(NamedTuple):
    """Where to go on: `where` in all partitions, or at an offset in one of them."""

    where: str | int
    partition: int | None = None


def _target_of(text: str) -> Target:
    if text in ("first", "last"):
        return Target(text)
    partition, found, offset = text.partition("=")
    if not found:
        return Target(time_of(text))
    if not (is_number(partition) and is_number(offset)):
        raise typer.BadParameter(f"{text!r} is not of the form PARTITION=OFFSET")
    return Target(int(offset), int(partition))


To = Annotated[
    list[Target],
    typer.Option(
        parser=_target_of,
        metavar="first|last|TIME|PARTITION=OFFSET",
        help="Where to go on, in all partitions or in one; then it may be given again.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what it would do.")]
Reprocess = Annotated[bool, typer.Option("--reprocess", help="Let the inbox take again what it has seen.")]


@remote(app, "list")
def list_(session: Session) -> None:
    """List all groups."""
    session.show("group.list", columns=COLUMNS)


@remote(app, "show")
def show(session: Session, group: Group) -> None:
    """Show a group: members, positions, lag, fenced keys."""
    session.show("group.show", group=group)


@remote(app, "pause")
def pause(session: Session, group: Group, *, operator: Operator) -> None:
    """Stop deliveries to a group; what its members have already, they may finish."""
    session.show("group.pause", group=group, operator=operator)


@remote(app, "resume")
def resume(session: Session, group: Group, *, operator: Operator) -> None:
    """Deliver to a paused group again."""
    session.show("group.resume", group=group, operator=operator)


@remote(app, "reset")
def reset(  # noqa: PLR0913  # its options
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
    """Let a group go on from other offsets of a topic. What had failed at or above them is back in its place."""
    args = {"group": group, "topic": topic, "to": _wire(to), "reprocess": reprocess}
    args |= {"operator": operator, "reason": reason}
    if dry_run or not (yes or session.out.as_json):
        session.out.show(_changes(session.client.call("group.reset", **args, dry_run=True)))
    if not dry_run:
        session.confirm(f"Let group {group} go on from there?", yes=yes)
        session.out.show(_changes(session.client.call("group.reset", **args)))


def _wire(targets: list[Target]) -> str | int | dict[str, str | int]:
    """The targets as the call takes them."""
    if len(targets) == 1 and targets[0].partition is None:
        return targets[0].where
    if any(target.partition is None for target in targets):
        raise typer.BadParameter("several --to must all be of the form PARTITION=OFFSET")
    return {str(target.partition): target.where for target in targets}


def _changes(reply: dict[str, Any]) -> dict[str, Any]:
    rows = [dict(zip(("partition", "before", "after"), row, strict=True)) for row in reply["positions"]]
    return reply | {"positions": rows}
