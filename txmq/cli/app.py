"""The `txmq` command, assembled from its subcommands.

Each command imports its dependencies when it runs, so that `txmq --help` and shell
completion stay fast.
"""

from __future__ import annotations

import typer

from txmq.cli.commands import (
    alarms,
    broker,
    clock,
    dev,
    groups,
    letters,
    log,
    messages,
    outbox,
    relay,
    resolver,
    schema,
    send,
    stats,
    tail,
    topics,
    transactions,
    xa,
)

app = typer.Typer(
    name="txmq",
    help="Transactional messaging with PostgreSQL: one decision for messages and rows.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
broker.add_to(app)
dev.add_to(app)
app.add_typer(schema.app, name="schema")
app.add_typer(log.app, name="log")
app.add_typer(topics.app, name="topic")
send.add_to(app)
tail.add_to(app)
app.add_typer(messages.app, name="message")
app.add_typer(groups.app, name="group")
app.add_typer(transactions.app, name="tx")
app.add_typer(xa.app, name="xa")
alarms.add_to(app)
clock.add_to(app)
stats.add_to(app)
app.add_typer(letters.app, name="dlq")
resolver.add_to(app)
app.add_typer(relay.app, name="relay")
app.add_typer(outbox.app, name="outbox")


def main() -> None:
    """Run the command of this process."""
    app(prog_name="txmq")
