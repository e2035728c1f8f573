"""Calls that commands make, and the replies that they print."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli.support import NOBODY, TOKEN, ScriptedClient, client, run
from txmq.errors import BrokerUnavailable, UnknownGroup

__all__ = ["client"]


@pytest.mark.parametrize(
    ("arguments", "call", "args"),
    [
        ("topic create orders", "topic.create", {"name": "orders", "partitions": 8}),
        ("topic create orders --partitions 3", "topic.create", {"name": "orders", "partitions": 3}),
        (
            "topic create orders --set retention=7d --set flush=10ms,1000 --set policy=archive",
            "topic.create",
            {
                "name": "orders",
                "partitions": 8,
                "retention_ms": 604_800_000,
                "flush": [10, 1_000],
                "policy": "archive",
            },
        ),
        (
            (
                "topic alter orders --set retention=none --set retention-size=1.5GiB"
                " --set letters=default"
            ),
            "topic.alter",
            {
                "name": "orders",
                "retention_ms": 0,
                "retention_bytes": 3 << 29,
                "letters_ms": "default",
                "operator": "ada",
                "reason": "",
            },
        ),
        (
            (
                "topic alter orders --set max-message=64KiB --set writable=no --set readable=yes"
                " --set flush=sync"
            ),
            "topic.alter",
            {
                "name": "orders",
                "message_bytes": 65_536,
                "writable": False,
                "readable": True,
                "flush": "sync",
                "operator": "ada",
                "reason": "",
            },
        ),
        ("stats --limit 5", "broker.stats", {"limit": 5}),
        ("topic list", "topic.list", {"limit": 1_000, "own": False}),
        ("topic show orders", "topic.show", {"name": "orders"}),
        (
            "topic set orders --partitions 9",
            "topic.grow",
            {"name": "orders", "partitions": 9, "operator": "ada", "reason": ""},
        ),
        (
            "topic delete orders --yes",
            "topic.delete",
            {"name": "orders", "operator": "ada", "reason": ""},
        ),
        ("group list", "group.list", {"limit": 1_000}),
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
        (
            "group delete billing --yes",
            "group.delete",
            {"group": "billing", "operator": "ada", "reason": ""},
        ),
        ("tx list", "tx.list", {"state": "undecided", "limit": 100}),
        ("tx list --state in-doubt --limit 7", "tx.list", {"state": "in-doubt", "limit": 7}),
        ("tx list --state open", "tx.list", {"state": "open", "limit": 100}),
        ("tx list --state conflicts", "tx.list", {"state": "conflicts", "limit": 100}),
        ("tx check", "tx.check", {"token": None}),
        (f"tx check {TOKEN}", "tx.check", {"token": TOKEN}),
        (
            f"tx commit {TOKEN} --reason seen",
            "tx.decide",
            {
                "token": TOKEN,
                "outcome": "COMMIT",
                "operator": "ada",
                "reason": "seen",
                "force": False,
            },
        ),
        (
            f"tx rollback {TOKEN} --reason lost --operator eve",
            "tx.decide",
            {
                "token": TOKEN,
                "outcome": "ROLLBACK",
                "operator": "eve",
                "reason": "lost",
                "force": False,
            },
        ),
        ("dlq stats billing", "dlq.stats", {"group": "billing", "select": {}}),
        ("dlq stats billing --select bees", "dlq.stats", {"group": "billing", "saved": "bees"}),
        (
            "dlq note billing f-1 seen --operator ada",
            "dlq.note",
            {
                "group": "billing",
                "fingerprint": "f-1",
                "text": "seen",
                "operator": "ada",
                "reason": "",
            },
        ),
        (
            "dlq note billing f-1 --delete --operator ada",
            "dlq.note",
            {"group": "billing", "fingerprint": "f-1", "text": "", "operator": "ada", "reason": ""},
        ),
        (
            "dlq select save bees -w error=B -w state=open -w state=local --operator ada",
            "dlq.save",
            {
                "name": "bees",
                "select": {"error_type": "B", "states": ["open", "local"]},
                "operator": "ada",
                "reason": "",
            },
        ),
        (
            "dlq select delete bees --operator ada --reason old",
            "dlq.save",
            {"name": "bees", "select": None, "operator": "ada", "reason": "old"},
        ),
        ("message delayed", "message.delayed", {"topic": None, "after": None, "limit": 100}),
        (
            "message delayed --topic orders --after 7,8 --limit 3",
            "message.delayed",
            {"topic": "orders", "after": (7, 8), "limit": 3},
        ),
        (f"message recall {'0a' * 16}-1", "message.recall", {"ids": [f"{'0a' * 16}-1"]}),
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
    client.replies = [{"topics": [], "next": None} for _ in range(3)]
    run("topic", "list")
    assert client.url == "txmq://127.0.0.1:7650"
    monkeypatch.setenv("TXMQ_BROKER", "txmq://there:1")
    run("topic", "list")
    assert client.url == "txmq://there:1"
    run("topic", "list", "--broker", "txmq://elsewhere:2")
    assert client.url == "txmq://elsewhere:2"


def test_a_long_list_is_read_page_by_page(client: ScriptedClient) -> None:
    client.replies = [
        {"topics": [{"name": "a"}], "next": "a"},
        {"topics": [{"name": "b"}], "next": None},
    ]
    result = run("topic", "list", "--json")
    assert json.loads(result.stdout) == {"topics": [{"name": "a"}, {"name": "b"}]}
    assert [args for _call, args in client.calls] == [
        {"limit": 1_000, "own": False},
        {"limit": 1_000, "own": False, "after": "a"},
    ]


def test_grants_of_more_users_than_a_page_has_are_listed(client: ScriptedClient) -> None:
    ada = {"user": "ada", "roles": ["admin"], "grants": []}
    bob = {"user": "bob", "roles": [], "grants": ["read topic:a"]}
    client.replies = [{"users": [ada], "next": "ada"}, {"users": [bob], "next": None}]
    assert json.loads(run("acl", "list", "--json").stdout)["grants"] == [
        {"user": "ada", "what": "admin", "resource": "*"},
        {"user": "bob", "what": "read", "resource": "topic:a"},
    ]
    assert client.calls[1] == ("user.list", {"limit": 1_000, "after": "ada", "name": None})


def test_a_password_that_is_no_text_is_an_error_with_a_hint(client: ScriptedClient) -> None:
    refused = run("user", "password", "ada", "--password-file", "-", "--json", stdin=b"\xff\n")
    error = json.loads(refused.stderr)
    assert (refused.exit_code, error["error"], error["hint"]) == (
        1,
        "ConfigError",
        "give UTF-8 text",
    )
    assert client.calls == []


def test_an_error_is_printed_on_standard_error_with_status_1(client: ScriptedClient) -> None:
    client.replies = [
        UnknownGroup("no group 'x'", hint="see: txmq group list"),
        BrokerUnavailable("nobody there"),
    ]
    result = run("group", "show", "x")
    assert (result.exit_code, result.stdout, result.stderr) == (
        1,
        "",
        "txmq: no group 'x' (see: txmq group list)\n",
    )
    result = run("group", "show", "x", "--json")
    assert (result.exit_code, result.stdout, json.loads(result.stderr)["error"]) == (
        1,
        "",
        "BrokerUnavailable",
    )


@pytest.mark.parametrize(
    "arguments",
    [
        "nothing",
        "topic",
        "topic create",
        "topic create .hidden",
        "topic create orders --partitions 0",
        "topic create orders --partitions many",
        "topic create orders --set retention=999999999999w",
        "topic create orders --set max-message=999999999999TiB",
        "message delayed --after 99999999999999999999,1",
        "topic set orders",
        "topic alter orders",
        "group alter billing",
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
        "group alter billing --jitter nan",
        "group alter billing --lease inf",
        "group alter billing --table 1 --exponential 1,2,3",
        "group alter billing --table inf",
        f"group alter billing --span {1 << 63}",
        "dlq try billing orders/0/1 --member m --timeout nan",
        "plan create billing --all --rate nan",
        "user quota ada --set topics=" + "9" * 5_000,
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
        "dlq replay billing --all --where text=x",
        "dlq list billing --where errr:ValueError",
        "dlq list billing --where group:other",
        "dlq select save mine --where group:billing",
        "dlq list billing --where text:a --where text:b",
        "dlq list billing --where from:yesterday",
        "dlq list billing --where text=x --select bees",
        "dlq note billing f-1",
        "dlq note billing f-1 text --delete",
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


def test_series_are_summed_up_for_people(client: ScriptedClient) -> None:
    page = {"step_s": 10, "end": 1, "names": ["lag"], "series": {"lag": [1.0, None, 5.0, 2.0]}}
    client.replies = [dict(page) for _ in range(4)]
    assert (
        json.loads(run("stats", "--history", "hour", "--json").stdout)["series"] == page["series"]
    )
    assert run("stats", "--history", "day").stdout.split()[-4:] == ["lag", "2.0", "1.0", "5.0"]


def test_the_histogram_of_flushes_is_for_programs(client: ScriptedClient) -> None:
    client.replies = [{"flush": {"count": 3, "buckets": [[50, 3]]}} for _ in range(2)]
    output = run("stats").stdout
    assert "count=3" in output
    assert "buckets" not in output
    assert json.loads(run("stats", "--json").stdout)["flush"]["buckets"] == [[50, 3]]


@pytest.mark.parametrize("moment", ["1969-12-31T23:59:59Z", "0001-01-01", "9999-12-31T23:59-12:00"])
@pytest.mark.parametrize(
    "asked",
    [
        ("tail", "orders", "--from="),
        ("send", "orders", "body", "--deliver-at="),
        ("group", "reset", "billing", "orders", "--to="),
    ],
)
def test_a_time_that_no_message_can_have_is_out_of_range(
    asked: tuple[str, ...], moment: str
) -> None:
    *words, option = asked
    refused = run(*words, option + moment, "--broker", NOBODY)
    assert refused.exit_code == 2
    told = " ".join(refused.stderr.replace("│", " ").split())
    assert f"time '{moment}' is out of range: use 1970 to 9999" in told
