"""`txmq group`: consumer groups, their positions and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

import typer

from txmq.cli.command import CommandSession, broker_command
from txmq.cli.options import Group, Operator, Reason, Topic, Yes
from txmq.cli.parsers import is_number, parse_limit, parse_moment, parse_name
from txmq.errors import ConfigError, UnknownPartition
from txmq.model.retry import MAX_STEPS, RetryPolicy
from txmq.model.units import SECOND

GROUP_LIMITS = ("messages_per_s", "cold_bytes_per_s")

app = typer.Typer(
    no_args_is_help=True, help="List, pause, reset, clone and delete consumer groups."
)
CLASSES_HELP = "A class of errors, one of its base classes, or MODULE.*; can be repeated."
RESET_COLUMNS = ("partition", "before", "after", "again", "skipped", "back")
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
    "at_consumers",
    "fences",
    "letters",
)
LISTS = ("settings", "member_list", "positions", "store_list", "fence_list")
STORE_COLUMNS = ("store", "state", "member", "messages")
WINDOW_COLUMNS = ("window", "unprocessed_share", "processed_share", "head")
POSITION_COLUMNS = ("partition", "floor", "end", "lag", "owners")
# columns that are shown where any row has a value above 0
OPTIONAL_COLUMNS = (
    "lag_ms",
    "leased",
    "redeliver",
    "reserved",
    "retrying",
    "at_consumers",
    "passed",
)


class ExhaustedPolicy(StrEnum):
    """Policy for a message that failed for good in an ordered group."""

    PARK = "park"
    BLOCK = "block"
    SKIP = "skip"


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
        help="New offset. PARTITION=OFFSET sets one partition and can be repeated; AGO: 2h.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--preview", "--dry-run", help="Show the effect, and change nothing.")
]
OneTopic = Annotated[str | None, typer.Argument(metavar="[TOPIC]", help="Only this topic.")]
Reprocess = Annotated[
    bool,
    typer.Option(
        "--reprocess", help="Let inboxes apply messages again that they have applied before."
    ),
]


def _parse_delays(text: str) -> list[int]:
    """Parse "10,30,60" into microseconds."""
    try:
        return list(RetryPolicy.table(*map(float, text.split(","))).delays)
    except (ValueError, ConfigError):
        raise typer.BadParameter(f"invalid delays {text!r}: use seconds, as in 10,30,60") from None


def _parse_growing_delays(text: str) -> list[int]:
    """Parse "FIRST,FACTOR,LONGEST" into delays in microseconds, each FACTOR times the
    one before.
    """
    try:
        first, factor, longest = map(float, text.split(","))
        policy = RetryPolicy.exponential(
            initial_s=first, factor=factor, max_s=longest, attempts=MAX_STEPS
        )
    except (ValueError, ConfigError):
        raise typer.BadParameter(
            f"invalid delays {text!r}: use FIRST,FACTOR,LONGEST, as in 5,2,7200"
        ) from None
    return list(policy.delays)


Table = Annotated[
    Any,
    typer.Option(parser=_parse_delays, metavar="S,S,...", help="Delays of retries, in seconds."),
]
Exponential = Annotated[
    Any,
    typer.Option(
        parser=_parse_growing_delays,
        metavar="FIRST,FACTOR,LONGEST",
        help="Growing delays of retries, in seconds.",
    ),
]


@broker_command(app, "list")
def list_(session: CommandSession) -> None:
    """List all consumer groups."""
    session.show_list("group.list", "groups", columns=COLUMNS)


@broker_command(app, "show")
def show(session: CommandSession, group: Group) -> None:
    """Show a consumer group: members, positions, lag, fenced keys."""
    reply = session.client.call("group.show", group=group)
    session.out.show(reply if session.out.as_json else readable_group(reply))


@broker_command(app, "pause")
def pause(
    session: CommandSession,
    group: Group,
    topic: OneTopic = None,
    *,
    operator: Operator,
    reason: Reason = "",
) -> None:
    """Stop deliveries to a consumer group, of one topic or all. Members may finish the
    messages that they have.
    """
    session.show("group.pause", group=group, topic=topic, operator=operator, reason=reason)


@broker_command(app, "resume")
def resume(
    session: CommandSession,
    group: Group,
    topic: OneTopic = None,
    *,
    operator: Operator,
    reason: Reason = "",
) -> None:
    """Resume deliveries to a paused consumer group, of one topic or all."""
    session.show("group.resume", group=group, topic=topic, operator=operator, reason=reason)


@broker_command(app, "alter")
def alter(  # noqa: PLR0913  # its options
    session: CommandSession,
    group: Group,
    *,
    table: Table = None,
    exponential: Exponential = None,
    attempts: Annotated[
        int | None,
        typer.Option(min=0, help="Number of retries before a message becomes a dead letter."),
    ] = None,
    jitter: Annotated[
        float | None, typer.Option(min=0, max=1, help="Fraction by which delays vary at random.")
    ] = None,
    dead: Annotated[
        list[str] | None,
        typer.Option(metavar="CLASS", help=f"Errors that are not retried. {CLASSES_HELP}"),
    ] = None,
    postpone: Annotated[
        list[str] | None,
        typer.Option(metavar="CLASS", help=f"Errors that do not count as attempts. {CLASSES_HELP}"),
    ] = None,
    on_exhausted: Annotated[
        ExhaustedPolicy | None, typer.Option(help="Policy after the last retry.")
    ] = None,
    lease: Annotated[
        float | None, typer.Option(min=1, help="Lease of a delivery, in seconds.")
    ] = None,
    session_s: Annotated[
        float | None,
        typer.Option("--session", min=1, help="Session timeout of members, in seconds."),
    ] = None,
    consume_timeout: Annotated[
        float | None,
        typer.Option(min=1, help="Time that a handler may hold one message, in seconds."),
    ] = None,
    max_parked: Annotated[
        int | None,
        typer.Option(min=0, help="Maximum number of messages parked behind a failed key."),
    ] = None,
    span: Annotated[
        int | None,
        typer.Option(
            min=0, help="Maximum number of messages delivered beyond the first unsettled one."
        ),
    ] = None,
    flood_keys: Annotated[
        int | None,
        typer.Option(min=0, help="Number of keys with the same error that guards the group."),
    ] = None,
    keep_until_exported: Annotated[
        bool | None,
        typer.Option(
            "--keep-until-exported/--expire-unexported",
            help="Delete no dead letter before `dlq export --mark`, whatever its age.",
        ),
    ] = None,
    limits: Annotated[
        list[str] | None,
        typer.Option(
            "--limit",
            metavar="NAME=VALUE",
            help="Limit of all members together; can be repeated: messages_per_s=100, "
            "cold_bytes_per_s=20MiB (of messages far behind the end of the log). 0: no limit.",
        ),
    ] = None,
    operator: Operator,
    reason: Reason = "",
) -> None:
    """Change settings of a consumer group. They override the settings that members ask
    for.
    """
    given = {"attempts": attempts, "jitter": jitter, "dead": dead, "postpone": postpone}
    changes = {field: value for field, value in given.items() if value is not None}
    if delays := exponential or table:
        changes = {"delays": delays, "attempts": None} | changes
    retry = None
    if changes:
        retry = session.client.call("group.show", group=group)["settings"]["retry"] | changes
    policy = None if on_exhausted is None else on_exhausted.value
    keep: dict[str, Any] = (
        {} if keep_until_exported is None else {"keep_until_exported": keep_until_exported}
    )
    keep |= dict(parse_limit(text, GROUP_LIMITS) for text in limits or ())
    altered = session.client.call(
        "group.alter", group=group, on_exhausted=policy, retry=retry, max_parked=max_parked,
        lease_ms=_to_milliseconds(lease), session_ms=_to_milliseconds(session_s),
        consume_timeout_ms=_to_milliseconds(consume_timeout), flood_keys=flood_keys, span=span,
        **keep, operator=operator, reason=reason,
    )  # fmt: skip
    session.out.show(altered if session.out.as_json else readable_group(altered))


def _to_milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1_000)


@broker_command(app, "reset")
def reset(  # noqa: PLR0913  # its options
    session: CommandSession,
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
    """Move a consumer group to other offsets of a topic. Failed messages at or above
    them return to their place.
    """
    args = {"group": group, "topic": topic, "to": _wire_targets(to), "reprocess": reprocess}
    args |= {"operator": operator, "reason": reason}
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


@broker_command(app, "skip")
def skip(  # its options
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
    operator: Operator,
    reason: Reason = "",
    yes: Yes = False,
) -> None:
    """Skip the backlog of a consumer group. Retries and dead letters stay."""
    if partition is not None and topic is None:
        raise typer.BadParameter(
            "the topic of the partition is missing: add --topic TOPIC", param_hint="--partition"
        )
    named = {"group": group, "operator": operator, "reason": reason}
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


@broker_command(app, "clone")
def clone(
    session: CommandSession,
    group: Group,
    to: Annotated[
        str, typer.Argument(metavar="NEW", parser=parse_name, help="Name of the new group.")
    ],
    *,
    operator: Operator,
    reason: Reason = "",
) -> None:
    """Create a consumer group at the positions of an existing one. Dead letters are not
    copied.
    """
    session.show("group.clone", group=group, to=to, operator=operator, reason=reason)


@broker_command(app, "delete")
def delete(
    session: CommandSession,
    group: Group,
    *,
    operator: Operator,
    reason: Reason = "",
    yes: Yes = False,
) -> None:
    """Delete a consumer group without members: its positions, retries and dead
    letters.
    """
    session.out.confirm(f"Delete group {group}, its retries and dead letters?", yes=yes)
    session.show("group.delete", group=group, operator=operator, reason=reason)


def readable_group(reply: Mapping[str, Any]) -> dict[str, Any]:
    """Return a reply of `group.show` for terminals: narrow tables of what is unusual.

    Partitions that do not move have a table of their own, with the reason. `--json`
    prints the whole reply.
    """
    single = {name: value for name, value in reply.items() if name not in LISTS}
    if "paused_topics" in single:
        single["paused_topics"] = " ".join(single["paused_topics"])
    positions = reply.get("positions", ())
    tables = {
        "settings": _settings_rows(reply.get("settings", {})),
        "member_list": [_move_last(row, "assignment") for row in reply.get("member_list", ())],
        "positions": _position_rows(positions),
        "not_moving": [
            {"partition": _partition_text(row), "reason": row["reason"], "why": row["why"]}
            for row in positions
            if row["reason"]
        ],
        "windows": [
            {"partition": _partition_text(row)} | {name: row[name] for name in WINDOW_COLUMNS}
            for row in positions
            if row.get("window")
        ],
        "store_list": [
            {name: row[name] for name in STORE_COLUMNS} for row in reply.get("store_list", ())
        ],
        "fence_list": [
            {"partition": _partition_text(row)} | _fence_fields(row)
            for row in reply.get("fence_list", ())
        ],
    }
    return single | {name: rows for name, rows in tables.items() if rows}


def _fence_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a fence with its key, or with the hash where the key is not known."""
    key = row.get("key")
    named = {"key_hash": row["key_hash"]} if key is None else {"key": key}
    return named | _without(row, "topic", "partition", "key", "key_hash")


def _position_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    names = [
        *POSITION_COLUMNS[:-1],
        *(name for name in OPTIONAL_COLUMNS if any(row.get(name) for row in rows)),
        POSITION_COLUMNS[-1],
    ]
    named = [{**row, "partition": _partition_text(row)} for row in rows]
    return [{name: row.get(name) for name in names} for row in named]


def _partition_text(row: Mapping[str, Any]) -> str:
    return f"{row['topic']}/{row['partition']}"


def _settings_rows(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the settings, one per row, with times in seconds."""
    table: dict[str, Any] = {}
    for name, value in settings.items():
        if name == "retry":
            table["retry_delays_s"] = [delay / SECOND for delay in value["delays"]]
            table |= {f"retry_{field}": item for field, item in value.items() if field != "delays"}
        elif name.endswith("_us"):
            table[f"{name.removesuffix('_us')}_s"] = value / SECOND
        else:
            table[name] = value
    return [{"setting": name, "value": value} for name, value in table.items()]


def _move_last(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    return _without(row, name) | ({name: row[name]} if name in row else {})


def _without(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}
