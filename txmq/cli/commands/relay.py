"""`txmq relay`: messages that services emit into their PostgreSQL transactions, brought
to the broker.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any

import typer

from txmq.cli.command import local
from txmq.cli.commands.schema import Dsn
from txmq.cli.options import Yes
from txmq.cli.output import FAILED, Output
from txmq.errors import ConfigError

if TYPE_CHECKING:
    from txmq.config.broker import Relay as RelaySettings
    from txmq.relay.slot import SlotStatus
    from txmq.tx.postgres.session import Connection

app = typer.Typer(
    no_args_is_help=True,
    help="Messages from PostgreSQL's log to the broker, and the slot they wait in.",
)
DEFAULT_SLOT = "txmq_relay"
MIB = 1 << 20
Config = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Settings, as TOML: its [relay] section; options go before it."
    ),
]
Database = Annotated[
    str | None, typer.Option("--dsn", envvar="TXMQ_DSN", metavar="DSN", help="The database.")
]
Broker = Annotated[
    str | None,
    typer.Option(
        "--broker",
        "--url",
        envvar="TXMQ_BROKER",
        metavar="URL",
        help="The broker to bring messages to.",
    ),
]
Skip = Annotated[
    list[int] | None,
    typer.Option(
        metavar="LSN",
        help="Leave this transaction out for good; `relay.refused` in the log names it.",
    ),
]
Slot = Annotated[str, typer.Option("--slot", metavar="NAME", help="The replication slot.")]
SlotOrNone = Annotated[
    str | None, typer.Option("--slot", metavar="NAME", help="The replication slot.")
]
Retained = Annotated[
    int,
    typer.Option(min=1, metavar="MIB", help="An alarm where the slot keeps more log than that."),
]
Lag = Annotated[
    float,
    typer.Option(min=0, metavar="SECONDS", help="An alarm where its reader is behind by more."),
]


@local(app, "run")
def run(
    out: Output,
    *,
    config: Config = None,
    dsn: Database = None,
    broker: Broker = None,
    slot: SlotOrNone = None,
    skip: Skip = None,
) -> None:
    """Bring what is committed to the broker, until SIGTERM. The slot must be there:
    `txmq relay create`.
    """
    from txmq.cli import logs
    from txmq.config.broker import load_relay
    from txmq.relay.relay import Relay, RelayPolicy

    chosen = load_relay(config, {"dsn": dsn, "broker": broker, "slot": slot})
    policy = RelayPolicy(
        chosen.confirm_every_s,
        chosen.look_every_s,
        chosen.alarm_mib * MIB,
        chosen.alarm_lag_s,
        frozenset(skip or ()),
    )
    logs.configure(as_json=out.as_json)
    stop = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: stop.set())
    with closing(_client(chosen)) as client:
        relay = Relay(client.core, chosen.dsn, chosen.slot, policy)
        out.line({"ready": chosen.slot}, f"ready {chosen.slot}")
        relay.run(stop)


@local(app, "status")
def status(
    out: Output,
    dsn: Dsn,
    *,
    slot: Slot = DEFAULT_SLOT,
    alarm_mib: Retained = 1_024,
    alarm_lag_s: Lag = 60.0,
) -> None:
    """Show how much log the slot keeps and how far its reader is; the exit status is 1
    if something is wrong.
    """
    from txmq.relay import slot as slots

    with _connected(dsn) as connection:
        found = slots.measured(connection, slot)
    if found is None:
        raise ConfigError("slot", f"there is no slot {slot}", hint=slots.CREATE)
    alarms = found.alarms(retained=alarm_mib * MIB, lag_s=alarm_lag_s)
    if found.unfit:
        alarms["unfit"] = f"slot {slot} {found.unfit}"
    out.show(
        _fields(found)
        | {"alarms": [{"kind": kind, "alarm": text} for kind, text in alarms.items()]}
    )
    if alarms:
        raise typer.Exit(FAILED)


@local(app, "create")
def create(out: Output, dsn: Dsn, *, slot: Slot = DEFAULT_SLOT) -> None:
    """Make the slot: from now on PostgreSQL keeps its log until a relay has read it."""
    from txmq.relay import slot as slots

    with _connected(dsn) as connection:
        out.show(_fields(slots.create(connection, slot)))


@local(app, "drop")
def drop(out: Output, dsn: Dsn, *, slot: Slot = DEFAULT_SLOT, yes: Yes = False) -> None:
    """Drop the slot. What was committed and not yet read is never sent."""
    from txmq.relay import slot as slots

    out.confirm(f"Drop slot {slot}? What it still holds is never sent.", yes=yes)
    with _connected(dsn) as connection:
        slots.drop(connection, slot)
    out.show({"dropped": slot})


def _client(chosen: RelaySettings) -> Any:  # the blocking client, loaded with the command
    from txmq.client.blocking.client import connect

    return connect(chosen.broker, service="txmq-relay", timeout=chosen.timeout_s)


@contextmanager
def _connected(dsn: str) -> Iterator[Connection]:
    from txmq.tx.postgres.session import connect

    with closing(connect(dsn, application_name="txmq relay")) as connection:
        yield connection


def _fields(found: SlotStatus) -> dict[str, Any]:
    return {
        "slot": found.name,
        "database": found.database,
        "active": found.active_pid is not None,
        "restart_lsn": _lsn(found.restart_lsn),
        "confirmed_lsn": _lsn(found.confirmed_lsn),
        "current_lsn": _lsn(found.current_lsn),
        "retained_bytes": found.retained,
        "lag_seconds": found.lag_s,
        "wal_status": found.wal_status,
        "safe_wal_size": found.safe_wal_size,
    }


def _lsn(place: int | None) -> str | None:
    return None if place is None else f"{place >> 32:X}/{place & 0xFFFFFFFF:X}"
