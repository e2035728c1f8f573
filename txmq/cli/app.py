"""The `txmq` command, assembled from its subcommands.

Each command imports its dependencies when it runs, so that `txmq --help` and shell
completion stay fast.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from functools import cache
from io import TextIOWrapper
from typing import Annotated

import typer

from txmq.cli.commands import (
    alarms,
    audit,
    broker,
    clock,
    config,
    dev,
    doctor,
    groups,
    inboxes,
    letters,
    limits,
    log,
    log_backup,
    messages,
    outbox,
    plans,
    policies,
    recover,
    relay,
    resolver,
    schema,
    send,
    stats,
    tail,
    topics,
    trace,
    transactions,
    users,
    xa,
)
from txmq.cli.output import FAILED, Output
from txmq.errors import TxmqError
from txmq.version import __version__


class UsageError(TxmqError):
    """The arguments of a command are wrong."""


class SystemFailure(TxmqError):
    """The operating system refused what a command needs, such as to write its
    result. The command may have done its work before.
    """

    outcome = "unknown"


app = typer.Typer(
    name="txmq",
    help="Transactional messaging with PostgreSQL: one decision for messages and rows.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
broker.add_to(app)
dev.add_to(app)
doctor.add_to(app)
app.add_typer(schema.app, name="schema")
log_backup.add_to(log.app)
app.add_typer(log.app, name="log")
app.add_typer(topics.app, name="topic")
send.add_to(app)
tail.add_to(app)
app.add_typer(messages.app, name="message")
app.add_typer(groups.app, name="group")
app.add_typer(transactions.app, name="tx")
app.add_typer(xa.app, name="xa")
trace.add_to(app)
audit.add_to(app)
alarms.add_to(app)
clock.add_to(app)
stats.add_to(app)
limits.add_to(app)
app.add_typer(letters.app, name="dlq")
app.add_typer(plans.app, name="plan")
app.add_typer(policies.app, name="policy")
app.add_typer(recover.app, name="recover")
resolver.add_to(app)
app.add_typer(relay.app, name="relay")
app.add_typer(outbox.app, name="outbox")
app.add_typer(inboxes.app, name="inbox")
app.add_typer(config.app, name="config")
app.add_typer(users.app, name="user")
app.add_typer(users.acl, name="acl")


def _print_version(asked: bool) -> None:  # noqa: FBT001  # as typer calls it
    if asked:
        print(f"txmq {__version__}")
        raise typer.Exit


@app.callback()
def options(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Accept the options before the command."""
    del version


@cache
def command_line() -> Callable[..., object]:
    """Return the parser of all commands.

    To build it takes longer than most commands. A process that forks others builds it
    for them.
    """
    return typer.main.get_command(app)


def main() -> None:
    """Run the command of this process."""
    _replace_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # no output fails for want of a character
            stream.reconfigure(errors="backslashreplace")
    as_json = "--json" in itertools.takewhile("--".__ne__, sys.argv[1:])
    try:
        sys.exit(_run(as_json=as_json))
    except OSError as error:
        Output(as_json=as_json).print_error(
            SystemFailure(str(error), hint="look at the disk, file or device that is named")
        )
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in it
        sys.exit(FAILED)


def _replace_closed_streams() -> None:
    """Open the null device for standard streams that are closed. A file of the command
    would get their number otherwise, and take what is written to them.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _run(*, as_json: bool) -> int:
    """Run the command; return its exit status. Raises OSError."""
    try:
        # Otherwise typer prints errors in the usage itself, as text.
        status = command_line()(prog_name="txmq", standalone_mode=not as_json)
    except SystemExit as end:
        status = end.code
    except typer.Abort:
        status = FAILED
    except typer.TyperException as error:
        hint = "add --help to the command to see its arguments"
        Output(as_json=as_json).print_error(UsageError(error.format_message(), hint=hint))
        status = error.exit_code
    sys.stdout.flush()
    return status if isinstance(status, int) else 0
