"""Each command line of the documents is one that `txmq` takes, with its options and
values.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_every_command import EACH
from txmq.cli.app import command_line

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    {ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("operations/*.md")}
)
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
UNMARKED = re.compile(r"^```\n(txmq .*)$", re.MULTILINE)  # a block that says not what it is
COMMAND = re.compile(r"^(?:[A-Z_]+=\S+ )*txmq (.+)$")
# what a reader puts in, and what stands for it
VALUES = {
    "TOPIC/PARTITION/OFFSET": "orders/0/17",
    "N": "3",
    "SPAN": "1h",
    "TIME": "2026-07-01T12:00:00Z",
    "OFFSET": "17",
    "PORT": "7650",
    "SEQ": "3",
    "MESSAGE_ID": "019a0000000070008000000000000001-0",
    **dict.fromkeys(("TOKEN", "LOG_ID", "STORE", "ID"), "019a0000000070008000000000000001"),
}


def command_lines(text: str) -> Iterator[str]:
    """Yield the command lines of a document's blocks, without comments and pipes."""
    for block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            found = COMMAND.match(line.strip())
            if found is not None:
                yield from alternatives(re.split(r"\s+[|>&#]\s?|\s+2>", found[1])[0])


def alternatives(line: str) -> Iterator[str]:
    """Yield each of the commands in "group pause|resume GROUP [TOPIC]". A line that
    ends in "…", or lists commands, says what there is, and no more.
    """
    if line.endswith("…") or " · " in line:
        return
    words = re.sub(r"[][]", "", line).split(" ")
    choices = words[1].split("|") if len(words) > 1 else [""]
    for choice in choices:
        yield " ".join([words[0], choice, *(word.partition("|")[0] for word in words[2:])])


def parse(line: str) -> str:
    """Return what is wrong with a command line; "" = nothing."""
    words = [VALUES.get(word, word) for word in shlex.split(line)]
    command: Any = command_line()
    context: Any = None
    try:
        while hasattr(command, "commands"):  # a group, of Click's or of Typer's own kind
            context = command.context_class(command, parent=context)
            name, command, words = command.resolve_command(context, words)
        command.make_context(name, words, parent=context)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        return str(error.format_message())
    return ""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_each_command_line_of_a_document_is_taken(document: Path) -> None:
    lines = list(command_lines(document.read_text()))
    wrong = {line: why for line in lines if (why := parse(line))}
    assert wrong == {}
    assert UNMARKED.findall(document.read_text()) == [], "begin the block with ```sh"


@pytest.mark.parametrize(
    "line",
    ["topic create", "topic create t --partition 3", "topic make t", "group reset g t --to x"],
)
def test_a_wrong_line_is_found(line: str) -> None:
    assert list(command_lines(f"```sh\ntxmq {line}   # a comment\n```\n")) == [line]
    assert parse(line)


@pytest.mark.parametrize("name", EACH)
def test_the_example_of_a_help_text_is_taken_and_fits_into_a_terminal(name: str) -> None:
    example = EACH[name].epilog
    assert example.startswith(f"Example: txmq {name}")
    assert len(example) <= 78
    assert parse(example.removeprefix("Example: txmq ").partition(" > ")[0]) == ""
