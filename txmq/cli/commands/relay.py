"""`txmq relay`: send messages from the log of PostgreSQL to the broker."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from txmq.cli.command import local_command
from txmq.cli.database import Dsn, open_database
from txmq.cli.options import Yes
from txmq.cli.output import FAILED, Output
from txmq.cli.parsers import parse_duration
from txmq.cli.stop import stop_on_signals
from txmq.errors import ConfigError
from txmq.model.units import MIB

if TYPE_CHECKING:
    from txmq.config.broker import RelaySettings
    from txmq.relay.slot import SlotStatus

app = typer.Typer(
    name="relay",
    no_args_is_help=True,
    help="Run the relay from the log of PostgreSQL to the broker, and manage its slot.",
)
DEFAULT_SLOT = "txmq_relay"
Config = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Settings as TOML, section relay; command-line options override them.",
    ),
]
Database = Annotated[
    str | None,
    typer.Option(
        "--dsn", envvar="TXMQ_DSN", metavar="DSN", help="Connection string or URI of the database."
    ),
]
Broker = Annotated[
    str | None,
    typer.Option(
        "--broker",
        envvar="TXMQ_BROKER",
        metavar="URL",
        help="URL of the broker.",
    ),
]
Skip = Annotated[
    list[int] | None,
    typer.Option(
        metavar="LSN",
        help="Skip this transaction for good; can be repeated. Log event `relay.refused` names it.",
    ),
]
Slot = Annotated[str, typer.Option("--slot", metavar="NAME", help="Name of the replication slot.")]
SlotOrNone = Annotated[
    str | None, typer.Option("--slot", metavar="NAME", help="Name of the replication slot.")
]
Replaces = Annotated[
    list[str] | None,
    typer.Option(
        "--replaces",
        metavar="NAME",
        help="An earlier slot that is gone: the relay reports what was missed since.",
    ),
]
Retained = Annotated[
    int,
    typer.Option(min=1, metavar="MIB", help="Raise an alarm if the slot keeps more log."),
]
Lag = Annotated[
    float,
    typer.Option(
        parser=parse_duration,
        metavar="DURATION",
        help="Raise an alarm if the reader lags by more, as 60s.",
    ),
]


@local_command(app, "run", example="txmq relay run --config relay.toml")
def run(
    out: Output,
    *,
    config: Config = None,
    dsn: Database = None,
    broker: Broker = None,
    slot: SlotOrNone = None,
    skip: Skip = None,
) -> None:
    """Send committed messages to the broker, until SIGTERM. Create the slot first:
    `txmq relay create`.
    """
    from txmq.cli import logs
    from txmq.client.blocking.core import core_of
    from txmq.config.broker import load_relay
    from txmq.relay.relay import Relay, RelayPolicy

    settings = load_relay(config, {"dsn": dsn, "broker": broker, "slot": slot})
    policy = RelayPolicy(
        settings.confirm_every_s,
        settings.look_every_s,
        settings.alarm_mib * MIB,
        settings.alarm_lag_s,
        frozenset(skip or ()),
    )
    logs.configure(as_json=out.as_json)
    stop = stop_on_signals()
    with closing(_open_client(settings)) as client:
        relay = Relay(core_of(client), settings.dsn, settings.slot, policy)
        out.print_line({"ready": settings.slot}, f"ready {settings.slot}")
        relay.run(stop)


@local_command(app, "status", example="txmq relay status postgresql://db/shop")
def status(
    out: Output,
    dsn: Dsn,
    *,
    slot: Slot = DEFAULT_SLOT,
    alarm_mib: Retained = 1_024,
    alarm_lag_s: Lag = "60s",  # type: ignore[assignment]  # parsed
) -> None:
    """Show the log that the slot keeps, and the lag of its reader. Exit status 1:
    something is wrong.
    """
    from txmq.relay import slot as slots

    with open_database(dsn, "relay") as connection:
        shown = slots.find_with_lag(connection, slot)
    if shown is None:
        raise ConfigError("slot", f"slot {slot} does not exist", hint=slots.CREATE)
    alarms = shown.alarms(retained=alarm_mib * MIB, lag_s=alarm_lag_s)
    if shown.unfit:
        alarms["unfit"] = f"slot {slot} {shown.unfit}"
    out.show(
        _slot_fields(shown)
        | {"alarms": [{"kind": kind, "alarm": text} for kind, text in alarms.items()]}
    )
    if alarms:
        raise typer.Exit(FAILED)


@local_command(app, "create", example="txmq relay create postgresql://db/shop")
def create(out: Output, dsn: Dsn, *, slot: Slot = DEFAULT_SLOT, replaces: Replaces = None) -> None:
    """Create the slot. From then on PostgreSQL keeps its log until a relay has read
    it.
    """
    from txmq.relay import slot as slots

    with open_database(dsn, "relay") as connection:
        out.show(_slot_fields(slots.create(connection, slot, replaces or ())))


@local_command(app, "accept", example="txmq relay accept postgresql://db/shop")
def accept(out: Output, dsn: Dsn, *, slot: Slot = DEFAULT_SLOT, yes: Yes = False) -> None:
    """Accept what the slot has missed, which ends alarm `relay.missed`."""
    from txmq.relay import slot as slots

    out.confirm(f"Accept that messages from before slot {slot} are never sent?", yes=yes)
    with open_database(dsn, "relay") as connection:
        out.show(_slot_fields(slots.accept_missed(connection, slot)))


@local_command(app, "drop", example="txmq relay drop postgresql://db/shop")
def drop(out: Output, dsn: Dsn, *, slot: Slot = DEFAULT_SLOT, yes: Yes = False) -> None:
    """Drop the slot. Committed messages that no relay has read are never sent."""
    from txmq.relay import slot as slots

    out.confirm(f"Drop slot {slot}? Messages that it still holds are never sent.", yes=yes)
    with open_database(dsn, "relay") as connection:
        slots.drop(connection, slot)
    out.show({"dropped": slot})


def _open_client(settings: RelaySettings) -> Any:  # noqa: ANN401  # the blocking client is imported when it is used
    from txmq.client.blocking.connect import connect

    return connect(settings.broker, service="txmq-relay", timeout=settings.timeout_s)


def _slot_fields(slot: SlotStatus) -> dict[str, Any]:
    return {
        "slot": slot.name,
        "database": slot.database,
        "active": slot.active_pid is not None,
        "restart_lsn": _format_lsn(slot.restart_lsn),
        "confirmed_lsn": _format_lsn(slot.confirmed_lsn),
        "current_lsn": _format_lsn(slot.current_lsn),
        "retained_bytes": slot.retained,
        "lag_seconds": slot.lag_s,
        "wal_status": slot.wal_status,
        "safe_wal_size": slot.safe_wal_size,
        "made_at": _format_lsn(slot.origin.made_at if slot.origin else None),
        "replaces": list(slot.origin.replaces) if slot.origin else [],
        "accepted": bool(slot.origin and slot.origin.accepted),
    }


def _format_lsn(position: int | None) -> str | None:
    from txmq.tx.postgres.identity import format_lsn

    return None if position is None else format_lsn(position)
