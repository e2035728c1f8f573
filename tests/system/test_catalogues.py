"""Catalogues that a process beside the broker builds, and a restarted broker uses."""

from __future__ import annotations

from pathlib import Path

import txmq
from tests.cli.support import run
from txmq.testing.own_broker import OwnBroker
from txmq.testing.wait import wait_until

SETTINGS = """
[catalogue]
mib = 0.05
every_s = 0.2
"""
SENT = 6_000


def find(client: txmq.Client, number: int) -> list[tuple[str | None, str]]:
    return [(found.key, found.message_id) for found in client.find("t", key=f"k{number}")]


def test_keys_and_ids_are_found_in_what_another_process_made(tmp_path: Path) -> None:
    files = tmp_path / "own" / "data" / "catalogue"
    with OwnBroker(tmp_path / "own", SETTINGS) as broker:
        with txmq.connect(broker.url, service="s") as client:
            for first in range(0, SENT, 2_000):
                numbers = range(first, first + 2_000)
                client.send_many(
                    "t", [b"x"] * len(numbers), keys=[f"k{number}" for number in numbers]
                )
            wait_until(
                lambda: client.call("broker.stats")["log"]["uncatalogued"] < 50_000,
                what="catalogues",
            )
            before = {number: find(client, number) for number in (0, 777, SENT - 1)}
            assert [len(found) for found in before.values()] == [1, 1, 1]
            for [(key, name)] in before.values():
                assert [found.key for found in client.find("t", message_id=name)] == [key]
        assert list(files.glob("*.cat"))
        broker.restart()
        with txmq.connect(broker.url, service="s") as client:
            assert {number: find(client, number) for number in before} == before
            assert "catalogue." not in broker.log
        assert broker.stop() == 0
        assert run("log", "rebuild", "--data", str(broker.data)).exit_code == 0
        assert not list(files.glob("*.cat"))
        broker.start()
        with txmq.connect(broker.url, service="s") as client:
            assert {number: find(client, number) for number in before} == before
