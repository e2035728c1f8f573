"""Brokers killed while they give the messages of a consumer's store to others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest

import txmq
from tests.cli.peer import Peer, peer
from tests.reporting import Report
from txmq.crashpoints import VARIABLE
from txmq.errors import TxmqError
from txmq.testing.processes import ENVIRONMENT, Running
from txmq.testing.wait import wait_until

MESSAGES = 600  # of which a step gives 250 away
STORE = "5" * 32
POINTS = {  # whether the adoption goes on by itself after a start
    "adoption.before_fence": False,
    "adoption.after_fence": True,
    "adoption.after_step": True,
    "adoption.after_step:2": True,
}
OF_STORE = {"group": "g", "store": STORE}


def received(connection: Peer, member: str) -> Counter[tuple[int, int]]:
    """Return what a member gets: offsets and attempts."""
    joined = connection.call(
        "consumer.join", group="g", member=member, instance=member, topics=["t"], start="first"
    )
    claim = {"group": "g", "member": member, "generation": joined["generation"]}
    got = Counter[tuple[int, int]]()
    while chunks := connection.fetch(**claim, wait_ms=0):
        for chunk in chunks:
            last = chunk.base_offset + chunk.first_row + chunk.rows
            for offset in range(chunk.base_offset + chunk.first_row, last):
                got[offset, chunk.attempt] += 1
    return got


def keep_all(connection: Peer) -> None:
    """Have a consumer keep all messages in its store, and leave."""
    assert received(connection, "m").total() == MESSAGES
    topic_id = connection.call("topic.describe", names=["t"])["topics"][0]["topic_id"]
    generation = connection.call("group.show", group="g")["generation"]
    entries = [["t", topic_id, 0, offset, "stored", 1, 0, None, 0, 0] for offset in range(MESSAGES)]
    reply = connection.call(
        "consumer.stored", group="g", member="m", generation=generation, store=STORE,
        entries=entries,
    )  # fmt: skip
    assert Counter(reply["verdicts"]) == {"kept": MESSAGES}
    connection.call("consumer.leave", group="g", member="m", instance="m")


def stores(url: str) -> list[dict[str, Any]]:
    with peer(url) as connection:
        found: list[dict[str, Any]] = connection.call("recover.list")["stores"]
        return found


@contextmanager
def broker(directory: Path, point: str = "") -> Iterator[tuple[str, Running]]:
    """A broker on one data directory, which dies at a crash point; its URL."""
    arguments = (
        "broker",
        "--create-topics",
        "--data",
        str(directory / "data"),
        "--listen",
        "127.0.0.1:0",
    )
    environment = {**ENVIRONMENT, VARIABLE: point} if point else ENVIRONMENT
    process = Running(directory, *arguments, environment=environment)
    try:
        yield process.first_line().removeprefix("ready "), process
    finally:
        process.process.kill()
        process.process.wait()


@pytest.mark.parametrize("point", POINTS)
def test_a_broker_killed_in_an_adoption_goes_on_with_it(
    point: str, tmp_path: Path, report: Report
) -> None:
    with broker(tmp_path) as (url, _process), peer(url) as connection:
        connection.call("topic.create", name="t", partitions=1)
        with txmq.connect(url) as client:
            for _ in range(MESSAGES):
                client.send_async("t", b"m")
            client.flush()
        keep_all(connection)
    with broker(tmp_path, point) as (url, process):
        with peer(url) as connection, suppress(TxmqError):
            connection.call("recover.adopt", **OF_STORE)
        assert process.status() == -SIGKILL
    with broker(tmp_path) as (url, _process):
        if not POINTS[point]:
            [found] = stores(url)
            assert (found["state"], found["messages"]) == ("no owner", MESSAGES)
            with peer(url) as connection:
                connection.call("recover.adopt", **OF_STORE)
        wait_until(lambda: not stores(url), what="the end of the adoption")
        with peer(url) as connection:
            got = received(connection, "n")
    assert got == Counter({(offset, 2): 1 for offset in range(MESSAGES)})
    report({"kills": 1, "messages": got.total()})
