"""Replay plans on the command line, against a broker that runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cli.peer import peer
from tests.cli.support import ScriptedClient, client, reply, run
from tests.tx.postgres.support import LOG, rows
from txmq.testing.processes import running
from txmq.testing.wait import wait_until

__all__ = ["client"]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("broker")
    arguments = (
        "broker",
        "--create-topics",
        "--data",
        str(directory / "data"),
        "--listen",
        "127.0.0.1:0",
    )
    with running(directory, *arguments) as process:
        yield process.first_line().removeprefix("ready ")


def test_a_plan_goes_from_its_creation_to_its_end(broker: str) -> None:
    for number in range(5):
        reply("send", "bills", str(number), "--partition", "0", broker=broker)
    with peer(broker) as billing:
        billing.dead_letters("billing", "bills", 5)
    made = reply(
        "plan", "create", "billing", "--all", "--name", "p", "--rate", "0", "--canary", "2",
        "--ramp", "0", "--pause", "--second-approver", "--operator", "ada", broker=broker,
    )  # fmt: skip
    assert (made["state"], made["letters"], made["planned"]) == ("planned", 5, 5)
    assert reply("plan", "check", "p", broker=broker)["would_replay"] == 5
    early = run("plan", "start", "p", "--broker", broker)
    assert early.exit_code == 1
    assert "approve" in early.stderr
    [place, *_] = reply("plan", "letters", "p", broker=broker)["letters"]
    taken = "/".join(str(place[part]) for part in ("topic", "partition", "offset"))
    assert reply("plan", "leave", "p", taken, "--reason", "mine", broker=broker)["left"] == 1
    reply("plan", "approve", "p", "--operator", "bob", broker=broker)
    assert reply("plan", "start", "p", broker=broker)["state"] == "canary"
    refused = run("dlq", "replay", "billing", "bills/0/4", "--broker", broker, "--json")
    assert refused.exit_code == 1
    assert json.loads(refused.stdout)["refused"][0]["why"] == "in plan p"
    assert "canary" in run("plan", "list", "--broker", broker).stdout
    wait_until(lambda: reply("plan", "show", "p", broker=broker)["delivered"] == 2)
    reply("plan", "cancel", "p", "--reason", "enough", broker=broker)
    listed = run("plan", "list", "--broker", broker)
    assert "finished plans that are not shown: 1 (use --all)" in listed.stderr
    assert "cancelled plans with letters without an outcome: 1\n" in listed.stderr
    assert "canary" not in listed.stdout
    assert reply("plan", "list", "--all", broker=broker)["plans"][0]["state"] == "cancelled"
    exported = run("plan", "export", "p", "--broker", broker).stdout.splitlines()
    assert [json.loads(line)["offset"] for line in exported] == [0, 1, 2, 3, 4]
    found = reply("plan", "letters", "p", "--outcome", "planned", broker=broker)["letters"]
    assert [one["offset"] for one in found] == [3, 4]
    reply("plan", "delete", "p", broker=broker)
    assert run("plan", "show", "p", "--broker", broker).exit_code == 1
    all_of_it = reply("dlq", "replay", "billing", "--all", broker=broker)
    assert len(all_of_it["done"]) == 3
    wait_until(lambda: reply("plan", "show", all_of_it["plan"], broker=broker)["delivered"] == 3)


def test_the_list_says_what_is_still_to_be_cleaned_up(client: ScriptedClient) -> None:
    plans = [
        {"name": name, "state": state, "cleanup_pending": pending}
        for name, state, pending in (
            ("runs", "ramping", True), ("a", "done", True), ("b", "done", False),
        )
    ]  # fmt: skip
    client.replies = [
        {"plans": plans, "deleting": 2, "next": None},
        {"plans": plans[2:], "next": None},
    ]
    told = run("plan", "list").stderr
    assert "finished plans with a cleanup pending: 1\n" in told
    assert "deleted plans that are still being removed: 2\n" in told
    assert "cleanup" not in run("plan", "list").stderr


class InboxBroker:
    """A client whose broker has a plan of three letters, in two epochs."""

    def call(self, name: str, /, **args: object) -> dict[str, Any]:
        place = {"topic": "orders", "topic_id": 7, "partition": 0, "epochs": [[0, 1], [10, 2]]}
        letters = [{"topic": "orders", "partition": 0, "offset": at} for at in (3, 8, 12)]
        replies: dict[str, dict[str, Any]] = {
            "plan.check": {
                "checked": 3, "edited": 0, "would_replay": 3, "would_skip": {}, "next": None,
            },
            "plan.show": {"group": "billing"},
            "plan.letters": {"letters": letters, "next": None},
            "group.show": {"positions": [place]},
            "broker.show": {"log_id": str(LOG)},
        }  # fmt: skip
        return replies[name]

    def close(self) -> None:
        pass


def test_a_dry_run_counts_what_the_inbox_has_applied(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txmq.cli.command.connect", lambda _url: InboxBroker())
    for epoch, applied in ((1, "{[0,5),[12,13)}"), (2, "{[12,13)}")):
        rows(
            database,
            "INSERT INTO txmq_inbox (grp, log_id, topic_id, partition, epoch, applied)"
            " VALUES ('billing', %s, 7, 0, %s, %s)",
            str(LOG),
            epoch,
            applied,
        )
    found = json.loads(run("plan", "check", "p", "--dsn", database, "--json").stdout)
    assert (found["checked"], found["applied"]) == (3, 2)


def test_an_outcome_that_there_is_not_names_those_there_are() -> None:
    refused = run("plan", "letters", "p", "--outcome", "dead")
    assert refused.exit_code == 2
    assert "died_again" in refused.stderr
