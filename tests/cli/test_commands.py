"""Which calls the commands make, and what becomes of the replies."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from tests.cli.support import ScriptedClient, client, run
from txmq.errors import BrokerUnavailable, UnknownGroup
from txmq.message import Message

__all__ = ["client"]

TOKEN = "019a0000000070008000000000000001"
BY_ADA = {"operator": "ada", "reason": ""}
WHY = ("--reason", "lost on 3 May")


@pytest.mark.parametrize(
    ("arguments", "call", "args"),
    [
        ("topic create orders", "topic.create", {"name": "orders", "partitions": 8}),
        ("topic create orders --partitions 3", "topic.create", {"name": "orders", "partitions": 3}),
        (
            "topic create orders --set retention=7d --set flush=10ms,1000 --set policy=archive",
            "topic.create",
            {"name": "orders", "partitions": 8, "retention_ms": 604_800_000, "flush": [10, 1_000], "policy": "archive"},
        ),
        (
            "topic alter orders --set retention=none --set retention-size=1.5GiB --set letters=default",
            "topic.alter",
            {"name": "orders", "retention_ms": 0, "retention_bytes": 3 << 29, "letters_ms": "default"},
        ),
        (
            "topic alter orders --set max-message=64KiB --set writable=no --set readable=yes --set flush=sync",
            "topic.alter",
            {"name": "orders", "message_bytes": 65_536, "writable": False, "readable": True, "flush": "sync"},
        ),
        ("stats --limit 5", "broker.stats", {"limit": 5}),
        ("topic list", "topic.list", {}),
        ("topic show orders", "topic.show", {"name": "orders"}),
        ("topic set orders --partitions 9", "topic.grow", {"name": "orders", "partitions": 9}),
        ("topic delete orders --yes", "topic.delete", {"name": "orders"}),
        ("group list", "group.list", {}),
        ("group show billing", "group.show", {"group": "billing"}),
        (
            "group pause billing --reason x",
            "group.pause",
            {"group": "billing", "topic": None, "operator": "ada", "reason": "x"},
        ),
        (
            "group resume billing orders --operator eve",
            "group.resume",
            {"group": "billing", "topic": "orders", "operator": "eve", "reason": ""},
        ),
        (
            "group clone billing again",
            "group.clone",
            {"group": "billing", "to": "again", "operator": "ada", "reason": ""},
        ),
        ("group delete billing --yes", "group.delete", {"group": "billing", "operator": "ada", "reason": ""}),
        ("tx list", "tx.list", {"state": "undecided", "limit": 100}),
        ("tx list --state in-doubt --limit 7", "tx.list", {"state": "in-doubt", "limit": 7}),
        ("tx list --state open", "tx.list", {"state": "open", "limit": 100}),
        ("tx list --state conflicts", "tx.list", {"state": "conflicts", "limit": 100}),
        ("tx check", "tx.check", {"token": None}),
        (f"tx check {TOKEN}", "tx.check", {"token": TOKEN}),
        (
            f"tx commit {TOKEN} --reason seen",
            "tx.decide",
            {"token": TOKEN, "outcome": "COMMIT", "operator": "ada", "reason": "seen"},
        ),
        (
            f"tx rollback {TOKEN} --reason lost --operator eve",
            "tx.decide",
            {"token": TOKEN, "outcome": "ROLLBACK", "operator": "eve", "reason": "lost"},
        ),
        (
            "dlq show billing orders/3/17",
            "dlq.show",
            {"group": "billing", "topic": "orders", "partition": 3, "offset": 17},
        ),
        ("dlq stats billing", "dlq.stats", {"group": "billing"}),
        ("message delayed", "message.delayed", {"topic": None, "after": None, "limit": 100}),
        (
            "message delayed --topic orders --after 7,8 --limit 3",
            "message.delayed",
            {"topic": "orders", "after": (7, 8), "limit": 3},
        ),
        ("message recall a-1 b-2", "message.recall", {"ids": ["a-1", "b-2"]}),
    ],
)
def test_a_command_is_a_call_and_its_reply_is_shown(
    client: ScriptedClient, arguments: str, call: str, args: dict[str, Any]
) -> None:
    reply = {"answer": "as it came"}
    client.replies = [dict(reply), dict(reply)]
    assert json.loads(run(*arguments.split(), "--json").stdout) == reply
    assert "as it came" in run(*arguments.split()).stdout
    assert client.calls == [(call, args)] * 2


def test_the_broker_is_the_one_named_else_that_of_the_environment_else_the_default(
    client: ScriptedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.replies = [{"topics": []}] * 3
    run("topic", "list")
    assert client.url == "txmq://127.0.0.1:7650"
    monkeypatch.setenv("TXMQ_BROKER", "txmq://there:1")
    run("topic", "list")
    assert client.url == "txmq://there:1"
    run("topic", "list", "--broker", "txmq://elsewhere:2")
    assert client.url == "txmq://elsewhere:2"


def test_an_error_is_told_on_standard_error_with_status_1(client: ScriptedClient) -> None:
    client.replies = [UnknownGroup("no group 'x'", hint="see: txmq group list"), BrokerUnavailable("nobody there")]
    result = run("group", "show", "x")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "txmq: no group 'x' (see: txmq group list)\n")
    result = run("group", "show", "x", "--json")
    assert (result.exit_code, result.stdout, json.loads(result.stderr)["error"]) == (1, "", "BrokerUnavailable")


@pytest.mark.parametrize(
    "arguments",
    [
        "nothing",
        "topic",
        "topic create",
        "topic create .hidden",
        "topic create orders --partitions 0",
        "topic create orders --partitions many",
        "topic set orders",
        "send",
        "send orders body --file x",
        "send orders body --header novalue",
        "send orders body --header =value",
        "send orders body --deliver-at tomorrow",
        "send orders body --deliver-at 1900-01-01",
        "send orders body --delay -1",
        "send orders body --delay soon",
        "send orders body --delay 5y",
        "send orders body --delay nan",
        "send orders body --delay level:19",
        "send orders body --delay level:x",
        "message recall",
        "message find",
        "message find orders --from ever",
        "message find orders --limit 0",
        "message delayed --after x",
        "send orders --file /does/not/exist",
        "tail orders --from -1",
        "tail orders --from ever",
        "tail orders --count 0",
        "group alter billing --table 1,x",
        "group alter billing --exponential 1,2",
        "group alter billing --jitter 2",
        "group reset billing orders",
        "group reset billing orders --to 1=x",
        "group reset billing orders --to x",
        "group reset billing orders --to 2y",
        "group skip billing --partition 1",
        "group reset billing orders --to first --to 1=2",
        "tx list --state lost",
        "tx show 123",
        f"tx commit {TOKEN}",
        f"tx commit {TOKEN} --reason x --operator a:b",
        "dlq show billing orders",
        "dlq show billing orders/1/-2",
        "dlq replay billing",
        "dlq replay billing orders/1/2 --all",
        "dlq abandon billing orders/1/2",
        "resolver",
    ],
)
def test_bad_usage_is_status_2_and_nothing_is_done(client: ScriptedClient, arguments: str) -> None:
    result = run(*arguments.split())
    assert result.exit_code == 2
    assert result.stdout == "" or result.stdout.lstrip().startswith("Usage:")
    assert client.calls == []
    assert client.sent == []


@pytest.mark.parametrize(
    ("to", "sent"),
    [
        (["first"], "first"),
        (["last"], "last"),
        (["2026-07-01T12:00:00Z"], 1_782_907_200_000_000),
        (["0=17", "3=9"], {"0": 17, "3": 9}),
    ],
)
def test_a_reset_shows_what_it_would_do_before_it_asks(client: ScriptedClient, to: list[str], sent: object) -> None:
    client.replies = [{"positions": [[0, 10, 17, 0, 7, 0], [3, 4, 9, 0, 5, 0]]}] * 2
    options = [word for text in to for word in ("--to", text)]
    result = run("group", "reset", "billing", "orders", *options, *WHY, "--reprocess", stdin="y\n")
    args = {"group": "billing", "topic": "orders", "to": sent, "reprocess": True}
    args |= {"operator": "ada", "reason": "lost on 3 May"}
    assert result.exit_code == 0
    assert client.calls == [("group.reset", args | {"dry_run": True}), ("group.reset", args)]
    table = [
        "partition  before  after  again  skipped  back",
        "        0      10     17      0        7     0",
        "        3       4      9      0        5     0",
    ]
    lines = result.stdout.splitlines()  # with the answer, which the runner echoes, in between
    assert (lines[:3], lines[-3:]) == (table, table)
    assert "go on from there?" in result.stderr


@pytest.mark.parametrize("stdin", ["n\n", ""])
def test_a_reset_that_is_not_confirmed_is_not_done(client: ScriptedClient, stdin: str) -> None:
    client.replies = [{"positions": []}]
    assert run("group", "reset", "billing", "orders", "--to", "first", stdin=stdin).exit_code == 1
    assert [args.get("dry_run") for _call, args in client.calls] == [True]


@pytest.mark.parametrize(
    ("option", "runs"),
    [("--dry-run", [True]), ("--preview", [True]), ("--yes", [None]), ("--json", [None]), ("--json --dry-run", [True])],
)
def test_a_reset_asks_nothing_where_it_only_shows_or_is_told_not_to(
    client: ScriptedClient, option: str, runs: list[bool | None]
) -> None:
    client.replies = [{"positions": []}]
    assert run("group", "reset", "billing", "orders", "--to", "first", *option.split()).exit_code == 0
    assert [args.get("dry_run") for _call, args in client.calls] == runs


def test_a_group_can_go_back_by_a_duration(client: ScriptedClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txmq.cli.groups.time.time_ns", lambda: 10_000_000_000_000)
    client.replies = [{"positions": []}]
    assert run("group", "reset", "billing", "orders", "--to", "2h", "--yes").exit_code == 0
    assert client.calls[0][1]["to"] == 10_000_000_000 - 7_200_000_000


@pytest.mark.parametrize(
    ("options", "moves"),
    [
        ("", [("orders", "last"), ("refunds", "last")]),
        ("--topic orders", [("orders", "last")]),
        ("--topic orders --partition 1", [("orders", {"1": 40})]),
    ],
)
def test_a_backlog_is_skipped_topic_by_topic(client: ScriptedClient, options: str, moves: list[Any]) -> None:
    shown = {"topics": ["orders", "refunds"], "positions": [{"topic": "orders", "partition": 1, "end": 40}]}
    asked = [] if options == "--topic orders" else [shown]
    client.replies = [*asked, *[{"positions": [[1, 10, 40, 0, 30, 0]]}] * 2 * len(moves)]
    assert run("group", "skip", "billing", *options.split(), stdin="y\n").exit_code == 0
    resets = [args for call, args in client.calls if call == "group.reset"]
    assert [(args["topic"], args["to"], args.get("dry_run")) for args in resets] == [
        (topic, to, dry) for dry in (True, None) for topic, to in moves
    ]


NOTHING: dict[str, object] = {
    "on_exhausted": None,
    "retry": None,
    "lease_ms": None,
    "session_ms": None,
    "consume_timeout_ms": None,
    "max_parked": None,
    "flood_keys": None,
    "span": None,
}


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        (
            "--on-exhausted block --lease 2.5 --session 9 --consume-timeout 60",
            {"on_exhausted": "block", "lease_ms": 2_500, "session_ms": 9_000, "consume_timeout_ms": 60_000},
        ),
        ("--max-parked 5 --flood-keys 0 --span 9", {"max_parked": 5, "flood_keys": 0, "span": 9}),
        ("--table 1,2.5", {"retry": {"delays": [1_000_000, 2_500_000], "attempts": None, "jitter": 0.1}}),
        (
            "--exponential 1,3,10 --attempts 9",
            {"retry": {"delays": [1_000_000, 3_000_000, 9_000_000, 10_000_000], "attempts": 9, "jitter": 0.1}},
        ),
        (
            "--jitter 0.2 --dead ValueError --dead a.* --postpone OSError",
            {
                "retry": {
                    "delays": [7],
                    "attempts": 3,
                    "jitter": 0.2,
                    "dead": ["ValueError", "a.*"],
                    "postpone": ["OSError"],
                }
            },
        ),
    ],
)
def test_settings_of_a_group_are_altered_one_by_one(
    client: ScriptedClient, options: str, changed: dict[str, object]
) -> None:
    shown = {"settings": {"retry": {"delays": [7], "attempts": 3, "jitter": 0.1}}}
    client.replies = [shown, {}] if "retry" in changed else [{}]
    assert run("group", "alter", "billing", *options.split()).exit_code == 0
    assert client.calls[-1] == ("group.alter", {"group": "billing"} | BY_ADA | NOTHING | changed)


def test_deleting_a_topic_has_to_be_confirmed(client: ScriptedClient) -> None:
    assert run("topic", "delete", "orders", stdin="n\n").exit_code == 1
    assert client.calls == []
    client.replies = [{"name": "orders"}]
    assert run("topic", "delete", "orders", stdin="y\n").exit_code == 0


def test_a_message_has_what_the_options_say(client: ScriptedClient) -> None:
    options = "--key k --tag t --header a=1 --header b=x=y --partition 3 --deliver-at 2026-07-01T12:00:00Z --json"
    result = run("send", "orders", "hällo", *options.split())
    message = Message("hällo".encode(), "k", "t", {"a": "1", "b": "x=y"}, 1_782_907_200_000_000)
    assert client.sent == [("orders", message, 3)]
    assert json.loads(result.stdout) == {
        "message_id": "ab" * 16 + "-7",
        "topic": "orders",
        "partition": 3,
        "offset": 42,
        "duplicate": False,
    }


@pytest.mark.parametrize(
    ("span", "seconds"), [("90", 90), ("1.5s", 1.5), ("15m", 900), ("2h", 7_200), ("1d", 86_400), ("level:18", 7_200)]
)
def test_a_delay_is_a_span_or_a_level(client: ScriptedClient, span: str, seconds: float) -> None:
    run("send", "orders", "x", "--delay", span)
    assert client.sent == [("orders", Message(b"x", delay=seconds), None)]


@pytest.mark.parametrize("options", [[], ["--file", "-"]])
def test_a_body_may_come_from_standard_input(client: ScriptedClient, options: list[str]) -> None:
    run("send", "orders", *options, stdin=b"\x00\xff\n")
    assert client.sent == [("orders", Message(b"\x00\xff\n"), None)]


def test_a_body_may_come_from_a_file(client: ScriptedClient, tmp_path: Path) -> None:
    (tmp_path / "body").write_bytes(b"\x00\xff")
    run("send", "orders", "--file", str(tmp_path / "body"))
    assert client.sent == [("orders", Message(b"\x00\xff"), None)]


def letter(offset: int, **fields: object) -> dict[str, object]:
    return {"group": "billing", "topic": "orders", "partition": 3, "offset": offset, "state": "dead"} | fields


def test_a_search_goes_on_until_it_has_what_it_may_and_shows_text_as_text(client: ScriptedClient) -> None:
    row = {"message_id": "a-1", "topic": "orders", "partition": 0, "offset": 4, "body": b64encode(b"x").decode()}
    client.replies = [{"messages": [], "next": [0, 9]}, {"messages": [row, dict(row)], "next": [1, 2]}]
    result = run(
        *["message", "find", "orders", "--key", "k", "--from", "2026-07-01T12:00:00Z", "--limit", "2", "--json"]
    )
    assert [args["after"] for _call, args in client.calls] == [None, [0, 9]]
    assert client.calls[0][1]["start"] == 1_782_907_200_000_000
    told = json.loads(result.stdout)
    assert [message["body"] for message in told["messages"]] == ["x", "x"]
    assert told["more"] is True


def test_a_message_that_is_not_known_is_status_1(client: ScriptedClient) -> None:
    client.replies = [{"message": None}]
    assert run("message", "show", "a-1", "--json").exit_code == 1


def test_letters_show_text_as_text_and_other_bodies_in_base64(client: ScriptedClient) -> None:
    reply = {"letters": [letter(1, body="aGVsbG8="), letter(2, body="/w=="), letter(3)], "next": 3}
    client.replies = [reply]
    result = run("dlq", "list", "billing", "--bodies", "--after", "5", "--limit", "3", "--json")
    assert client.calls == [("dlq.list", {"group": "billing", "after": 5, "limit": 3, "bodies": True})]
    assert json.loads(result.stdout) == {
        "letters": [letter(1, body="hello"), letter(2, body_base64="/w=="), letter(3)],
        "next": 3,
    }


@pytest.mark.parametrize("token", [TOKEN, "019A0000-0000-7000-8000-000000000001"])
def test_a_transaction_shows_its_messages_as_text_where_they_are_text(client: ScriptedClient, token: str) -> None:
    rows = [{"key": "a", "body": "aGVsbG8="}, {"key": "b", "body": "/w=="}, {"key": "c"}]
    client.replies = [{"token": TOKEN, "rows": rows, "next": 5}]
    result = run("tx", "show", token, "--bodies", "--after", "2", "--limit", "3", "--json")
    args = {"token": TOKEN, "detail": True, "after": 2, "limit": 3, "bodies": True}
    assert client.calls == [("tx.show", args)]
    told = [{"key": "a", "body": "hello"}, {"key": "b", "body_base64": "/w=="}, {"key": "c"}]
    assert json.loads(result.stdout) == {"token": TOKEN, "rows": told, "next": 5}


def test_letters_named_one_by_one_are_replayed_without_a_question(client: ScriptedClient) -> None:
    client.replies = [{"done": [["orders", 3, 17], ["orders", 3, 18]], "refused": []}]
    result = run("dlq", "replay", "billing", "orders/3/17", "orders/3/18")
    letters = [("orders", 3, 17), ("orders", 3, 18)]
    assert client.calls == [("dlq.replay", {"group": "billing", "letters": letters} | BY_ADA)]
    assert result.stdout.split() == ["done", "2"]


def test_status_1_tells_that_letters_were_refused(client: ScriptedClient) -> None:
    client.replies = [{"done": [["orders", 3, 17]], "refused": [["orders", 3, 18, "no such letter"]]}] * 2
    command = ("dlq", "abandon", "billing", "orders/3/17", "orders/3/18", *WHY)
    result = run(*command)
    assert result.exit_code == 1
    assert "no such letter" in result.stdout
    result = run(*command, "--json")
    refused = {"topic": "orders", "partition": 3, "offset": 18, "why": "no such letter"}
    assert json.loads(result.stdout) == {"done": [["orders", 3, 17]], "refused": [refused]}
    assert client.calls[0][1]["reason"] == "lost on 3 May"


def test_all_letters_means_those_that_were_dead_before_the_first_is_touched(client: ScriptedClient) -> None:
    first = [letter(offset) for offset in range(1_000)]
    second = [letter(1_000), letter(1_001, state="abandoned"), letter(1_002)]
    client.replies = [{"letters": first, "next": 1_000}, {"letters": second, "next": None}]
    client.replies += [
        {"done": [["orders", 3, 0]] * 1_000, "refused": []},
        {"done": [["orders", 3, 0]] * 2, "refused": []},
    ]
    result = run("dlq", "replay", "billing", "--all", stdin="y\n")
    assert "1002 letters" in result.stderr
    assert [call for call, _args in client.calls] == ["dlq.list"] * 2 + ["dlq.replay"] * 2
    assert [args["after"] for call, args in client.calls if call == "dlq.list"] == [0, 1_000]
    replayed = [place.offset for call, args in client.calls if call == "dlq.replay" for place in args["letters"]]
    assert replayed == [*range(1_001), 1_002]


def test_all_letters_are_not_abandoned_without_a_yes(client: ScriptedClient) -> None:
    client.replies = [{"letters": [letter(1)], "next": None}]
    assert run("dlq", "abandon", "billing", "--all", *WHY, stdin="n\n").exit_code == 1
    assert [call for call, _args in client.calls] == ["dlq.list"]
