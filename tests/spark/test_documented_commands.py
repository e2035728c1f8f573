"""Each command line of `txmq-spark` in its document is one that it takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from txmq_spark.commands.command_line import JOBS, command_parser

SPARK = Path(__file__).parents[2] / "spark"
DOCUMENT = SPARK / "README.md"
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:^txmq-spark|/__main__\.py) (.+)$", re.MULTILINE)


def command_lines(text: str) -> Iterator[list[str]]:
    """Yield the arguments of each command. "…" are the options of the job's line
    before.
    """
    options: dict[str, list[str]] = {}
    for block in BLOCK.findall(text):
        for line in COMMAND.findall(block.replace("\\\n", " ")):
            job, *words = shlex.split(line, comments=True)
            if words[0] == "…":
                words[:1] = options[job]
            options.setdefault(job, words)
            yield [job, *words]


def test_each_command_line_of_the_document_is_taken() -> None:
    found = list(command_lines(DOCUMENT.read_text()))
    assert {words[0] for words in found} == JOBS.keys()
    for words in found:
        command_parser().parse_args(words)  # exits with 2 where it is wrong


@pytest.mark.parametrize("line", ["replay --rate 5", "watch --group", "make --plan p"])
def test_a_wrong_line_is_found(line: str) -> None:
    [words] = command_lines(f"```sh\ntxmq-spark {line}   # a comment\n```\n")
    with pytest.raises(SystemExit):
        command_parser().parse_args(words)
