"""Commands that pages of the console name are commands of `txmq`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_documented_commands import parse
from txmq.admin.console.transactions import STATES

TEMPLATES = Path(__file__).parents[2] / "txmq" / "admin" / "templates" / "console"
# in an expression "txmq send " ~ topic.name ~ " BODY", else <code>txmq tx list</code>
JOINED = re.compile(r'" ~ [^~"]+ ~ "')
LAST = re.compile(r'" ~ [^~"]+(?=[,)])')
QUOTED = re.compile(r'"(txmq (?:[^"\\]|\\.)*)"')
CODE = re.compile(r"<code[^>]*>(txmq [^<]*)</code>")
VALUE = re.compile(r"\{\{ (?!ui\.)(.*?) \}\}")
VALUES = {
    "at": "orders/0/17",
    "one.log_id": f"{7:032x}",
    "row.message_id": f"{7:032x}-0",
    "state": "undecided",
}
NAMED_ONLY = {"txmq broker --config"}  # where settings come from, without their file


def commands(page: str) -> Iterator[str]:
    """Yield the commands that a template names, with values put in."""

    def value(found: re.Match[str]) -> str:
        return VALUES.get(found[0].strip('"{} ~'), "NAME")

    page = VALUE.sub(value, page)
    page = LAST.sub(lambda found: value(found) + '"', JOINED.sub(value, page))
    for command in (*QUOTED.findall(page), *CODE.findall(page)):
        if command not in NAMED_ONLY:
            yield command.replace('\\"', '"')


@pytest.mark.parametrize("template", sorted(TEMPLATES.glob("*.html")), ids=lambda file: file.stem)
def test_each_command_that_a_page_names_is_taken(template: Path) -> None:
    found = {
        command: parse(command.removeprefix("txmq "))
        for command in commands(template.read_text("utf-8"))
    }
    assert {command: why for command, why in found.items() if why} == {}


def test_commands_are_found_with_their_values() -> None:
    page = """{{ ui.empty("None. Send one:", "txmq send " ~ topic.name ~ " '{\\"a\\": 1}'") }}
    {{ ui.body(decoded, "txmq message show " ~ row.message_id) }}
    <code class="command">txmq tx list --state {{ state }}</code>"""
    assert list(commands(page)) == [
        "txmq send NAME '{\"a\": 1}'",
        f"txmq message show {7:032x}-0",
        "txmq tx list --state undecided",
    ]


@pytest.mark.parametrize("state", STATES)
def test_each_state_of_the_page_is_one_of_the_command(state: str) -> None:
    assert parse(f"tx list --state {state}") == ""
