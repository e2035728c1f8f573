"""`txmq schema`: txmq's tables in a business database."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from txmq.cli.command import local
from txmq.cli.output import FAILED, Output

if TYPE_CHECKING:
    from txmq.tx.postgres.session import Connection

app = typer.Typer(no_args_is_help=True, help="The tables that txmq keeps in a PostgreSQL database.")
Dsn = Annotated[str, typer.Argument(envvar="TXMQ_DSN", metavar="DSN", help="The database, as psql takes it.")]


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


def install_into(dsn: str) -> int:
    """Make the tables, or bring them up to date; returns their version."""
    from txmq.tx.postgres import schema

    with closing(_connect(dsn)) as connection:
        schema.install(connection)
    return schema.VERSION


def _connect(dsn: str) -> Connection:
    from txmq.tx.postgres.session import connect

    return connect(dsn, application_name="txmq schema")
