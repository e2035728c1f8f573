"""`txmq dlq edit`, and what `dlq show` says of edits."""

from __future__ import annotations

import json
import os
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from tests.cli.support import NO_DELIVERIES, ScriptedClient, client, run
from txmq.cli.commands import letter_trials
from txmq.cli.commands.letter_edits import diff_lines
from txmq.errors import MessagesDamaged
from txmq.model.message_diff import MAX_COMPARED, Version

__all__ = ["client"]

EDIT = ("dlq", "edit", "billing", "orders/3/17", "--operator", "ada", "--reason", "typo")
PLACE = {"group": "billing", "topic": "orders", "partition": 3, "offset": 17}
AS_ADA = {"operator": "ada", "reason": "typo"}
BEFORE = {"headers": {"a": "1", "b": "2"}, "edits": 1}


def encoded(body: bytes) -> str:
    return b64encode(body).decode()


def shown(body: bytes = b'{"amount": 1}', **fields: object) -> dict[str, Any]:
    return {**BEFORE, "body": encoded(body)} | fields


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (("--body", "x\udcff"), {"body": encoded(b"x\xff"), "headers": None}),
        (
            ("--body", "x", "--any-format"),
            {"body": encoded(b"x"), "headers": None, "any_format": True},
        ),
        (("--file", "-"), {"body": encoded(b"from stdin"), "headers": None}),
        (
            ("--header", "b=3", "--header", "c=", "--unset-header", "a"),
            {"body": None, "headers": {"b": "3", "c": ""}},
        ),
        (
            ("--body", "y", "--unset-header", "b"),
            {"body": encoded(b"y"), "headers": {"a": "1"}},
        ),
    ],
)
def test_an_edit_changes_what_the_options_say(
    client: ScriptedClient, options: tuple[str, ...], changes: dict[str, Any]
) -> None:
    client.replies = [shown(), {"edits": 2}]
    result = run(*EDIT, *options, "--json", stdin=b"from stdin")
    assert client.calls == [
        ("dlq.show", PLACE),
        ("dlq.edit", PLACE | AS_ADA | {"edits": 1, "any_format": False} | changes),
    ]
    reply = json.loads(result.stdout)
    assert reply["edits"] == 2
    assert reply["diff"][:2] == ["--- version 1", "+++ version 2"]


def test_a_return_to_the_original_shows_what_that_changes(client: ScriptedClient) -> None:
    client.replies = [shown(), shown(b'{"amount": 0}'), {"edits": 2}]
    result = run(*EDIT, "--revert", "--yes")
    assert client.calls[1:] == [
        ("dlq.show", PLACE | {"version": 0}),
        ("dlq.edit", PLACE | AS_ADA | {"edits": 1, "revert": True}),
    ]
    assert result.exit_code == 0
    client.replies, client.calls = [shown(), shown(b'{"amount": 0}')], []
    asked = run(*EDIT, "--revert")
    assert (asked.exit_code, len(client.calls)) == (1, 2)
    assert '-  "amount": 1\n+  "amount": 0\n' in asked.stderr


def test_the_editor_gets_the_body_and_gives_the_new_one(
    client: ScriptedClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "editor"
    script.write_text('#!/bin/sh\ngrep -q amount "$2" && printf "%s" "$1" > "$2"\n')
    script.chmod(0o700)
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", f"{script} 'the new one'")
    client.replies = [shown(), {"edits": 2}]
    assert run(*EDIT, "--editor", "--yes").exit_code == 0
    assert client.calls[1][1]["body"] == encoded(b"the new one")
    for program in (str(tmp_path / "nowhere"), f"{script} no"):
        monkeypatch.setenv("EDITOR", program)
        client.replies, client.calls = [shown(b"nothing here")], []
        failed = run(*EDIT, "--editor", "--json")
        assert (failed.exit_code, json.loads(failed.stderr)["error"]) == (1, "ConfigError")
        assert len(client.calls) == 1


MODEL = """
from pydantic import BaseModel
class Order(BaseModel):
    amount: int
not_a_model = 7
def check(body):
    import json
    if "amount" not in json.loads(body):
        raise KeyError("amount")
"""


def test_a_body_that_the_model_does_not_have_is_not_sent(
    client: ScriptedClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "shop_of_edits.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = ("--model", "shop_of_edits:Order", "--json")
    client.replies = [shown(), {"edits": 2}]
    assert run(*EDIT, "--body", '{"amount": 2}', *model).exit_code == 0
    for body, reason in (('{"amount": "=cmd|"}', "amount: "), ("\x1b[2J", "the whole: ")):
        client.replies, client.calls = [shown()], []
        refused = run(*EDIT, "--body", body, *model)
        error = json.loads(refused.stderr)
        assert (refused.exit_code, error["error"]) == (1, "LocalProtocolError")
        assert error["message"].startswith(f"the body is no Order: {reason}")
        assert len(client.calls) == 1
    for body, reason in (("{}", "KeyError: 'amount'"), ("{", "JSONDecodeError: ")):
        client.replies = [shown()]
        refused = run(*EDIT, "--body", body, "--model", "shop_of_edits:check", "--json")
        message = json.loads(refused.stderr)["message"]
        assert message.startswith(f"the body is invalid: {reason}")
    for path in ("shop_of_edits:Nobody", "nowhere:Order", "shop_of_edits:not_a_model", "os", ""):
        client.calls = []
        wrong = run(*EDIT, "--body", "x", "--model", path, "--json")
        assert (wrong.exit_code, json.loads(wrong.stderr)["error"]) == (1, "ConfigError"), path
        assert client.calls == []


@pytest.mark.parametrize(
    "options",
    [
        ("--body", "x", "--file", "y"),
        ("--body", "x", "--revert"),
        ("--revert", "--header", "a=1"),
        ("--header", "a"),
        (),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    client: ScriptedClient, options: tuple[str, ...]
) -> None:
    assert run(*EDIT, *options).exit_code == 2
    assert client.calls == []


@pytest.mark.parametrize("options", [("--header", "a=1"), ("--body", '{"amount": 1}')])
def test_an_edit_that_changes_nothing_is_not_sent(
    client: ScriptedClient, options: tuple[str, ...]
) -> None:
    client.replies = [shown()]
    assert run(*EDIT, *options).exit_code == 2
    assert len(client.calls) == 1


def test_a_header_that_is_not_there_cannot_be_removed(client: ScriptedClient) -> None:
    client.replies = [shown()]
    assert run(*EDIT, "--unset-header", "c").exit_code == 2
    assert os.linesep not in json.dumps(client.calls)


def test_show_compares_the_letter_with_what_was_published(client: ScriptedClient) -> None:
    hostile = "\x1b[2J<script>"
    show = ("dlq", "show", "billing", "orders/3/17")
    original = shown(b'{"amount": 1, "name": "a"}')
    newest = shown(json.dumps({"amount": 2, "name": hostile}).encode(), headers={"a": hostile})
    client.replies = [dict(newest), dict(original), NO_DELIVERIES]
    reply = json.loads(run(*show, "--diff", "--json").stdout)
    assert "body" not in reply
    assert reply["diff"] == [
        "--- what was published",
        "+++ version 1",
        "@@ -1,6 +1,5 @@",
        "-a: 1",
        "-b: 2",
        "+a: \\x1b[2J<script>",
        " {",
        '-  "amount": 1,',
        '-  "name": "a"',
        '+  "amount": 2,',
        '+  "name": "\\\\u001b[2J<script>"'.replace("\\\\", "\\"),
        " }",
    ]
    client.replies = [dict(newest), dict(original), NO_DELIVERIES]
    table = run(*show, "--diff").stdout
    assert '+  "amount": 2,' in table
    assert "\x1b" not in table
    client.replies, client.calls = [dict(original), NO_DELIVERIES], []
    run(*show, "--version", "0", "--body")
    assert client.calls[0] == ("dlq.show", PLACE | {"version": 0, "bodies": True})


def test_bodies_that_are_no_text_are_compared_by_their_digests() -> None:
    names = ("a", "b")
    same = Version({}, b"\xff")
    assert diff_lines(same, same, names) == []
    [*_heads, old, new] = diff_lines(same, Version({}, b"\xfe\x00"), names)
    assert old.startswith("-(1 bytes, SHA-256 a8100ae6")
    assert new.startswith("+(2 bytes, SHA-256 ")
    large = Version({}, b"x" * (MAX_COMPARED + 1))
    assert len(diff_lines(large, Version({}, b"y"), names)) == 5
    one, two = (Version({}, json.dumps([at] * 50_000).encode()) for at in (1, 2))
    assert len(diff_lines(one, two, names)) == 5, "as text it is one line"
    one, two = (Version({}, b"%d\n" % at * 50_000) for at in (1, 2))
    assert diff_lines(one, two, names)[-1].startswith("+(100000 bytes, SHA-256 ")
    spaces = diff_lines(Version({}, b'{"a":1}'), Version({}, b'{"a": 1}'), names)
    assert spaces[-2:] == ['-{"a":1}', '+{"a": 1}'], "the same JSON, but other bytes"
    deep = Version({}, b"[" * 100_000)
    assert diff_lines(deep, Version({}, b"[]"), names)[-1] == "+[]"


def test_copies_are_made_until_none_is_left(client: ScriptedClient) -> None:
    redrive = (
        "dlq",
        "redrive",
        "billing",
        "--to",
        "spare",
        "--operator",
        "ada",
        "--reason",
        "typo",
    )
    args = {"group": "billing", "to": "spare", "abandon": True, "again": False} | AS_ADA
    first, second = ["orders", 0, 1], ["orders", 0, 2]
    client.replies = [
        {"done": [[*first, 1, 7]], "refused": [], "left": [second]},
        {"done": [], "refused": [[*second, "abandoned"]], "left": []},
    ]
    result = run(*redrive, "orders/0/1", "orders/0/2", "--abandon", "--json")
    asked = [("dlq.redrive", args | {"letters": one}) for one in ([first, second], [second])]
    assert json.loads(json.dumps(client.calls)) == [list(one) for one in asked]
    refused = {"topic": "orders", "partition": 0, "offset": 2, "why": "abandoned"}
    assert json.loads(result.stdout) == {"done": [[*first, 1, 7]], "refused": [refused]}
    assert result.exit_code == 1
    client.replies = [{"done": [[*first, 1, 7]], "refused": [], "next": "aa"}] * 2
    client.replies.append({"done": [], "refused": [], "next": None})
    assert run(*redrive, "--all", "--again", "--yes").stdout.split() == ["done", "2"]
    assert client.calls[-1][1]["cursor"] == "aa"
    assert run(*redrive).exit_code == 2
    client.replies = [{"done": [], "refused": [], "next": None}]
    aim = ("dlq", "redrive", "billing", "--reason", "typo", "--operator", "ada", "--all", "--yes")
    assert run(*aim, "--to-group", "shop").exit_code == 0
    assert client.calls[-1][1]["to_group"] == "shop"
    assert "to" not in client.calls[-1][1]
    for wrong in ((), ("--to", "spare", "--to-group", "shop")):
        assert run(*aim, *wrong).exit_code == 2


def test_a_version_that_is_damaged_can_be_left(client: ScriptedClient) -> None:
    damage = MessagesDamaged("00001.log: damaged at position 9")
    fields = {"edits": 1, "damaged": damage.message, "headers": {}}
    client.replies = [damage, fields, shown(b"whole"), {"edits": 2}]
    result = run(*EDIT, "--revert", "--yes", "--json")
    assert client.calls[1] == ("dlq.show", PLACE | {"bodies": False})
    assert client.calls[3] == ("dlq.edit", PLACE | AS_ADA | {"edits": 1, "revert": True})
    assert "-damaged: 00001.log" in result.stdout
    client.replies = [damage]
    assert run(*EDIT, "--body", "y", "--yes").exit_code == 1


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        ({"outcome": "processed"}, 0),
        ({"outcome": "died again", "consumer": "m-1", "error_type": "E"}, 1),
        ({"outcome": "ended", "why": "reset"}, 1),
    ],
)
def test_a_trial_shows_its_outcome(
    client: ScriptedClient,
    monkeypatch: pytest.MonkeyPatch,
    reply: dict[str, Any],
    status: int,
) -> None:
    monkeypatch.setattr(letter_trials, "TRIAL_POLL_S", 0)
    attempt = ("dlq", "try", "billing", "orders/3/17", "--member", "m-1", "--operator", "ada")
    waits = {"outcome": "no answer yet", "why": ""}
    client.replies = [{"number": 7}, waits, reply]
    result = run(*attempt, "--json")
    assert (json.loads(result.stdout), result.exit_code) == (reply, status)
    assert client.calls[-1] == ("dlq.tried", PLACE | {"number": 7})
    assert client.calls[0] == (
        "dlq.try",
        PLACE | {"member": "m-1", "operator": "ada", "reason": ""},
    )
    client.replies = [{"number": 7}, waits]
    late = run(*attempt, "--timeout", "0", "--json")
    assert (json.loads(late.stdout), late.exit_code) == ({"outcome": "no answer yet"}, 1)
