"""`txmq resolver`: a process that resolves transactions beside the broker.

It is for databases that the broker cannot reach, or that would keep it busy.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from txmq.cli.command import CommandClient, CommandSession, broker_command
from txmq.cli.stop import stop_on_signals
from txmq.model.units import SECOND

if TYPE_CHECKING:
    from txmq.tx.postgres.outbox import OutboxRow

app = typer.Typer()
Config = Annotated[
    Path,
    typer.Option(metavar="FILE", help="Settings as TOML: sections resolver and checks are used."),
]
Every = Annotated[
    float, typer.Option(min=0.05, metavar="SECONDS", help="Pause between two rounds.")
]


@broker_command(app, "resolver", example="txmq resolver --config resolver.toml")
def resolver(session: CommandSession, *, config: Config, every: Every = 2.0) -> None:
    """Ask databases for the outcomes of undecided transactions, and tell the broker,
    until SIGTERM.
    """
    import structlog

    from txmq.cli import logs
    from txmq.cli.resolver_rounds import ResolvedBroker, ResolverRounds, broker_lease
    from txmq.config.broker import load_resolvers
    from txmq.tx.postgres.resolver import ResolverPolicy, TokenResolver

    settings = load_resolvers(config)
    logs.configure(as_json=session.out.as_json)
    databases = {
        one.name: TokenResolver(
            one.dsn, policy=ResolverPolicy(end_stuck_after_s=one.end_backend_after_s)
        )
        for one in settings.resolver
    }
    shown = session.client.call("broker.show")
    broker = ResolvedBroker(UUID(shown["log_id"]), shown["name"])
    for database in databases.values():
        database.lease = broker_lease(session.client, broker)
    rounds = ResolverRounds(
        session.client,
        broker,
        databases,
        int(settings.checks.first_s * SECOND),
        structlog.get_logger(),
        partial(_publish_row, session.client),
    )
    stop = stop_on_signals()
    session.out.print_line({"ready": list(databases)}, f"ready {' '.join(databases)}")
    while not stop.wait(every):
        rounds.run_round(time.time_ns() // 1_000)


def _publish_row(client: CommandClient, row: OutboxRow) -> None:
    from txmq.client.blocking.client import Client as Blocking
    from txmq.client.blocking.core import core_of
    from txmq.client.blocking.transaction.outbox_publication import publish_row

    assert isinstance(client, Blocking), "the client of txmq.cli.command.connect"
    publish_row(core_of(client), row)
