"""`txmq group alter`: settings of a consumer group that override those of members."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from txmq.cli.command import CommandSession
from txmq.cli.group_view import readable_group
from txmq.cli.options import By, Group
from txmq.cli.parsers import parse_duration, parse_named_limit
from txmq.errors import ConfigError
from txmq.model.retry import MAX_STEPS, RetryPolicy

LIMITS = ("messages_per_s", "cold_bytes_per_s")
CLASSES_HELP = "A class of errors, one of its base classes, or MODULE.*; can be repeated."


class Severity(StrEnum):
    """Severity of alarms about a group."""

    DEFAULT = "default"
    CRITICAL = "critical"
    WARNING = "warning"
    OFF = "off"


class ExhaustedPolicy(StrEnum):
    """Fate of a message after its last retry.

    With PARK and SKIP it is a dead letter; in an ordered group PARK keeps later
    messages of its key waiting. With BLOCK its retries never end.
    """

    PARK = "park"
    BLOCK = "block"
    SKIP = "skip"


def _parse_delays(text: str) -> list[int]:
    """Parse "10,30,60" into microseconds."""
    try:
        return list(RetryPolicy(map(float, text.split(","))).delays_us)
    except (ValueError, ConfigError):
        raise typer.BadParameter(f"invalid delays {text!r}: use seconds, as in 10,30,60") from None


def _parse_growing_delays(text: str) -> list[int]:
    """Parse "FIRST,FACTOR,LONGEST" into delays in microseconds, each FACTOR times the
    one before.
    """
    try:
        first, factor, longest = map(float, text.split(","))
        policy = RetryPolicy.exponential(
            initial=first, factor=factor, longest=longest, retries=MAX_STEPS
        )
    except (ValueError, ConfigError):
        raise typer.BadParameter(
            f"invalid delays {text!r}: use FIRST,FACTOR,LONGEST, as in 5,2,7200"
        ) from None
    return list(policy.delays_us)


Table = Annotated[
    Any,
    typer.Option(
        parser=_parse_delays,
        metavar="S,S,...",
        help="Delay of each retry in seconds, as 10,30,60; the last one repeats with --retries.",
    ),
]
Exponential = Annotated[
    Any,
    typer.Option(
        parser=_parse_growing_delays,
        metavar="FIRST,FACTOR,LONGEST",
        help="Delays of retries that grow, in seconds, as 5,2,7200: 5, 10, 20, ... 7200.",
    ),
]


def alter(  # noqa: PLR0913  # its options
    session: CommandSession,
    group: Group,
    *,
    table: Table = None,
    exponential: Exponential = None,
    retries: Annotated[
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
        ExhaustedPolicy | None,
        typer.Option(
            help="After the last retry. park: a dead letter, behind which its key waits; "
            "skip: a dead letter, and its key goes on; block: no end of retries."
        ),
    ] = None,
    lease: Annotated[
        float | None,
        typer.Option(
            parser=parse_duration,
            metavar="DURATION",
            help="Time for which a delivered message is its member's alone, as 60s; 1s to 12h.",
        ),
    ] = None,
    session_s: Annotated[
        float | None,
        typer.Option(
            "--session",
            parser=parse_duration,
            metavar="DURATION",
            help="Time after which a silent member is lost, as 30s; 1s to 1h.",
        ),
    ] = None,
    consume_timeout: Annotated[
        float | None,
        typer.Option(
            parser=parse_duration,
            metavar="DURATION",
            help="Time for which a handler may hold one message, as 15m; at most 7d.",
        ),
    ] = None,
    max_parked: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Maximum number of messages parked behind one key; then its partition stops.",
        ),
    ] = None,
    span: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Maximum number of messages delivered beyond the first unprocessed one; 0 = any.",
        ),
    ] = None,
    flood_keys: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Number of keys that fail alike until the circuit breaker opens; 0 = never.",
        ),
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
            "cold_bytes_per_s=20MiB (of messages far behind the end of the log); 0 = no limit.",
        ),
    ] = None,
    alarm_severity: Annotated[
        Severity | None,
        typer.Option(
            help="Of alarms about its dead letters, standing keys and local stores; off: none."
        ),
    ] = None,
    by: By,
) -> None:
    """Change settings of a consumer group. They override those that members ask for;
    what is not given stays.
    """
    if table and exponential:
        raise typer.BadParameter("use either --table or --exponential")
    given = {"retries": retries, "jitter": jitter, "dead": dead, "postpone": postpone}
    changes = {field: value for field, value in given.items() if value is not None}
    if delays := exponential or table:
        changes = {"delays_us": delays, "retries": None} | changes
    retry = None
    if changes:
        retry = session.client.call("group.show", group=group)["settings"]["retry"] | changes
    policy = None if on_exhausted is None else on_exhausted.value
    later: dict[str, Any] = dict(parse_named_limit(text, LIMITS) for text in limits or ())
    if keep_until_exported is not None:
        later["keep_until_exported"] = keep_until_exported
    if alarm_severity is not None:
        later["alarm_severity"] = alarm_severity.value
    times, counts = (lease, session_s, consume_timeout), (max_parked, span, flood_keys)
    if not later and all(value is None for value in (policy, retry, *times, *counts)):
        raise typer.BadParameter("name a setting to change: see txmq group alter --help")
    altered = session.client.call(
        "group.alter", group=group, on_exhausted=policy, retry=retry, max_parked=max_parked,
        lease_ms=_to_milliseconds(lease), session_ms=_to_milliseconds(session_s),
        consume_timeout_ms=_to_milliseconds(consume_timeout), flood_keys=flood_keys, span=span,
        **later, **by._asdict(),
    )  # fmt: skip
    session.out.show(altered if session.out.as_json else readable_group(altered))


def _to_milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1_000)
