"""`txmq schema`: tables of txmq in a business database."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from txmq.cli.command import local_command
from txmq.cli.database import Dsn, open_database
from txmq.cli.options import Yes
from txmq.cli.output import FAILED, Output, format_time
from txmq.cli.parsers import parse_directory_id, parse_log_id
from txmq.errors import LocalProtocolError

if TYPE_CHECKING:
    from txmq.tx.postgres.brokers import Broker

app = typer.Typer(
    name="schema",
    no_args_is_help=True,
    help="Install and check the tables of txmq in a PostgreSQL database.",
)


class TableUser(StrEnum):
    """Users of the tables."""

    BROKER = "broker"
    SERVICE = "service"


CheckFor = Annotated[
    TableUser,
    typer.Option(
        "--for", help="Who has the role of DSN: a service needs fewer rights than a broker."
    ),
]
Forget = Annotated[
    str | None,
    typer.Option(
        metavar="LOG_ID",
        parser=parse_log_id,
        help="Remove a broker that is lost for good: rows of txmq_token do not wait for it then.",
    ),
]
TakeOver = Annotated[
    str | None,
    typer.Option(
        metavar="LOG_ID",
        parser=parse_log_id,
        help="Let the data directory of --directory work on the database for this log's broker.",
    ),
]
Directory = Annotated[
    str | None,
    typer.Option(
        metavar="ID",
        parser=parse_directory_id,
        help="Data directory for --take-over, as its broker's alarm resolver.refused names it.",
    ),
]
Reason = Annotated[
    str, typer.Option(help="Reason for --forget or --take-over, recorded in the database.")
]


@local_command(app, "install", example="txmq schema install postgresql://db/shop")
def install(out: Output, dsn: Dsn) -> None:
    """Create the tables, or bring them up to date."""
    out.show({"version": install_into(dsn)})


@local_command(app, "check", example="txmq schema check postgresql://app@db/shop --for service")
def check(out: Output, dsn: Dsn, *, user: CheckFor = TableUser.BROKER) -> None:
    """Check the tables, and the rights of the role in DSN. Exit status 1: something is
    wrong.
    """
    from txmq.tx.postgres import schema

    with open_database(dsn, "schema") as connection:
        remarks = schema.check(connection, service=user is TableUser.SERVICE)
    out.show({"version": schema.VERSION, "remarks": [{"remark": remark} for remark in remarks]})
    if remarks:
        raise typer.Exit(FAILED)


@local_command(app, "brokers", example="txmq schema brokers postgresql://db/shop")
def brokers(
    out: Output,
    dsn: Dsn,
    *,
    forget: Forget = None,
    take_over: TakeOver = None,
    directory: Directory = None,
    reason: Reason = "",
    yes: Yes = False,
) -> None:
    """List the brokers that use the database, with the data directories that may work
    on it. Rows of txmq_token stay until no broker needs them.
    """
    from txmq.tx.postgres import brokers as registry

    with open_database(dsn, "schema") as connection:
        if forget is not None:
            if not reason:
                raise typer.BadParameter("--forget needs a reason: use --reason TEXT")
            out.confirm(_question(registry.registered(connection), UUID(forget)), yes=yes)
            if not registry.forget(connection, UUID(forget), reason):
                raise LocalProtocolError(
                    f"no broker with log {forget} has reported here",
                    hint="list the brokers with: txmq schema brokers DSN",
                )
        if take_over is not None:
            if not reason or directory is None:
                raise typer.BadParameter("--take-over needs --directory ID and --reason TEXT")
            registry.take_over(connection, UUID(take_over), UUID(directory), reason)
        found = registry.registered(connection)
    out.show({"brokers": [_broker_fields(broker) for broker in found]})


def _question(brokers: list[Broker], lost: UUID) -> str:
    """Name the last report of the broker: one that runs may still need its rows."""
    reported = [broker.reported_at for broker in brokers if broker.log_id == lost]
    last = f", which has reported at {format_time(reported[0])}" if reported else ""
    return f"Forget the broker of log {lost}{last}? Only if it is lost for good."


def _broker_fields(broker: Broker) -> dict[str, object]:
    token = broker.oldest_undecided
    return broker._asdict() | {
        "log_id": str(broker.log_id),
        "oldest_undecided": None if token is None else token.hex,
    }


def install_into(dsn: str) -> int:
    """Create the tables, or bring them up to date; return their version."""
    from txmq.tx.postgres import schema

    with open_database(dsn, "schema") as connection:
        schema.install(connection)
    return schema.VERSION
