"""Calls of the commands of messages, transactions and letters, and their output."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path

import pytest

from tests.cli.support import BY_ADA, NO_DELIVERIES, TOKEN, WHY, ScriptedClient, client, run
from txmq.model.message import Message

__all__ = ["client"]
ID = "0000000000000000000000000000000a-1"


def test_a_message_has_what_the_options_say(client: ScriptedClient) -> None:
    options = (
        "--key k --tag t --header a=1 --header b=x=y --partition 3"
        " --deliver-at 2026-07-01T12:00:00Z --json"
    )
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
    ("span", "seconds"),
    [("90", 90), ("1.5s", 1.5), ("15m", 900), ("2h", 7_200), ("1d", 86_400), ("level:18", 7_200)],
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
    return {
        "group": "billing",
        "topic": "orders",
        "partition": 3,
        "offset": offset,
        "state": "dead",
    } | fields


def test_a_search_goes_on_until_it_has_what_it_may_and_shows_text_as_text(
    client: ScriptedClient,
) -> None:
    row = {
        "message_id": "a-1",
        "topic": "orders",
        "partition": 0,
        "offset": 4,
        "body": b64encode(b"x").decode(),
    }
    client.replies = [
        {"messages": [], "next": [0, 9]},
        {"messages": [row, dict(row)], "next": [1, 2]},
    ]
    result = run(
        *[
            "message",
            "find",
            "orders",
            "--key",
            "k",
            "--from",
            "2026-07-01T12:00:00Z",
            "--limit",
            "2",
            "--json",
        ]
    )
    assert [args["after"] for _call, args in client.calls] == [None, [0, 9]]
    assert client.calls[0][1]["start"] == 1_782_907_200_000_000
    output = json.loads(result.stdout)
    assert [message["body"] for message in output["messages"]] == ["x", "x"]
    assert output["more"] is True


def test_an_unknown_message_is_status_1(client: ScriptedClient) -> None:
    client.replies = [{"message": None}, {"messages": [], "next": None}]
    assert run("message", "show", ID, "--json").exit_code == 1


def test_the_place_that_a_log_prints_shows_the_message(client: ScriptedClient) -> None:
    found = {"message_id": ID, "partition": 3, "offset": 17, "body": b64encode(b"x").decode()}
    client.replies = [{"messages": [found], "next": None}, {"messages": [], "next": None}]
    shown = run("message", "show", "orders/3/17", "--json")
    assert json.loads(shown.stdout)["message_id"] == ID
    place = {"topic": "orders", "partition": 3, "offset": 17, "limit": 1, "bodies": True}
    assert client.calls == [("message.find", place)]
    gone = run("message", "show", "orders/3/18")
    assert (gone.exit_code, "no message is at orders/3/18: it was not sent" in gone.stdout) == (
        1,
        True,
    )


def test_what_is_no_id_is_told_how_one_looks(client: ScriptedClient) -> None:
    for command in (
        ("message", "show", "00ff"),
        ("message", "recall", "x"),
        ("trace", "--id", "x"),
    ):
        told = run(*command)
        assert told.exit_code == 2
        assert "invalid message id" in told.stderr
    assert client.calls == []


def test_letters_show_text_as_text_and_other_bodies_in_base64(client: ScriptedClient) -> None:
    letters = [letter(1, body="aGVsbG8="), letter(2, body="/w=="), letter(3)]
    client.replies = [{"letters": letters, "next": "ff", "scanned": 3}]
    result = run("dlq", "list", "billing", "--body", "--after", "ee", "--limit", "5", "--json")
    args = {"group": "billing", "select": {}, "cursor": "ee", "limit": 5, "bodies": True}
    assert client.calls == [("dlq.list", args)]
    assert json.loads(result.stdout) == {
        "letters": [letter(1, body="hello"), letter(2, body_base64="/w=="), letter(3)],
        "next": "ff",
        "scanned": 3,
    }


def test_a_list_goes_on_until_it_has_what_it_may_and_says_what_was_scanned(
    client: ScriptedClient,
) -> None:
    pages = [([], "aa"), ([letter(1)], "bb"), ([letter(2), letter(3)], "cc")]
    client.replies = [
        {"letters": letters, "next": cursor, "scanned": 5_000} for letters, cursor in pages
    ]
    where = ("--where", 'text:"no such" attempts:3..5', "-w", "header:tenant")
    result = run("dlq", "list", "billing", *where, "--limit", "3", "--json")
    select = {"text": "no such", "min_attempts": 3, "max_attempts": 5, "header": ["tenant", None]}
    assert [args["select"] for _call, args in client.calls] == [select] * 3
    assert [args.get("cursor") for _call, args in client.calls] == [None, "aa", "bb"]
    assert [args["limit"] for _call, args in client.calls] == [3, 3, 2]
    output = json.loads(result.stdout)
    assert (len(output["letters"]), output["next"], output["scanned"]) == (3, "cc", 15_000)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("topic:orders key:a=b", {"topic": "orders", "key": "a=b"}),
        ('fingerprint:"" attempts>=4', {"fingerprint": "", "min_attempts": 4}),
        ("after:2026-07-01T12:00:00Z", {"died_from": 1_782_907_200_000_000}),
        ("group:billing state:abandoned", {"states": ["abandoned"]}),
    ],
)
def test_a_filter_selects_letters(
    client: ScriptedClient, text: str, wanted: dict[str, object]
) -> None:
    client.replies = [{"letters": [], "next": None, "scanned": 0}]
    run("dlq", "list", "billing", "--where", text, "--json")
    assert client.calls[0][1]["select"] == wanted


def test_statistics_show_errors_in_one_table(client: ScriptedClient) -> None:
    row = {"fingerprint": "f\x1b[2J", "error_type": "<b>E", "letters": 2, "note": "a\nb\u202e"}
    counted = {"counted": 2, "by_fingerprint": {"f": 2}, "fingerprints": [row]}
    counted["top_keys"] = [
        {"key": "k7", "key_hash": 7, "letters": 2}, {"key": None, "key_hash": 8, "letters": 1},
    ]  # fmt: skip
    client.replies = [dict(counted), dict(counted)]
    shown = run("dlq", "stats", "billing").stdout
    assert "by_fingerprint" not in shown
    assert [line.split() for line in shown.splitlines()[-2:]] == [["k7", "2"], ["hash", "8", "1"]]
    [line] = [line for line in shown.splitlines() if "<b>E" in line]
    assert "f\\x1b[2J" in line
    assert "a\\nb\\u202e" in line
    assert json.loads(run("dlq", "stats", "billing", "--json").stdout) == counted


@pytest.mark.parametrize("token", [TOKEN, "019A0000-0000-7000-8000-000000000001"])
def test_a_transaction_shows_its_messages_as_text_where_they_are_text(
    client: ScriptedClient, token: str
) -> None:
    rows = [{"key": "a", "body": "aGVsbG8="}, {"key": "b", "body": "/w=="}, {"key": "c"}]
    client.replies = [{"token": TOKEN, "rows": rows, "next": 5}]
    result = run("tx", "show", token, "--bodies", "--after", "2", "--limit", "3", "--json")
    args = {"token": TOKEN, "detail": True, "after": 2, "limit": 3, "bodies": True}
    assert client.calls == [("tx.show", args)]
    output = [{"key": "a", "body": "hello"}, {"key": "b", "body_base64": "/w=="}, {"key": "c"}]
    assert json.loads(result.stdout) == {"token": TOKEN, "rows": output, "next": 5}


def test_letters_named_one_by_one_are_replayed_without_a_question(client: ScriptedClient) -> None:
    client.replies = [{"done": [["orders", 3, 17], ["orders", 3, 18]], "refused": []}]
    result = run("dlq", "replay", "billing", "orders/3/17", "orders/3/18")
    letters = [("orders", 3, 17), ("orders", 3, 18)]
    assert client.calls == [("dlq.replay", {"group": "billing", "letters": letters} | BY_ADA)]
    assert result.stdout.split() == ["done", "2"]


def test_what_is_retried_is_listed_with_its_next_attempt(client: ScriptedClient) -> None:
    waits = letter(17, state="retrying", next_at=1_782_907_200_000_000, error_text="boom")
    rows = [
        waits | {"dead_at": 0, "held_by": ""},
        letter(18, state="local", held_by="m on h", error_text=""),
    ]
    client.replies = [{"letters": rows, "next": None, "scanned": 2}]
    shown = run("retry", "list", "billing", "--where", "error:E").stdout
    [(call, args)] = client.calls
    assert (call, args["select"]) == (
        "dlq.list", {"states": ["retrying", "replaying", "local"], "error_type": "E"},
    )  # fmt: skip
    assert "next_at" in shown
    assert "2026-07-01 12:00:00.000Z" in shown
    assert "m on h" in shown
    assert "dead_at" not in shown


def test_what_is_retried_is_changed_by_places_or_a_selection_after_a_yes(
    client: ScriptedClient,
) -> None:
    done = {"done": [["orders", 3, 17]], "refused": [], "next": None}
    client.replies = [done, {"counted": 1, "complete": True}, done]
    assert run("retry", "now", "billing", "orders/3/17").stdout.split() == ["done", "1"]
    result = run("retry", "bury", "billing", "--where", "state:retrying", *WHY, stdin="y\n")
    assert "Bury 1 message of group billing?" in result.stderr
    calls = [call for call, _args in client.calls]
    assert calls == ["retry.now", "dlq.stats", "retry.bury"]
    assert client.calls[2][1]["select"] == {"states": ["retrying"]}
    for wrong in ((), ("orders/3/17", "--all"), ("--all", "--where", "key:k")):
        assert run("retry", "now", "billing", *wrong).exit_code == 2


def test_refused_letters_make_the_status_1(client: ScriptedClient) -> None:
    client.replies = [
        {"done": [["orders", 3, 17]], "refused": [["orders", 3, 18, "no such letter"]]}
    ] * 2
    command = ("dlq", "abandon", "billing", "orders/3/17", "orders/3/18", *WHY)
    result = run(*command)
    assert result.exit_code == 1
    assert "no such letter" in result.stdout
    result = run(*command, "--json")
    refused = {"topic": "orders", "partition": 3, "offset": 18, "why": "no such letter"}
    assert json.loads(result.stdout) == {"done": [["orders", 3, 17]], "refused": [refused]}
    assert client.calls[0][1]["reason"] == "lost on 3 May"


def test_a_selection_is_replayed_in_portions_after_a_yes(client: ScriptedClient) -> None:
    client.replies = [
        {"counted": 1_002, "complete": True},
        {"done": [["orders", 3, 0]] * 1_000, "refused": [], "next": "aa", "scanned": 1_000},
        {"done": [["orders", 3, 0]] * 2, "refused": [], "next": None, "scanned": 2},
    ]
    result = run("dlq", "replay", "billing", "--where", "text=x", stdin="y\n")
    assert "Replay 1,002 letters" in result.stderr
    assert [call for call, _args in client.calls] == ["dlq.stats", "dlq.replay", "dlq.replay"]
    assert [args["select"] for _call, args in client.calls] == [{"text": "x"}] * 3
    assert [args.get("cursor") for _call, args in client.calls] == [None, None, "aa"]
    assert result.stdout.split()[-2:] == ["done", "1002"]


def test_a_selection_that_was_not_counted_to_its_end_says_so(client: ScriptedClient) -> None:
    client.replies = [{"counted": 7, "complete": False}]
    refused = run("dlq", "replay", "billing", "--where", "text=x", stdin="n\n")
    assert "more than 7 letters" in refused.stderr
    assert len(client.calls) == 1


@pytest.mark.parametrize("stdin", ["n\n", ""])
def test_all_letters_are_not_abandoned_without_a_yes(client: ScriptedClient, stdin: str) -> None:
    client.replies = [{"counted": 1, "complete": True}]
    refused = run("dlq", "abandon", "billing", "--all", *WHY, stdin=stdin)
    assert refused.exit_code == 1
    assert "Abandon 1 letter of group billing?" in refused.stderr
    assert refused.stderr.endswith("txmq: nothing was done (answer y, or add --yes)\n")
    assert [call for call, _args in client.calls] == ["dlq.stats"]


def test_a_message_that_is_only_in_a_topic_is_looked_for_in_all(client: ScriptedClient) -> None:
    page = {"messages": [], "next": [7, 0, 4_096], "at": "orders"}
    last: dict[str, object] = {"messages": [], "next": None}
    client.replies = [{"message": None}, page, last]
    ended = run("message", "show", ID)
    assert ended.exit_code == 1
    assert f"no message has the id {ID}" in ended.stdout
    assert [args.get("after") for _call, args in client.calls] == [None, None, [7, 0, 4_096]]


def test_what_was_refused_stands_beside_the_number_of_what_was_done(
    client: ScriptedClient,
) -> None:
    reply = {"done": [["t", 0, 1]], "refused": [["t", 0, 2, "in plan p"]]}
    client.replies = [dict(reply), {**reply, "refused": []}]
    ended = run("dlq", "replay", "g", "t/0/1", "t/0/2")
    assert ended.exit_code == 1
    assert [line.split() for line in ended.stdout.splitlines() if line] == [
        ["done", "1"], ["refused"], ["place", "why"], ["t/0/2", "in", "plan", "p"]
    ]  # fmt: skip
    assert run("dlq", "replay", "g", "t/0/1").stdout.split() == ["done", "1"]


def test_what_is_selected_reads_as_a_filter(client: ScriptedClient) -> None:
    select = {"error_type": "E", "header": ["tenant", "blue"]}
    client.replies = [
        {"selections": [{"name": "late", "select": select}], "next": None},
        {"policies": [{"group": "g", "select": select}], "next": None},
    ]
    assert 'error:E header:"tenant=blue"' in run("dlq", "select", "list").stdout
    assert 'error:E header:"tenant=blue"' in run("policy", "list").stdout


def test_a_letter_is_shown_with_its_attempts_one_line_each(client: ScriptedClient) -> None:
    text = "Traceback:\n  File x\nValueError: \x1b[2J\u202eorder\n"
    attempt = {"at": 1_700_000_000_000_000, "attempt": 1, "consumer": "c\x1b[31m"}
    attempt |= {"error_type": "E\nforged", "error_text": text}
    letter = {"topic": "t", "failures": 20, "history": [attempt]}
    reply = {**letter, "history": [dict(attempt)]}
    client.replies = [reply, NO_DELIVERIES, {**letter, "history": [dict(attempt)]}, NO_DELIVERIES]
    shown = run("dlq", "show", "g", "t/0/1").stdout
    [line] = [line for line in shown.splitlines() if "order" in line]
    assert "2023-11-14" in line
    assert "c\\x1b[31m" in line
    assert "E\\nforged" in line
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "File x" not in shown
    told = json.loads(run("dlq", "show", "g", "t/0/1", "--json").stdout)
    assert (told.pop("deliveries"), told.pop("deliveries_known")["whole"]) == ([], True)
    assert told == letter


def test_the_list_of_letters_shows_the_last_line_of_a_traceback(client: ScriptedClient) -> None:
    text = "Traceback (most recent call last):\n  File x\nValueError: no such order\n"
    letter = {"topic": "t", "partition": 0, "offset": 1, "error_text": text}
    client.replies = [{"letters": [dict(letter)], "next": None, "scanned": 1} for _ in range(2)]
    [line] = [line for line in run("dlq", "list", "g").stdout.splitlines() if "order" in line]
    assert line.startswith("t/0/1  ")  # as `dlq show` and all other commands take it
    assert line.split("  ")[-1].strip() == "ValueError: no such order"
    assert json.loads(run("dlq", "list", "g", "--json").stdout)["letters"] == [letter]
