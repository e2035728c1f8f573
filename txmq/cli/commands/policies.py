"""`txmq policy`: replays of dead letters that the broker begins by itself."""

from __future__ import annotations

from typing import Annotated

import typer

from txmq.cli.command import CommandSession, broker_command
from txmq.cli.letter_selection import Selected
from txmq.cli.options import By, Group
from txmq.cli.parsers import parse_duration
from txmq.cli.plan_options import Canary, InFlight, Most, Rate, StopAfter, StopShare
from txmq.model.letter_filter import format_filter

app = typer.Typer(
    name="policy",
    no_args_is_help=True,
    help="Have the broker replay dead letters after a time, or when a new version joins.",
)
COLUMNS = (
    "group", "after_s", "on_version", "select", "max_replays", "fired_at", "plan", "by", "waits_for"
)  # fmt: skip


@broker_command(app, "set", example="txmq policy set billing --after 1h --where error:TimeoutError")
def set_(  # noqa: PLR0913  # its options
    session: CommandSession,
    group: Group,
    *,
    after: Annotated[
        float | None,
        typer.Option(
            parser=parse_duration,
            metavar="DURATION",
            help="Replay letters that have been dead so long, as 1h.",
        ),
    ] = None,
    on_version: Annotated[
        bool,
        typer.Option("--on-version", help="Replay when a member joins with a new version."),
    ] = False,
    max_replays: Annotated[
        int, typer.Option(min=1, max=1_000, help="Maximum number of replays of a letter.")
    ] = 1,
    selected: Selected,
    rate: Rate = 10.0,
    most: Most = 10_000,
    canary: Canary = 5,
    stop_share: StopShare = 0.5,
    stop_after: StopAfter = 20,
    in_flight: InFlight = 1_000,
    by: By,
) -> None:
    """Set the replay policy of a group. Its plans are those of `txmq plan`."""
    if after is None and not on_version:
        raise typer.BadParameter("say when: use --after DURATION, --on-version, or both")
    settings = {
        "rate": rate, "canary": canary, "stop_share": stop_share, "stop_after": stop_after,
        "in_flight": in_flight, "most": most,
    }  # fmt: skip
    session.show(
        "policy.set", group=group, after_s=after, on_version=on_version, max_replays=max_replays,
        settings=settings, **by._asdict(), **selected.args(group),
    )  # fmt: skip


@broker_command(app, "list", example="txmq policy list")
def list_(session: CommandSession) -> None:
    """List the replay policies, with the last plan of each."""
    found = session.read_pages("policy.list", "policies")
    if not session.out.as_json:
        for policy in found["policies"]:
            policy["select"] = format_filter(policy["select"])
    session.out.show(found, columns=COLUMNS)


@broker_command(app, "delete", example="txmq policy delete billing")
def delete(session: CommandSession, group: Group, *, by: By) -> None:
    """Remove the replay policy of a group. Its plans go on."""
    session.show("policy.set", group=group, **by._asdict())
