"""Calls of the commands of groups and topics, and their confirmations."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cli.support import BY_ADA, WHY, ScriptedClient, client, run

__all__ = ["client"]


@pytest.mark.parametrize(
    ("to", "sent"),
    [
        (["first"], "first"),
        (["last"], "last"),
        (["2026-07-01T12:00:00Z"], 1_782_907_200_000_000),
        (["0=17", "3=9"], {"0": 17, "3": 9}),
    ],
)
def test_a_reset_shows_what_it_would_do_before_it_asks(
    client: ScriptedClient, to: list[str], sent: object
) -> None:
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
    assert "Move group" in result.stderr


@pytest.mark.parametrize("stdin", ["n\n", ""])
def test_a_reset_that_is_not_confirmed_is_not_done(client: ScriptedClient, stdin: str) -> None:
    client.replies = [{"positions": []}]
    assert run("group", "reset", "billing", "orders", "--to", "first", stdin=stdin).exit_code == 1
    assert [args.get("dry_run") for _call, args in client.calls] == [True]


@pytest.mark.parametrize(
    ("option", "runs"),
    [
        ("--dry-run", [True]),
        ("--preview", [True]),
        ("--yes", [None]),
        ("--json", [None]),
        ("--json --dry-run", [True]),
    ],
)
def test_a_preview_and_a_confirmed_reset_ask_nothing(
    client: ScriptedClient, option: str, runs: list[bool | None]
) -> None:
    client.replies = [{"positions": []}]
    assert (
        run("group", "reset", "billing", "orders", "--to", "first", *option.split()).exit_code == 0
    )
    assert [args.get("dry_run") for _call, args in client.calls] == runs


def test_a_group_can_go_back_by_a_duration(
    client: ScriptedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(time_ns=lambda: 10_000_000_000_000)
    monkeypatch.setattr("txmq.cli.parsers.time", clock)
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
def test_a_backlog_is_skipped_topic_by_topic(
    client: ScriptedClient, options: str, moves: list[Any]
) -> None:
    shown = {
        "topics": ["orders", "refunds"],
        "positions": [{"topic": "orders", "partition": 1, "end": 40}],
    }
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
            {
                "on_exhausted": "block",
                "lease_ms": 2_500,
                "session_ms": 9_000,
                "consume_timeout_ms": 60_000,
            },
        ),
        ("--keep-until-exported", {"keep_until_exported": True}),
        ("--expire-unexported", {"keep_until_exported": False}),
        ("--alarm-severity off", {"alarm_severity": "off"}),
        (
            "--limit messages_per_s=5 --limit cold_bytes_per_s=2MiB",
            {"messages_per_s": 5, "cold_bytes_per_s": 2 << 20},
        ),
        ("--max-parked 5 --flood-keys 0 --span 9", {"max_parked": 5, "flood_keys": 0, "span": 9}),
        (
            "--table 1,2.5",
            {"retry": {"delays_us": [1_000_000, 2_500_000], "retries": None, "jitter": 0.1}},
        ),
        (
            "--exponential 1,3,10 --retries 9",
            {
                "retry": {
                    "delays_us": [1_000_000, 3_000_000, 9_000_000, 10_000_000],
                    "retries": 9,
                    "jitter": 0.1,
                }
            },
        ),
        (
            "--jitter 0.2 --dead ValueError --dead a.* --postpone OSError",
            {
                "retry": {
                    "delays_us": [7],
                    "retries": 3,
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
    shown = {"settings": {"retry": {"delays_us": [7], "retries": 3, "jitter": 0.1}}}
    client.replies = [shown, {}] if "retry" in changed else [{}]
    assert run("group", "alter", "billing", *options.split()).exit_code == 0
    assert client.calls[-1] == ("group.alter", {"group": "billing"} | BY_ADA | NOTHING | changed)


def test_altered_settings_are_shown_with_times_in_seconds(client: ScriptedClient) -> None:
    reply = {"settings": {"lease_us": 90_000_000, "retry": {"delays_us": [500_000], "retries": 3}}}
    client.replies = [reply, reply]
    shown = run("group", "alter", "billing", "--lease", "90").stdout.split("\n")
    assert ["lease_s", "90.0"] in [line.split() for line in shown]
    assert ["retry_delays_s", "0.5"] in [line.split() for line in shown]
    printed = run("group", "alter", "billing", "--lease", "90", "--json").stdout
    assert json.loads(printed) == reply


def test_deleting_a_topic_has_to_be_confirmed(client: ScriptedClient) -> None:
    assert run("topic", "delete", "orders", stdin="n\n").exit_code == 1
    assert client.calls == []
    client.replies = [{"name": "orders"}]
    assert run("topic", "delete", "orders", stdin="y\n").exit_code == 0
