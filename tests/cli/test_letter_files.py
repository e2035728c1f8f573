"""`txmq dlq export` and `import`: what is in the file, and what is no export."""

from __future__ import annotations

import json
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.cli.support import ScriptedClient, client, run
from txmq.client.protocol import letter_file
from txmq.errors import BrokerUnavailable
from txmq.model.message import Message
from txmq.model.origin import MAX_REDRIVES, REDRIVES

__all__ = ["client"]

EXACT = bytes(range(256))
FORMULA = '=cmd|"/c calc"!A1\r\n\x1b[2J<script>'


def letter(offset: int, body: bytes | None = EXACT, **fields: object) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "group": "billing",
        "topic": "orders",
        "partition": 3,
        "offset": offset,
        "number": offset + 1,
        "edits": 0,
        "message_id": "ab-1",
        "key": "k",
        "tag": None,
        "headers": {"a": FORMULA},
        "error_text": FORMULA,
    }
    kept = {"damaged": "rotten"} if body is None else {"body": b64encode(body).decode()}
    return shown | kept | fields


def page(*letters: dict[str, Any], following: str | None = None) -> dict[str, Any]:
    return {"letters": list(letters), "next": following, "scanned": len(letters)}


def exported(client: ScriptedClient, path: Path, *letters: dict[str, Any]) -> Path:
    client.replies = [page(*letters)]
    result = run("dlq", "export", "billing", "--file", str(path), "--json")
    assert result.exit_code == any("damaged" in one for one in letters)
    client.calls.clear()
    return path


def test_an_export_has_exact_bodies_and_its_import_sends_them(
    client: ScriptedClient, tmp_path: Path
) -> None:
    path = tmp_path / "letters.jsonl"
    client.replies = [page(letter(7), following="aa"), page(letter(8, b"", tag="t", key=None))]
    result = run("dlq", "export", "billing", "-w", "text=x", "--file", str(path), "--json")
    assert json.loads(result.stdout) == {"letters": 2, "damaged": 0, "file": str(path)}
    assert [args.get("cursor") for _name, args in client.calls] == [None, "aa"]
    assert all(args["bodies"] for _name, args in client.calls)
    assert [one.name for one in tmp_path.iterdir()] == ["letters.jsonl"]
    head, first, second, end = map(json.loads, path.read_bytes().splitlines())
    assert (head["txmq"], head["version"], head["group"]) == ("letters", 1, "billing")
    assert (first["offset"], second["offset"], first["error_text"]) == (7, 8, FORMULA)
    before = path.read_bytes().rpartition(b'{"end"')[0]
    assert end == {"end": True, "letters": 2, "sha256": sha256(before).hexdigest()}
    result = run("dlq", "import", str(path), "--to", "spare", "--operator", "ada", "--json")
    counts = {"messages": 2, "damaged": 0, "topic": "spare"}
    assert json.loads(result.stdout) == counts | {"repeated": False}
    origin = {
        "txmq-origin-topic": "orders",
        "txmq-origin-partition": "3",
        "txmq-origin-offset": "7",
        "txmq-origin-group": "billing",
        "txmq-origin-id": "ab-1",
        "txmq-redriven-by": "ada",
        "txmq-redrives": "1",
    }
    assert client.sent == [
        ("spare", Message(EXACT, "k", None, {"a": FORMULA} | origin), None),
        (
            "spare",
            Message(b"", None, "t", {"a": FORMULA} | origin | {"txmq-origin-offset": "8"}),
            None,
        ),
    ]


def test_an_import_sends_a_file_once_unless_it_is_told_to(
    client: ScriptedClient, tmp_path: Path
) -> None:
    path = exported(client, tmp_path / "letters", letter(7))
    command = ("dlq", "import", str(path), "--to", "spare", "--json")
    found = [json.loads(run(*command, *more).stdout) for more in ((), (), ("--again",))]
    assert [one["repeated"] for one in found] == [False, True, False]
    assert "nothing was sent" in run(*command[:-1], "--yes").stderr
    assert len(client.sent) == 2
    moved = path.rename(tmp_path / "moved")
    run("dlq", "import", str(moved), "--to", "other", "--json")
    run("dlq", "import", str(moved), "--to", "spare", "--json")
    assert [topic for topic, _message, _partition in client.sent] == ["spare", "spare", "other"]


def test_an_export_to_standard_output_has_its_end_last(client: ScriptedClient) -> None:
    client.replies = [page(letter(7))]
    lines = run("dlq", "export", "billing").stdout.splitlines()
    assert json.loads(lines[-1])["letters"] == len(lines) - 2 == 1
    assert run("dlq", "export", "billing", "--mark").exit_code == 2


def test_what_is_marked_is_what_the_file_has(client: ScriptedClient, tmp_path: Path) -> None:
    client.replies = [
        page(letter(7), letter(8, None), letter(9, edits=2)),
        {"done": [["orders", 3, 7]], "refused": [["orders", 3, 9, "it was edited meanwhile"]]},
    ]
    path = tmp_path / "letters"
    named = ("--mark", "--operator", "ada", "--json")
    result = run("dlq", "export", "billing", "--file", str(path), *named)
    assert client.calls[1] == (
        "dlq.exported",
        {
            "group": "billing",
            "letters": [["orders", 3, 7, 8, 0], ["orders", 3, 9, 10, 2]],
            "operator": "ada",
            "reason": "",
        },
    )
    shown = json.loads(result.stdout)
    assert (shown["marked"], shown["damaged"], len(shown["refused"])) == (1, 1, 1)
    assert result.exit_code == 1
    imported = run("dlq", "import", str(path), "--to", "spare", "--json")
    assert (json.loads(imported.stdout)["damaged"], imported.exit_code) == (1, 1)
    assert len(client.sent) == 2


def test_an_export_that_is_not_finished_leaves_nothing(
    client: ScriptedClient, tmp_path: Path
) -> None:
    path = tmp_path / "letters"
    client.replies = [page(letter(7), following="aa"), BrokerUnavailable("gone", hint="wait")]
    assert run("dlq", "export", "billing", "--file", str(path), "--json").exit_code == 1
    assert [*tmp_path.iterdir()] == []
    path.write_bytes(b"of somebody else")
    taken = run("dlq", "export", "billing", "--file", str(path), "--json")
    assert json.loads(taken.stderr)["error"] == "ConfigError"
    assert path.read_bytes() == b"of somebody else"
    nowhere = run("dlq", "export", "billing", "--file", "/nowhere/x", "--json")
    assert json.loads(nowhere.stderr)["error"] == "ConfigError"


def edits_of_a_file(data: bytes) -> dict[str, bytes]:
    head, one, end = data.splitlines(keepends=True)
    other = one.replace(b'"offset": 7', b'"offset": 9')
    return {
        "empty": b"",
        "cut": data[: -len(end)],
        "cut in a line": data[:-9],
        "changed": head + other + end,
        "twice": head + one + one + end,
        "goes on": data + one,
        "two exports": data + data,
        "another version": data.replace(b'"version": 1', b'"version": 2', 1),
        "no export": b'{"txmq": "plan", "version": 1}\n' + one + end,
        "no JSON": b"\x00\xff" * 100,
        "no base64": head + one.replace(b'"body": "', b'"body": "!') + end,
        "NaN": head + one.replace(b'"offset": 7', b'"offset": NaN') + end,
        "a name twice": head + one.replace(b'"offset": 7', b'"offset": 7, "offset": 8') + end,
        "deep": head + b"[" * 100_000 + b"\n" + end,
        "no headers": head + one.replace(b'"headers"', b'"heads"') + end,
        "another type": head + one.replace(b'"partition": 3', b'"partition": "3"') + end,
    }


@pytest.mark.parametrize("name", edits_of_a_file(b"a\nb\nc\n"))
def test_what_is_no_whole_export_is_refused(
    client: ScriptedClient, tmp_path: Path, name: str
) -> None:
    path = exported(client, tmp_path / "letters", letter(7))
    path.write_bytes(edits_of_a_file(path.read_bytes())[name])
    result = run("dlq", "import", str(path), "--to", "spare", "--json")
    error = json.loads(result.stderr)
    assert (result.exit_code, error["error"], client.sent) == (1, "ConfigError", [])
    assert "no export of dead letters" in error["message"]
    assert "versions of txmq" not in error["message"]


def test_endless_files_and_loops_of_copies_are_refused(
    client: ScriptedClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looped = letter(7, headers={REDRIVES: str(MAX_REDRIVES)})
    path = exported(client, tmp_path / "looped", looped)
    assert run("dlq", "import", str(path), "--to", "spare", "--json").exit_code == 1
    path = exported(client, tmp_path / "large", letter(7), letter(8))
    for name, limit, text in (("MAX_READ", 1_000, "more than 1000 bytes"), ("LINE", 99, "a line")):
        with monkeypatch.context() as patch:
            patch.setattr(letter_file, name, limit)
            refused = run("dlq", "import", str(path), "--to", "spare", "--json")
        assert text in json.loads(refused.stderr)["message"]
    assert client.sent == []
