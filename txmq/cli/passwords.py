"""New passwords: from a file, standard input or the terminal, never from an option.

Other users of the machine see the options of a process.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from txmq.cli.output import Output
from txmq.errors import ConfigError

if TYPE_CHECKING:
    from txmq.wire.scram import Verifier

PasswordFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="File with the new password; - is standard input. Default: ask for it."
    ),
]


def new_verifier(out: Output, file: str | None) -> Verifier:
    """Return the verifier of a new password, which is all that the broker gets of it.

    Raises ConfigError.
    """
    from txmq.wire import scram

    try:
        return scram.new_verifier(_read(out, file))
    except ValueError as error:
        raise ConfigError("password", str(error), hint="choose another one") from None


def _read(out: Output, file: str | None) -> str:
    if file is not None:
        try:
            given = sys.stdin.buffer.readline() if file == "-" else Path(file).read_bytes()
            return given.decode().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            place = "standard input" if file == "-" else file
            raise ConfigError(place, f"cannot be read: {error}", hint="give UTF-8 text") from None
    if out.as_json or not sys.stdin.isatty():
        raise ConfigError(
            "password", "there is no terminal to ask for it", hint="use --password-file FILE, or -"
        )
    asked: str = typer.prompt("New password", hide_input=True, confirmation_prompt=True, err=True)
    return asked
