"""Replay plans on the command line, against a broker that runs."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.cli.peer import peer
from tests.cli.support import reply, run
from txmq.testing.processes import running


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("broker")
    arguments = ("broker", "--data", str(directory / "data"), "--listen", "127.0.0.1:0")
    with running(directory, *arguments) as process:
        yield process.first_line().removeprefix("ready ")


def test_a_plan_goes_from_its_creation_to_its_end(broker: str) -> None:
    for number in range(5):
        reply("send", "bills", str(number), "--partition", "0", broker=broker)
    with peer(broker) as billing:
        billing.dead_letters("billing", "bills", 5)
    made = reply(
        "plan", "create", "billing", "--all", "--name", "p", "--rate", "0", "--canary", "2",
        "--ramp", "0", "--hold", "--second-approver", "--operator", "ada", broker=broker,
    )  # fmt: skip
    assert (made["state"], made["letters"], made["planned"]) == ("planned", 5, 5)
    assert reply("plan", "check", "p", broker=broker)["would_replay"] == 5
    early = run("plan", "start", "p", "--broker", broker)
    assert early.exit_code == 1
    assert "approve" in early.stderr
    reply("plan", "approve", "p", "--operator", "bob", broker=broker)
    assert reply("plan", "start", "p", broker=broker)["state"] == "canary"
    refused = run("dlq", "replay", "billing", "bills/0/4", "--broker", broker, "--json")
    assert refused.exit_code == 1
    assert json.loads(refused.stdout)["refused"][0]["why"] == "in plan p"
    assert "canary" in run("plan", "list", "--broker", broker).stdout
    reply("plan", "cancel", "p", "--reason", "enough", broker=broker)
    exported = run("plan", "export", "p", "--broker", broker).stdout.splitlines()
    assert [json.loads(line)["offset"] for line in exported] == [0, 1, 2, 3, 4]
    found = reply("plan", "letters", "p", "--outcome", "planned", broker=broker)["letters"]
    assert [one["offset"] for one in found] == [2, 3, 4]
    reply("plan", "delete", "p", broker=broker)
    assert run("plan", "show", "p", "--broker", broker).exit_code == 1
    all_of_it = reply("dlq", "replay", "billing", "--all", broker=broker)
    assert len(all_of_it["done"]) == 3
    assert reply("plan", "show", all_of_it["plan"], broker=broker)["delivered"] == 3
