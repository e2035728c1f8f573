"""Logs that commands list together, at real brokers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import structlog

from tests.cli.support import NOBODY, reply, run
from tests.client.listed import BY, ask
from txmq.cli import command
from txmq.cli.command import CommandClient
from txmq.errors import BrokerUnavailable
from txmq.testing.broker_thread import BrokerThread


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[list[BrokerThread]]:
    """Three brokers. What they log is not among what commands print."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    with ExitStack() as opened:
        yield [opened.enter_context(BrokerThread(tmp_path / name)) for name in ("a", "b", "c")]


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """URLs where no broker answers, which is known at once."""
    urls = {NOBODY}
    connect = command.connect

    def connected(url: str) -> CommandClient:
        if url in urls:
            raise BrokerUnavailable(f"no broker answered at {url}")
        return connect(url)

    monkeypatch.setattr(command, "connect", connected)
    return urls


def refused(*arguments: str, broker: BrokerThread) -> str:
    """Return why a command did nothing."""
    before = described(broker)
    result = run(*arguments, "--broker", broker.url)
    assert result.exit_code == 1
    assert described(broker) == before
    return result.stderr


def described(broker: BrokerThread) -> Any:
    return ask(broker, "cluster.describe")["logs"]


def test_a_log_is_added_with_the_topics_of_the_first(logs: list[BrokerThread]) -> None:
    first, second, third = logs
    settings = ("--partitions", "3", "--set", "retention=7d", "--set", "note=mine")
    reply("topic", "create", "orders", *settings, broker=first.url)
    schema = json.dumps({"type": "object"})
    ask(first, "topic.schema", name="orders", json_schema=schema, compatibility="forward", **BY)
    added = ("cluster", "add-log", second.url)
    assert reply(*added, broker=first.url)["copies"][0]["error"] == ""
    made = reply("topic", "show", "orders", broker=second.url)
    wanted = reply("topic", "show", "orders", broker=first.url)
    assert (made["partitions"], made["schema"]) == (3, wanted["schema"])
    assert made["settings"] == wanted["settings"]
    reply(*added, broker=first.url)  # it may be repeated
    reply("cluster", "add-log", third.url, broker=first.url)
    shown = reply("cluster", "logs", broker=second.url)["logs"]
    assert [one["addresses"] for one in shown] == [one.url.removeprefix("txmq://") for one in logs]
    assert len({one["version"] for one in shown}) == 1
    assert reply("cluster", "logs", broker=first.url)["logs"] == shown
    reply("topic", "create", "refunds", broker=first.url)
    hint = "create it at each listed log: txmq topic create refunds"
    assert hint in refused("topic", "show", "refunds", broker=second)
    reply(*added, broker=first.url)  # it makes the topics that are new as well
    reply("topic", "show", "refunds", broker=second.url)


def test_a_command_that_was_cut_short_is_repeated(logs: list[BrokerThread]) -> None:
    first, second, third = logs
    reply("cluster", "add-log", second.url, broker=first.url)
    place = third.url.removeprefix("txmq://")
    added = {"log_id": ask(third, "cluster.describe")["log_id"], "addresses": place}
    ask(first, "cluster.add_logs", logs=[added], **BY)  # and no copy was made
    shown = run("cluster", "logs", "--json", "--broker", first.url)
    assert shown.exit_code == 1
    rows = json.loads(shown.stdout)["logs"]
    versions = [one["version"] for one in rows]
    assert versions[0] > versions[1] > versions[2] == 0
    older = "an older list: repeat txmq cluster add-log URL"
    assert [one["error"] for one in rows] == ["", older, older]
    reply("cluster", "add-log", third.url, broker=first.url)
    reply("cluster", "logs", broker=first.url)


def test_a_log_that_is_away_gets_its_copy_later(logs: list[BrokerThread], away: set[str]) -> None:
    first, second, third = logs
    reply("cluster", "add-log", second.url, broker=first.url)
    away.add(second.url)
    added = run("cluster", "add-log", third.url, "--json", "--broker", first.url)
    assert added.exit_code == 1
    copies = json.loads(added.stdout)["copies"]
    assert [bool(one["error"]) for one in copies] == [True, False]
    shown = run("cluster", "logs", "--json", "--broker", first.url)
    assert shown.exit_code == 1
    away.remove(second.url)
    reply("cluster", "add-log", third.url, broker=first.url)
    reply("cluster", "logs", broker=first.url)


@pytest.mark.usefixtures("away")
def test_what_cannot_be_added_is_refused(logs: list[BrokerThread], tmp_path: Path) -> None:
    first, second, third = logs
    assert "a node of the same log" in refused("cluster", "add-log", first.url, broker=first)
    elsewhere = "txmq://broker-2.example"
    assert "cannot reach 127.0.0.1" in refused("cluster", "add-log", elsewhere, broker=first)
    assert "no broker answered" in refused("cluster", "add-log", NOBODY, broker=first)
    reply("cluster", "add-log", second.url, broker=first.url)
    assert "is listed by another one" in refused("cluster", "add-log", second.url, broker=third)
    assert "which keeps the list" in refused("cluster", "add-log", third.url, broker=second)
    third.stop()
    clone = tmp_path / "clone"
    shutil.copytree(tmp_path / "b", clone)
    with BrokerThread(clone) as copy:
        assert "is listed already" in refused("cluster", "add-log", copy.url, broker=first)


def test_where_both_have_a_topic_somebody_says_where_its_keys_are(
    logs: list[BrokerThread],
) -> None:
    first, second, _third = logs
    for one in (first, second):
        reply("topic", "create", "orders", broker=one.url)
    said = refused("cluster", "add-log", second.url, broker=first)
    assert "topics are at several of these logs: orders" in said
    listed = reply("cluster", "add-log", second.url, "--together", broker=first.url)
    assert [one["keys_from"] for one in listed["logs"]] == [0, 0]


def test_a_log_that_starts_again_has_the_list(logs: list[BrokerThread], tmp_path: Path) -> None:
    first, second, _third = logs
    reply("cluster", "add-log", second.url, broker=first.url)
    known = described(second)
    second.stop()
    with BrokerThread(tmp_path / "b") as again:
        assert described(again) == known


def test_a_drained_log_is_removed(logs: list[BrokerThread]) -> None:
    first, second, _third = logs
    log_id = reply("cluster", "add-log", second.url, broker=first.url)["logs"][1]["log_id"]
    assert "is not drained" in refused("cluster", "remove-log", log_id, broker=first)
    own = ask(first, "cluster.describe")["log_id"]
    assert "it keeps the list, and stays" in refused("cluster", "remove-log", own, broker=first)
    drained = reply("cluster", "drain-log", log_id, broker=first.url)
    assert drained["logs"][1]["keys_to"] > 0
    assert reply("cluster", "logs", broker=second.url)["logs"][1]["drained"]
    assert len(reply("cluster", "remove-log", log_id, broker=first.url)["logs"]) == 1
