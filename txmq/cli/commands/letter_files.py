"""`txmq dlq export` and `txmq dlq import`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from txmq.cli.command import CommandSession
from txmq.cli.letter_selection import Selected
from txmq.cli.options import By, Group, Operator, Yes
from txmq.cli.output import FAILED
from txmq.cli.parsers import parse_name
from txmq.client.protocol.calls import calls_by
from txmq.client.protocol.letter_changes import mark_exported, write_letters
from txmq.client.protocol.letter_file import LetterWriter, new_file, read_file
from txmq.faces import run
from txmq.model.measures import counted


def export(
    session: CommandSession,
    group: Group,
    *,
    selected: Selected,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="FILE", help="New file. Default: standard output."),
    ] = None,
    mark: Annotated[
        bool,
        typer.Option(
            "--mark",
            help="Note with the letters that they are in the file: a group that keeps them "
            "until then lets retention delete them.",
        ),
    ] = False,
    by: By,
) -> None:
    """Write dead letters to a file: lines of JSON, with exact bodies.

    The file has its name once it is whole and on disk. The letters stay.
    """
    chosen = {"group": group, **selected.args(group)}
    if file is None:
        if mark:
            raise typer.BadParameter("--mark needs --file: standard output may be lost")
        writer = LetterWriter(sys.stdout.buffer, group)
        run(write_letters(calls_by(session.client.call), chosen, writer))
        writer.end()
        return
    with new_file(file, group) as writer:
        written = run(write_letters(calls_by(session.client.call), chosen, writer))
    shown: dict[str, Any] = {
        "letters": writer.letters,
        "damaged": writer.damaged,
        "file": str(file),
    }
    if mark:
        marked = run(mark_exported(calls_by(session.client.call), group, written, *by))
        refused = [one._asdict() for one in marked.refused]
        shown |= {"marked": len(marked.done), "refused": refused}
    bad = bool(writer.damaged or shown.get("refused"))
    if not (session.out.as_json or shown.get("refused")):
        shown.pop("refused", None)
    session.out.show(shown)
    if bad:
        raise typer.Exit(FAILED)


def import_(
    session: CommandSession,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="File that `dlq export` has written.")
    ],
    *,
    to: Annotated[
        str, typer.Option(parser=parse_name, metavar="TOPIC", help="Topic of the messages.")
    ],
    again: Annotated[
        bool,
        typer.Option("--again", help="Send the messages although an import has sent them before."),
    ] = False,
    operator: Operator,
    yes: Yes = False,
) -> None:
    """Send the messages of an export to a topic, all or none of them, once.

    They are new messages, with headers of their origin. Repeated, the import sends
    nothing. A file that is not whole, or was changed, is refused.
    """
    if not (yes or session.out.as_json):
        count = sum(letter.body is not None for letter in read_file(file).letters)
        session.out.confirm(f"Send {counted(count, 'message')} to topic {to}?", yes=yes)
    found = session.client.import_letters(file, to=to, operator=operator, again=again)
    session.out.show(found._asdict() | {"topic": to})
    if found.repeated:
        session.out.print_note(
            f"topic {to} has them already: nothing was sent (--again sends them)"
        )
    if found.damaged:
        raise typer.Exit(FAILED)
