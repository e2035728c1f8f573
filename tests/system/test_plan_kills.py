"""A broker killed at each step of a replay plan, and the operator's command."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL
from typing import Any

import txmq
from tests.cli.peer import Peer, peer
from tests.reporting import Report
from tests.system.test_adoption_kills import broker
from txmq.crashpoints import VARIABLE
from txmq.errors import TxmqError
from txmq.testing.processes import ENVIRONMENT, Running
from txmq.testing.wait import wait_until
from txmq.wire.data_requests import AckedRange

LETTERS = 6
SETTINGS = {"rate": 0, "ramp_s": 0, "canary": 2, "start": True}
# in the order in which a plan gets there; what the broker needs to get there
POINTS = {
    "plan.before_add": "create",
    "plan.after_add": "",
    "plan.before_freeze": "",
    "plan.after_freeze": "",
    "plan.after_step": "",
    "plan.after_canary": "consume",
    "plan.after_step:1": "",
    "plan.after_end": "consume",
    "plan.after_sweep": "",
    "plan.after_tidy": "delete",
}


def consume(connection: Peer, got: Counter[int]) -> None:
    """Ack what the group gets, each message by itself."""
    joined = connection.call("consumer.join", group="g", member="w", instance="w", topics=["t"])
    claim = {"group": "g", "member": "w", "generation": joined["generation"]}
    while chunks := connection.fetch(**claim, wait_ms=300):
        for chunk in chunks:
            first = chunk.base_offset + chunk.first_row
            for offset in range(first, first + chunk.rows):
                got[offset] += 1
                acked = AckedRange("t", chunk.partition, offset, offset + 1)
                connection.ack("g", "w", joined["generation"], acked)


def test_a_plan_outlives_kills_of_the_broker_at_each_step(tmp_path: Path, report: Report) -> None:
    got, kills = Counter[int](), 0
    with broker(tmp_path) as (url, _process), peer(url) as connection:
        connection.call("topic.create", name="t", partitions=1)
        with txmq.connect(url) as client:
            for number in range(LETTERS):
                client.send("t", b"m", key=f"k{number % 2}")
        connection.dead_letters("g", "t", LETTERS)
    for point, order in POINTS.items():
        with broker(tmp_path, point) as (url, process):
            with suppress(TxmqError), peer(url) as connection:
                if order == "create":
                    connection.call(
                        "plan.create", name="p", group="g", select={}, settings=SETTINGS
                    )
                elif order == "consume":
                    while True:  # until the broker dies
                        consume(connection, got)
                elif order:
                    connection.call(f"plan.{order}", name="p")
            assert process.status() == -SIGKILL, point
            kills += 1
        if point == "plan.after_sweep":
            check_end(tmp_path)
    with broker(tmp_path) as (url, _process), peer(url) as connection:
        assert connection.call("plan.list")["plans"] == []
        consume(connection, got)
    assert got == dict.fromkeys(range(LETTERS), 1)
    report({"kills": kills, "letters": got.total()})


def test_a_plan_that_abandons_outlives_kills_after_each_step(tmp_path: Path) -> None:
    with broker(tmp_path) as (url, _process), peer(url) as connection:
        connection.call("topic.create", name="t", partitions=1)
        with txmq.connect(url) as client:
            client.send_many("t", [b"m"] * LETTERS)
        connection.dead_letters("g", "t", LETTERS)
        settings = SETTINGS | {"start": False}
        connection.call("plan.create", name="p", group="g", select={}, settings=settings)
    for number in range(2):  # behind the letters, and at the end
        with broker(tmp_path, "plan.after_abandon") as (url, process):
            if not number:
                with suppress(TxmqError), peer(url) as connection:
                    wait_until(lambda: connection.call("plan.show", name="p")["state"] == "planned")
                    connection.call("plan.abandon", name="p", reason="sent again")
            assert process.status() == -SIGKILL
    with broker(tmp_path) as (url, _process), peer(url) as connection:
        shown = connection.call("plan.show", name="p")
        assert (shown["state"], shown["ended"], shown["letters"]) == ("done", LETTERS, LETTERS)
        assert connection.call("dlq.stats", group="g")["letters"] == 0


def check_end(directory: Path) -> None:
    with broker(directory) as (url, _process), peer(url) as connection:
        shown: dict[str, Any] = connection.call("plan.show", name="p")
        assert (shown["state"], shown["letters"], shown["processed"]) == ("done", LETTERS, LETTERS)


def test_a_replay_goes_on_without_the_command_that_began_it(tmp_path: Path) -> None:
    with broker(tmp_path) as (url, _process), peer(url) as connection:
        connection.call("topic.create", name="t", partitions=1)
        with txmq.connect(url) as client:
            for _ in range(LETTERS):
                client.send("t", b"m")
        connection.dead_letters("g", "t", LETTERS)
        environment = {**ENVIRONMENT, VARIABLE: "plan.after_create"}
        (tmp_path / "cli").mkdir()
        command = Running(
            tmp_path / "cli", "dlq", "replay", "g", "--all", "--yes", "--broker", url,
            environment=environment,
        )  # fmt: skip
        assert command.status() == -SIGKILL
        [plan] = connection.call("plan.list")["plans"]
        name = plan["name"]
        wait_until(
            lambda: connection.call("plan.show", name=name)["delivered"] == LETTERS,
            what="the letters are put back",
        )
