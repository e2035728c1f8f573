"""The `txmq` command, assembled from the modules of its commands.

Each command imports its dependencies when it runs, so that `txmq --help` and shell
completion stay fast. A command that is named is the only one that is built.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any, Final

import typer
from typer.core import TyperArgument, TyperOption

from txmq.cli import help as command_help
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


# Types of arguments and options in help. typer shows the names of Python's types:
# `<list[MessagePlace]>` for places of messages, `<bool>` for an option without a value.
TYPES: Final = {
    "str": "TEXT", "list[str]": "TEXT", "int": "NUMBER", "list[int]": "NUMBER",
    "int range": "NUMBER", "float": "NUMBER", "float range": "NUMBER", "path": "PATH",
}  # fmt: skip
# Under each title of the help: its commands and groups, with their modules.
PANELS: Final = {
    "Brokers": {
        "broker": "broker",
        "cluster": "cluster",
        "dev": "dev",
        "doctor": "doctor",
        "config": "config",
        "log": "log",
        "user": "users",
        "acl": "acl",
    },
    "Messages": {
        "topic": "topics",
        "send": "send",
        "tail": "tail",
        "message": "messages",
        "trace": "trace",
    },
    "Consumers and dead letters": {
        "group": "groups",
        "retry": "retries",
        "dlq": "letters",
        "plan": "plans",
        "policy": "policies",
        "recover": "recover",
    },
    "Transactions and databases": {
        "tx": "transactions",
        "xa": "xa",
        "schema": "schema",
        "resolver": "resolver",
        "relay": "relay",
        "outbox": "outbox",
    },
    "Operation": {
        "alarms": "alarms",
        "stats": "stats",
        "limits": "limits",
        "clock": "clock",
        "audit": "audit",
    },
}
MODULES: Final = {name: module for panel in PANELS.values() for name, module in panel.items()}


def assemble(names: Iterable[str]) -> Any:  # noqa: ANN401  # typer does not export its group
    """Return the parser of these commands and groups."""
    _show_types_in_words()
    app = typer.Typer(
        name="txmq",
        help="Transactional messaging with PostgreSQL: one decision for messages and rows.",
        epilog="--broker URL or TXMQ_BROKER names the broker. The help of each command ends "
        "with an example.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(options)
    for name in names:
        app.add_typer(import_module(f"txmq.cli.commands.{MODULES[name]}").app)
    parser: Any = typer.main.get_command(app)
    for title, panel in PANELS.items():
        for name in panel.keys() & parser.commands.keys():
            parser.commands[name].rich_help_panel = title
    return parser


def _print_version(asked: bool) -> None:  # noqa: FBT001  # as typer calls it
    if asked:
        print(f"txmq {__version__}")
        raise typer.Exit


def _refuse_before(context: typer.Context, option: Any, value: object) -> None:  # noqa: ANN401  # typer does not export its options
    """Say where an option of commands stands, for one that stands before them."""
    del context
    if value:
        written = option.opts[0] + ("" if option.is_flag else " URL")
        raise typer.BadParameter(f"write it behind the command: txmq topic list {written}")


def options(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
    broker: Annotated[
        str | None, typer.Option("--broker", callback=_refuse_before, hidden=True)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", callback=_refuse_before, hidden=True)] = False,
) -> None:
    """Accept the options before the command."""
    del version, broker, as_json


@cache
def command_line() -> Callable[..., object]:
    """Return the parser of all commands.

    To build it takes longer than most commands run, so a process that forks others
    builds it for them.
    """
    parser: Callable[..., object] = assemble(MODULES)
    return parser


def _parser() -> Callable[..., object]:
    """Return the parser of the command that the arguments name, or of all commands."""
    name = next(iter(sys.argv[1:]), "")
    completing = "_TXMQ_COMPLETE" in os.environ
    if name not in MODULES or completing or command_line.cache_info().currsize:
        return command_line()
    parser: Callable[..., object] = assemble([name])
    return parser


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
        parser = _parser()
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as `txmq_command` sets it
            signal.signal(signal.SIGINT, signal.default_int_handler)
        # Otherwise typer prints errors in the usage itself, as text.
        status = parser(prog_name="txmq", standalone_mode=not as_json)
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


def _show_types_in_words() -> None:
    """Have the help of all commands show types so, and names in whole."""
    command_help.install()
    TyperOption.display_type_rich = _of_option  # type: ignore[assignment,method-assign]
    TyperArgument.display_type_rich = _of_argument  # type: ignore[assignment,method-assign]


def _of_option(option: TyperOption, ctx: Any) -> str | None:  # noqa: ANN401  # typer does not export it
    if option.is_bool_flag:
        return None
    if option.metavar is not None:
        return option.metavar
    name = option.display_type(ctx).strip("<>")
    return TYPES.get(name, name)


def _of_argument(argument: TyperArgument, ctx: Any) -> None:  # noqa: ANN401  # likewise
    del argument, ctx
