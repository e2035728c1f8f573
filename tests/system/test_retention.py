"""Retention removes old messages and archives segments, and a killed broker continues
with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import txmq
from tests.cli.support import run
from txmq.errors import OffsetOutOfRange
from txmq.testing.own_broker import OwnBroker
from txmq.testing.wait import wait_until

SETTINGS = """
[broker]
segment_bytes = 1048576
snapshot_bytes = 1048576
preallocate_bytes = 65536

[disk]
ballast_mib = 1

[retention]
hours = 0.0005
every_s = 0.1
policy = "archive"
"""
LARGE = 900_000
SENT = 12


def verified(directory: Path, *options: str) -> Any:
    ran = run("log", "verify", "--data", str(directory), *options, "--json")
    assert ran.exit_code == 0, ran.stdout + ran.stderr
    return json.loads(ran.stdout)


def test_old_segments_go_to_the_archive_and_a_killed_broker_goes_on(tmp_path: Path) -> None:
    archive = tmp_path / "own" / "data" / "archive"
    with OwnBroker(tmp_path / "own", SETTINGS) as broker:
        with txmq.connect(broker.url, service="s") as client:
            client.call("topic.create", name="kept", partitions=1, retention_ms=0)
            client.send("kept", b"for ever", partition=0)
            client.call("topic.create", name="t", partitions=1)
            for number in range(SENT):
                client.send("t", bytes([ord("a") + number]) * LARGE, partition=0)

            def firsts() -> int:
                return int(client.call("topic.show", name="t")["firsts"][0])

            wait_until(lambda: firsts() == SENT, what="all messages to be too old")
            assert client.call("topic.show", name="kept")["firsts"] == [0]
            assert not list(archive.glob("log/*.seg")), (
                "a message that is kept keeps all that comes after it"
            )
            client.call("topic.alter", name="kept", retention_ms=1)
            for number in range(SENT):
                client.send("t", bytes([ord("a") + number]) * LARGE, partition=0)
            wait_until(
                lambda: len(list(archive.glob("log/*.seg"))) > 5, what="segments in the archive"
            )
            # what is read below stays while it is
            client.call("topic.alter", name="t", retention_ms=0)
        broker.restart()
        with txmq.connect(broker.url, service="s") as client:
            shown = client.call("topic.show", name="t")
            assert shown["ends"] == [2 * SENT]
            assert shown["firsts"][0] >= SENT
            receipt = client.send("t", b"after", partition=0)
            assert receipt.offset == 2 * SENT
            ran = run("tail", "t", "--from", "0", "--no-follow", "--json", "--broker", broker.url)
            assert ran.exit_code == 0, ran.stderr
            assert json.loads(ran.stdout.splitlines()[-1])["body"] == "after"
        assert broker.stop() == 0
    log, cold = verified(tmp_path / "own" / "data", "--deep"), verified(archive)
    assert cold["first"] == 0
    assert cold["end"] <= log["end"]
    assert log["first"] > 5 << 20
    assert cold["damaged"] == log["damaged"] == log["different"] == []


def test_a_reader_from_the_beginning_gets_the_first_offset_that_is_left(tmp_path: Path) -> None:
    with (
        OwnBroker(tmp_path / "own", SETTINGS) as broker,
        txmq.connect(broker.url, service="s") as client,
    ):
        client.call("topic.create", name="t", partitions=1)
        client.send("t", b"old", partition=0)
        wait_until(
            lambda: client.call("topic.show", name="t")["firsts"] == [1],
            what="the message to be too old",
        )
        with pytest.raises(OffsetOutOfRange) as raised:
            client.read("t", 0, 0)
        assert raised.value.detail == {"first": 1, "end": 1}
