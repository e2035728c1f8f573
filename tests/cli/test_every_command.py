"""Properties of each command of `txmq`: help texts, and JSON for results and errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.cli.support import run
from tests.patient_clients import default_timeout
from txmq.cli.app import command_line
from txmq.cli.command import CommandClient
from txmq.errors import BrokerUnavailable

TOKEN = "019a0000000070008000000000000001"
NOBODY = "host=127.0.0.1 port=1 dbname=nowhere"
NO_FILE, NO_DIR = "/nowhere/txmq.toml", "/nowhere/data"
# each with its required arguments; no broker or database answers, and no file exists
COMMANDS = {
    "acl grant": "ada read topic:orders",
    "acl list": "",
    "acl revoke": "ada read topic:orders",
    "alarms": "",
    "audit": "",
    "broker": f"--config {NO_FILE}",
    "clock": "",
    "cluster add-log": "txmq://127.0.0.1:1",
    "cluster create": f"--config {NO_FILE}",
    "cluster drain-log": TOKEN,
    "cluster logs": "",
    "cluster nodes": "",
    "cluster remove-log": TOKEN,
    "cluster status": "",
    "cluster step-down": "--reason x",
    "config export": "",
    "config import": "/nowhere/config.json",
    "config reload": "",
    "config show": "",
    "dev": "--data /proc/nowhere",
    "doctor": f"--config {NO_FILE}",
    "dlq abandon": "billing orders/0/1 --reason x",
    "dlq edit": "billing orders/0/1 --body x --reason x",
    "dlq export": "billing",
    "dlq import": "/nowhere/letters --to spare",
    "dlq list": "billing",
    "dlq note": "billing f-1 seen",
    "dlq redrive": "billing orders/0/1 --to spare --reason x",
    "dlq replay": "billing orders/0/1",
    "dlq select delete": "mine",
    "dlq select list": "",
    "dlq select save": "mine --where text:order",
    "dlq show": "billing orders/0/1",
    "dlq stats": "billing",
    "dlq try": "billing orders/0/1 --member m-1",
    "group alter": "billing --lease 5",
    "group clone": "billing again",
    "group delete": "billing --yes",
    "group list": "",
    "group pause": "billing",
    "group reset": "billing orders --to first --yes",
    "group resume": "billing",
    "group show": "billing",
    "group skip": "billing --yes",
    "limits": "",
    "log backup": "/proc/nowhere",
    "log dump": f"--data {NO_DIR}",
    "log find": f"orders --data {NO_DIR}",
    "log lost": "",
    "log rebuild": f"--data {NO_DIR}",
    "log repair": f"--data {NO_DIR} --yes",
    "log restore": f"/nowhere/backup --data {NO_DIR}",
    "log verify": f"--data {NO_DIR}",
    "message delayed": "",
    "message find": "orders",
    "message recall": "0000000000000000000000000000000a-1",
    "message show": "0000000000000000000000000000000a-1",
    "outbox drop": "DSN 1 --keep /nowhere/kept --reason x --yes",
    "outbox list": "DSN",
    "outbox renew": "DSN 1 --yes",
    "outbox show": "DSN 1",
    "plan abandon": "p --reason R --yes",
    "plan approve": "p",
    "plan cancel": "p --yes",
    "plan check": "p",
    "plan create": "billing --all",
    "plan delete": "p",
    "plan export": "p",
    "plan leave": "p orders/0/1 --reason R",
    "plan letters": "p",
    "plan list": "",
    "plan pause": "p",
    "plan resume": "p",
    "plan show": "p",
    "plan start": "p",
    "policy delete": "billing",
    "policy list": "",
    "policy set": "billing --after 1h",
    "recover adopt": f"billing {TOKEN} --yes",
    "recover drain": f"--data {NO_DIR}",
    "recover drop": f"--data {NO_DIR} --yes",
    "recover export": f"billing {TOKEN}",
    "recover list": "",
    "recover show": f"billing {TOKEN}",
    "relay accept": "DSN --yes",
    "relay create": "DSN",
    "relay drop": "DSN --yes",
    "relay run": f"--config {NO_FILE}",
    "relay status": "DSN",
    "resolver": f"--config {NO_FILE}",
    "retry bury": "billing orders/0/1 --reason x",
    "retry edit": "billing orders/0/1 --body x --reason x",
    "retry list": "billing",
    "retry now": "billing orders/0/1",
    "retry show": "billing orders/0/1",
    "retry skip": "billing orders/0/1 --reason x",
    "schema brokers": "DSN",
    "schema check": "DSN",
    "schema install": "DSN",
    "send": "orders hello",
    "stats": "",
    "tail": "orders",
    "topic alter": "orders --set retention=7d",
    "topic create": "orders",
    "topic delete": "orders --yes",
    "topic list": "",
    "topic schema check": "orders --model txmq.wire.json:WireModel",
    "topic schema remove": "orders --yes",
    "topic schema set": "orders --compatibility none",
    "topic schema show": "orders",
    "topic set": "orders --partitions 9",
    "topic show": "orders",
    "tx check": "",
    "tx commit": f"{TOKEN} --reason x",
    "tx list": "",
    "tx lost": "DSN",
    "tx rollback": f"{TOKEN} --reason x",
    "trace": "--key k",
    "tx show": TOKEN,
    "user add": "ada --role admin --no-password",
    "user delete": "ada",
    "user init-admin": "--data /proc/nowhere",
    "user list": "",
    "user me": "",
    "user password": "ada",
    "user quota": "ada --set topics=5",
    "user token add": "ada scripts",
    "user token list": "",
    "user token revoke": "ada scripts",
    "user show": "ada",
    "user roles": "ada --role auditor",
    "xa doctor": f"--config {NO_FILE}",
    "xa forget": f"{TOKEN} --reason x",
    "xa list": "",
    "xa recover": f"--config {NO_FILE}",
    "xa verify": f"--config {NO_FILE} --since 2026-07-01",
}


def commands(command: Any, *path: str) -> Iterator[tuple[str, Any]]:
    """Yield each command with its words."""
    if not hasattr(command, "commands"):
        yield " ".join(path), command
        return
    assert command.help, f"{path} has no help text"
    for name, inner in command.commands.items():
        yield from commands(inner, *path, name)


EACH = dict(commands(command_line()))


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let no broker answer at any address."""

    def connect(url: str) -> CommandClient:
        raise BrokerUnavailable(f"no broker answered at {url}", hint="is it running?")

    monkeypatch.setattr("txmq.cli.command.connect", connect)
    with default_timeout(0.1):
        yield


def test_no_command_is_left_out() -> None:
    assert sorted(COMMANDS) == sorted(EACH)


@pytest.mark.parametrize("name", EACH)
def test_a_command_and_each_of_its_options_have_a_help_text(name: str) -> None:
    command = EACH[name]
    assert command.help
    # rich would take words in brackets for markup, and leave them out
    assert [option.name for option in command.params if "[" in (option.help or "")] == []
    assert command.help.startswith(command.short_help)
    assert ". " not in command.short_help, "a list of commands has room for one sentence"
    assert any("--json" in option.opts for option in command.params)
    assert [option.name for option in command.params if not option.help] == []


@pytest.mark.parametrize("name", EACH)
def test_help_shows_no_types_of_python(name: str) -> None:
    command = EACH[name]
    context = typer.Context(command)
    shown = {each.display_type_rich(context) for each in command.params}
    alone = {"str", "int", "bool", "float", "Path", "MessagePlace"}
    assert [text for text in shown if text and ("<" in text or text in alone)] == []
    assert not any(text.startswith("list[") for text in shown if text)


@pytest.mark.parametrize("name", EACH)
def test_help_fits_80_columns_and_cuts_no_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = run(*name.split(), "--help").stdout
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    words = set(shown.replace(",", " ").split())
    for option in EACH[name].params:
        if not getattr(option, "hidden", False) and option.param_type_name == "option":
            assert {*option.opts, *option.secondary_opts} <= words, shown


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_reaches_nothing_reports_an_error_with_a_hint(name: str) -> None:
    arguments = [
        *name.split(),
        *(NOBODY if word == "DSN" else word for word in COMMANDS[name].split()),
    ]
    result = run(*arguments, "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    error = json.loads(result.stderr)
    assert error.keys() >= {"error", "message", "hint", "retriable", "outcome"}
    assert error["hint"], error
    assert not Path("/nowhere").exists()


DOCUMENTS = [
    Path(__file__).parents[2] / name
    for name in (
        "README.md",
        "docs/TRANSACTIONS.md",
        "docs/CONSUMERS.md",
        "docs/GUIDE.md",
        "docs/SECURITY.md",
    )
] + sorted((Path(__file__).parents[2] / "docs" / "operations").glob("*.md"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_each_command_that_a_document_names_exists_with_its_options(document: Path) -> None:
    groups = {name.split()[0] for name in EACH if " " in name}
    inner = {name.rpartition(" ")[0] for name in EACH if name.count(" ") > 1}
    seen = 0
    for line in re.findall(r"(?<![\w/])txmq ([a-z][^`\n#()]*)", document.read_text()):
        for words in alternatives(line.split()):
            if words[0] in groups and len(words) == 1:
                continue
            if " ".join(words[:2]) in inner:
                words[:2] = [" ".join(words[:2])]  # a group inside a group
            name = " ".join(words[: 2 if words[0] in groups | inner else 1])
            options = {option for parameter in EACH[name].params for option in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= options, line
            seen += 1
    assert seen > 5 or document.parent.name == "operations"


def alternatives(words: list[str]) -> Iterator[list[str]]:
    """Yield each of the commands in "group pause|resume GROUP [TOPIC]"."""
    bare = [word.strip("[],;.:") for word in words]
    if len(bare) > 1 and "|" in bare[1]:
        yield from ([bare[0], choice, *bare[2:]] for choice in bare[1].split("|"))
    else:
        yield bare
