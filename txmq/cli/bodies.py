"""Bodies of messages as operators give them: as text, in a file, on standard input."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

BodyFile = Annotated[
    str | None,
    typer.Option("--file", metavar="FILE", help="File with the body; - is standard input."),
]


def read_body(text: str | None, file: str | None) -> bytes | None:
    """Return the body that is given as text or by a file; None = neither is."""
    if text is not None:
        return text.encode(errors="surrogateescape")  # the bytes that the shell passed
    if file is None:
        return None
    if file == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"cannot read {file}: {error.strerror}") from None
