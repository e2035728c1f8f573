"""`txmq schema`: txmq's tables in a business database."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from txmq.cli.command import local
from txmq.cli.options import token_of
from txmq.cli.output import FAILED, Output
from txmq.errors import LocalProtocolError

if TYPE_CHECKING:
    from txmq.tx.postgres.brokers import Broker
    from txmq.tx.postgres.session import Connection

app = typer.Typer(no_args_is_help=True, help="The tables that txmq keeps in a PostgreSQL database.")
Forget = Annotated[
    str | None,
    typer.Option(
        metavar="LOG_ID",
        parser=token_of,
        help="Take out a broker that is lost for good: token rows no longer wait for it.",
    ),
]
Reason = Annotated[str, typer.Option(help="Why it is forgotten; kept in the database.")]
Dsn = Annotated[
    str, typer.Argument(envvar="TXMQ_DSN", metavar="DSN", help="The database, as psql takes it.")
]


@local(app, "install")
def install(out: Output, dsn: Dsn) -> None:
    """Make the tables, or bring them up to date."""
    out.show({"version": install_into(dsn)})


@local(app, "check")
def check(out: Output, dsn: Dsn) -> None:
    """Say what is wrong with the tables; the exit status is 1 if something is."""
    from txmq.tx.postgres import schema

    with closing(_connect(dsn)) as connection:
        remarks = schema.check(connection)
    out.show({"version": schema.VERSION, "remarks": [{"remark": remark} for remark in remarks]})
    if remarks:
        raise typer.Exit(FAILED)


@local(app, "brokers")
def brokers(out: Output, dsn: Dsn, *, forget: Forget = None, reason: Reason = "") -> None:
    """List the brokers that the database decides for; a partition of tokens stays until
    all of them are past it.
    """
    from txmq.tx.postgres import brokers as registry

    with closing(_connect(dsn)) as connection:
        if forget is not None:
            if not reason:
                raise typer.BadParameter("a broker is forgotten for a reason: --reason TEXT")
            if not registry.forget(connection, UUID(forget), reason):
                raise LocalProtocolError(
                    f"no broker with log {forget} has reported here", hint="see txmq schema brokers"
                )
        found = registry.registered(connection)
    out.show({"brokers": [_told(broker) for broker in found]})


def _told(broker: Broker) -> dict[str, object]:
    token = broker.oldest_undecided
    return broker._asdict() | {
        "log_id": str(broker.log_id),
        "oldest_undecided": None if token is None else token.hex,
    }


def install_into(dsn: str) -> int:
    """Make the tables, or bring them up to date; returns their version."""
    from txmq.tx.postgres import schema

    with closing(_connect(dsn)) as connection:
        schema.install(connection)
    return schema.VERSION


def _connect(dsn: str) -> Connection:
    from txmq.tx.postgres.session import connect

    return connect(dsn, application_name="txmq schema")
