"""Output of commands: tables for people, one JSON object for programs.

The reply of a broker is shown with all of its fields: single values first, then each
list as a table. Text from messages is escaped, because it may hold control sequences
for terminals.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import typer

from txmq.errors import RequestRejected, TxmqError
from txmq.model import limits
from txmq.model.message import EPOCH
from txmq.model.printable import escape_unprintable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

FAILED = 1  # exit status; invalid usage ends with 2
NOTHING = "-"  # in a table, for a value that is not set
FILE_WIDTH = 100_000  # so that nothing is cut or wrapped in a file
TIME_FIELDS = re.compile(r"(.*_)?at|since|oldest\w*|newest\w*|deadline|stored_to")
SHARES = ("progress", "unprocessed_share", "processed_share")
Columns = Sequence[str] | Mapping[str, Sequence[str]]
TRACEBACKS = ("error_text",)
FIRST_TIME = 10**15  # microseconds in September 2001; counts stay below it


class Unconfirmed(TxmqError):
    """Nobody has confirmed what the command was about to do. Nothing was done."""


class Output:
    """Printer of the results and errors of one command."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def show(self, value: Mapping[str, Any], *, columns: Columns = ()) -> None:
        """Print a result. Tables of rows show only `columns`, where any are given, for
        all tables or by their names.
        """
        if self.as_json or not value:
            self.print_line(value, "done")
        else:
            _print_tables(value, columns)

    def print_line(self, value: Mapping[str, Any], text: str) -> None:
        """Print one part of a result: `value` as JSON, or `text` for people."""
        print(json.dumps(value) if self.as_json else text, flush=True)

    def print_note(self, text: str) -> None:
        """Print a remark about the result for people, on standard error: what reads the
        result by a pipe does not get it.
        """
        if not self.as_json:
            print(escape_unprintable(text), file=sys.stderr)

    def print_error(self, error: TxmqError) -> None:
        """Print an error on one line of standard error."""
        print(
            json.dumps(_error_fields(error))
            if self.as_json
            else f"txmq: {escape_unprintable(str(error))}",
            file=sys.stderr,
        )

    def confirm(self, question: str, *, yes: bool) -> None:
        """Ask for confirmation. Raises Unconfirmed without it.

        Neither `--yes` nor `--json` asks: programs cannot answer.
        """
        if yes or self.as_json:
            return
        try:
            sure = typer.confirm(question, err=True)
        except typer.Abort:  # the end of the input, or Ctrl-C
            print(file=sys.stderr)
            sure = False
        if not sure:
            raise Unconfirmed("nothing was done", hint="answer y, or add --yes")

    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Print errors of txmq, and end the command with exit status 1."""
        try:
            yield
        except TxmqError as error:
            self.print_error(error)
            raise typer.Exit(FAILED) from None


def format_time(micros: int) -> str:
    """Format microseconds since the epoch in UTC."""
    return (EPOCH + timedelta(microseconds=micros)).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"


def format_field(name: str, value: object) -> str:
    """Format the value of a single field. A traceback keeps its lines, which stand in
    the column of values, so they cannot forge a field.
    """
    if name in TRACEBACKS and isinstance(value, str):
        return "\n".join(map(escape_unprintable, value.rstrip("\n").split("\n"))) or NOTHING
    return format_cell(name, value)


def format_cell(name: str, value: object) -> str:
    """Format the value of a field for a table."""
    return escape_unprintable(_format_value(name, value))


def _format_value(name: str, value: object, separator: str = " ") -> str:
    """Format a value. Inner lists are places: [topic, partition, offset] becomes
    topic/partition/offset.
    """
    if value is None or value in ("", [], {}):
        return NOTHING
    match value:
        case bool() | int() | float():
            return _format_number(name, value)
        case dict():
            return ", ".join(
                f"{one}={_format_value(one, item, '/')}" for one, item in value.items()
            )
        case list() | tuple():
            return separator.join(_format_value("", item, "/") for item in value)
    return str(value)


def _format_number(name: str, value: float) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and TIME_FIELDS.fullmatch(name):
        if FIRST_TIME < value <= limits.TIME:
            return format_time(value)
        return str(value or NOTHING)
    return f"{value:.1%}" if name in SHARES else str(value)


def _error_fields(error: TxmqError) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "error": type(error).__name__,
        "message": error.message,
        "hint": error.hint,
    }
    fields |= {"retriable": error.retriable, "outcome": error.outcome}
    return fields | {"detail": error.detail} if isinstance(error, RequestRejected) else fields


def _print_tables(value: Mapping[str, Any], columns: Columns) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    lists = {name: item for name, item in value.items() if _is_rows(item)}
    single = {name: item for name, item in value.items() if name not in lists}
    with console.capture() as printed:
        if single:
            _print_fields(console, [single])
        for name, rows in lists.items():
            if len(value) > 1:
                console.print(Text(f"\n{name}", style="bold"))
            shown = columns.get(name, ()) if isinstance(columns, Mapping) else columns
            if rows:
                _print_rows(console, rows, shown)
            else:
                console.print(f"no {name}")
    # rich pads each row to the longest one
    print("\n".join(line.rstrip() for line in printed.get().splitlines()))


def _print_rows(console: Console, rows: list[dict[str, Any]], columns: Sequence[str]) -> None:
    """Print rows as a table; one below the other where it would break words."""
    table = _rows_table(rows, columns)
    if table.__rich_measure__(console, console.options).minimum <= console.width:
        console.print(table)
        return
    names = _names_of(rows, columns)
    _print_fields(console, [{name: row.get(name) for name in names} for row in rows])


def _names_of(rows: list[dict[str, Any]], columns: Sequence[str]) -> list[str]:
    present = dict.fromkeys(name for row in rows for name in row)
    return [name for name in columns or present if name in present]


def _is_rows(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _print_fields(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the fields of each row, one below the other. No word is folded, so that
    addresses can be copied.

    A table of rich's for each row would take milliseconds.
    """
    from rich.text import Text

    width = max(len(name) for row in rows for name in row)
    titles: dict[str, str] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        with console.capture() as printed:
            console.print(Text(name.ljust(width), style="bold"), end="")
        titles[name] = printed.get()
    for number, row in enumerate(rows):
        lines = [""] if number else []
        for name, value in row.items():
            first, *others = _folded(console, format_field(name, value), console.width - width - 2)
            lines += [f"{titles[name]}  {first}", *(f"{'':{width}}  {line}" for line in others)]
        console.out("\n".join(lines), highlight=False)


def _folded(console: Console, text: str, width: int) -> list[str]:
    """Return the lines of a text, folded between words where they are wider."""
    from rich.cells import cell_len
    from rich.text import Text

    lines: list[str] = []
    for line in text.split("\n"):
        if cell_len(line) <= width:
            lines.append(line)
        else:
            most = max(1, width, *map(cell_len, line.split()))
            lines += (part.plain for part in Text(line).wrap(console, most))
    return lines


def _rows_table(rows: list[dict[str, Any]], columns: Sequence[str]) -> Table:
    from rich.table import Table
    from rich.text import Text

    names = _names_of(rows, columns)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        numbers = all(type(row.get(name)) is int for row in rows) and not TIME_FIELDS.fullmatch(
            name
        )
        table.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(format_cell(name, row.get(name))) for name in names))
    return table
