"""`txmq dlq export` and `txmq dlq import`."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Annotated, Any

import typer

from txmq.cli.command import CommandSession
from txmq.cli.letter_file import LetterWriter, publish_file, read_file
from txmq.cli.letter_selection import Saved, Where, selection_args
from txmq.cli.options import Group, Operator, Reason, Yes
from txmq.cli.output import FAILED
from txmq.cli.parsers import parse_name
from txmq.errors import ConfigError

NOTED_PER_CALL = 1_000
PLACE = ("topic", "partition", "offset", "number", "edits")


def export(  # its options
    session: CommandSession,
    group: Group,
    *,
    where: Where = None,
    select: Saved = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="PATH", help="New file. Default: standard output."),
    ] = None,
    mark: Annotated[
        bool,
        typer.Option(
            "--mark",
            help="Note with the letters that they are in the file: a group that keeps them "
            "until then lets retention delete them.",
        ),
    ] = False,
    operator: Operator,
    reason: Reason = "",
) -> None:
    """Write dead letters to a file: lines of JSON, with exact bodies.

    The file has its name once it is whole and on disk. The letters stay.
    """
    chosen = {"group": group, **selection_args(where, select)}
    if file is None:
        if mark:
            raise typer.BadParameter("--mark needs --file: standard output may be lost")
        writer = LetterWriter(sys.stdout.buffer, group)
        for letter in _letters(session, chosen):
            writer.write(letter)
        writer.end()
        return
    if file.exists():
        message = f"{file} exists already"
        raise ConfigError("--file", message, hint="choose another name, or move it away")
    noted: list[list[Any]] = []
    damaged = 0
    try:
        with NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}.", delete=False) as out:
            try:
                writer = LetterWriter(out, group)
                for letter in _letters(session, chosen):
                    writer.write(letter)
                    damaged += "damaged" in letter
                    if "damaged" not in letter:
                        noted.append([letter[name] for name in PLACE])
                writer.end()
                publish_file(file, out)
            finally:
                Path(out.name).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            "--file",
            f"cannot write {file}: {error.strerror}",
            hint="name a file in a directory that you may write to",
        ) from None
    shown: dict[str, Any] = {"letters": writer.letters, "damaged": damaged, "file": str(file)}
    if mark:
        shown |= _mark(session, noted, group=group, operator=operator, reason=reason)
    session.out.show(shown)
    if damaged or shown.get("refused"):
        raise typer.Exit(FAILED)


def _letters(session: CommandSession, chosen: dict[str, Any]) -> Any:  # noqa: ANN401  # an iterator of replies' letters
    more: dict[str, Any] = {}
    while True:
        page = session.client.call("dlq.list", **chosen, **more, limit=1_000, bodies=True)
        yield from page["letters"]
        if page["next"] is None:
            return
        more = {"cursor": page["next"]}


def _mark(session: CommandSession, letters: list[list[Any]], **args: object) -> dict[str, Any]:
    done, refused = 0, list[dict[str, Any]]()
    for start in range(0, len(letters), NOTED_PER_CALL):
        some = letters[start : start + NOTED_PER_CALL]
        reply = session.client.call("dlq.exported", letters=some, **args)
        done += len(reply["done"])
        refused += [
            dict(zip(("topic", "partition", "offset", "why"), one, strict=True))
            for one in reply["refused"]
        ]
    return {"marked": done, "refused": refused}


def import_(
    session: CommandSession,
    file: Annotated[Path, typer.Argument(metavar="PATH", help="File that an export has written.")],
    *,
    to: Annotated[
        str, typer.Option(parser=parse_name, metavar="TOPIC", help="Topic of the messages.")
    ],
    operator: Operator,
    yes: Yes = False,
) -> None:
    """Send the messages of an export to a topic, all or none of them.

    They are new messages, with headers of their origin. A file that is not whole, or
    was changed, is refused.
    """
    head, letters = read_file(file)
    damaged = sum(letter.body is None for letter in letters)
    whole = [letter for letter in letters if letter.body is not None]
    try:
        headers = [letter.headers_of_copy(head.group, operator) for letter in whole]
    except ValueError as error:
        raise ConfigError(str(file), str(error), hint="leave that letter out") from None
    session.out.confirm(f"Send {len(whole)} messages to topic {to}?", yes=yes)
    if whole:
        with session.client.transaction() as tx:
            for letter, pairs in zip(whole, headers, strict=True):
                tx.send(to, letter.data, key=letter.key, tag=letter.tag, headers=pairs)
    session.out.show({"messages": len(whole), "damaged": damaged, "topic": to})
    if damaged:
        raise typer.Exit(FAILED)
