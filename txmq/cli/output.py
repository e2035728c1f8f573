"""What commands print: tables for people, one JSON object for programs.

A broker's reply is shown as it is, whatever its fields: single values first, then each
list as a table. Text that came with messages is escaped, because it may hold what a
terminal obeys.
"""

from __future__ import annotations

import json
import re
import sys
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import typer

from txmq.errors import RequestRejected, TxmqError
from txmq.model.message import EPOCH

if TYPE_CHECKING:
    from rich.table import Table

FAILED = 1  # exit status; that of bad usage is 2
WIDTH_OF_A_FILE = 100_000  # nothing is cut or wrapped where no terminal sets a width
TIMES = re.compile(r"(.*_)?at|since|oldest\w*|newest\w*|deadline")
A_TIME = 10**15  # microseconds, September 2001: no count or generation of that name is as large


class Output:
    """Prints the results and errors of one command."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def show(self, value: Mapping[str, Any], *, columns: Sequence[str] = ()) -> None:
        """Print a result; of the rows in it, tables show only these columns where any
        are named.
        """
        if self.as_json:
            self.line(value, "")
        else:
            _print_tables(value, columns)

    def line(self, value: Mapping[str, Any], text: str) -> None:
        """Print one line of a result that comes piece by piece: `text` is what people
        get of it.
        """
        print(json.dumps(value) if self.as_json else text, flush=True)

    def fail(self, error: TxmqError) -> None:
        """Tell of an error, on one line of standard error."""
        print(
            json.dumps(_error_fields(error)) if self.as_json else f"txmq: {printable(str(error))}",
            file=sys.stderr,
        )

    def confirm(self, question: str, *, yes: bool) -> None:
        """Ask before something that cannot be taken back; no ends the command. With
        JSON nobody is there to ask.
        """
        if not yes and not self.as_json:
            typer.confirm(question, abort=True, err=True)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Turns errors of txmq into their line and exit status 1."""
        try:
            yield
        except TxmqError as error:
            self.fail(error)
            raise typer.Exit(FAILED) from None


def printable(text: str) -> str:
    """`text` on one line, with what is no visible character escaped: no title, colour
    or line can be forged with it.
    """
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def clock(micros: int) -> str:
    """A time as people read it, in UTC."""
    return (EPOCH + timedelta(microseconds=micros)).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"


def body_fields(body: bytes) -> dict[str, str]:
    """A body for people and programs to read: as text if it is UTF-8, else in
    base64.
    """
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": b64encode(body).decode()}


def cell(name: str, value: object) -> str:
    """The text of a field."""
    if type(value) is int and value > A_TIME and TIMES.fullmatch(name):
        return clock(value)
    return printable(_plain(value))


def _plain(value: object, separator: str = " ") -> str:
    """The text of a value. Lists within lists are places: [topic, partition, offset]
    reads topic/partition/offset.
    """
    if value is None or value in ("", [], {}):
        return "-"
    match value:
        case bool():
            return "yes" if value else "no"
        case dict():
            return ", ".join(f"{name}={_plain(item, '/')}" for name, item in value.items())
        case list() | tuple():
            return separator.join(_plain(item, "/") for item in value)
    return str(value)


def _error_fields(error: TxmqError) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "error": type(error).__name__,
        "message": error.message,
        "hint": error.hint,
    }
    fields |= {"retriable": error.retriable, "outcome": error.outcome}
    return fields | {"detail": error.detail} if isinstance(error, RequestRejected) else fields


def _print_tables(value: Mapping[str, Any], columns: Sequence[str]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = WIDTH_OF_A_FILE
    lists = {name: item for name, item in value.items() if _is_rows(item)}
    single = {name: item for name, item in value.items() if name not in lists}
    with console.capture() as printed:
        if single:
            console.print(_fields_table(single))
        for name, rows in lists.items():
            if len(value) > 1:
                console.print(Text(f"\n{name}", style="bold"))
            console.print(_rows_table(rows, columns) if rows else f"no {name}")
    print(
        "\n".join(line.rstrip() for line in printed.get().splitlines())
    )  # tables are padded to their longest row


def _is_rows(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _fields_table(fields: Mapping[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in fields.items():
        table.add_row(Text(name, style="bold"), Text(cell(name, value), overflow="fold"))
    return table


def _rows_table(rows: list[dict[str, Any]], columns: Sequence[str]) -> Table:
    from rich.table import Table
    from rich.text import Text

    known = dict.fromkeys(name for row in rows for name in row)
    names = [name for name in columns or known if name in known]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        numbers = all(type(row.get(name)) is int for row in rows) and not TIMES.fullmatch(name)
        table.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell(name, row.get(name))) for name in names))
    return table
