"""Readers without a group: every message in order, from stored positions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.client.real import RealBroker
from tests.client.real_consumers import busy_log
from tests.client.scripted_member import fresh
from txmq.client.blocking.client import Client
from txmq.client.blocking.reader import Reader
from txmq.client.protocol import reader as protocol_reader
from txmq.client.protocol.offsets import FileOffsets
from txmq.client.protocol.sender.rows import PART_ROWS
from txmq.errors import ConfigError, LogChanged
from txmq.model.message import Message
from txmq.testing.wait import PATIENCE_S

Open = Callable[..., Reader]
Connect = Callable[..., Client]
POLL_S = 60.0  # the longest that a broker waits with its answer


@pytest.fixture
def client(real: RealBroker, connect: Callable[..., Client]) -> Client:
    return connect(real.url, timeout=PATIENCE_S)


@pytest.fixture
def topic(client: Client) -> str:
    """Two partitions with four messages each; the body is the place."""
    name = fresh("t")
    client.call("topic.create", name=name, partitions=2)
    for partition in range(2):
        for offset in range(4):
            client.send(name, f"{partition}/{offset}".encode(), partition=partition)
    return name


def open_reader(client: Client, topic: str, directory: Path, **options: Any) -> Reader:
    return client.reader("r", [topic], FileOffsets(directory), **options)


def bodies(reader: Reader, count: int) -> list[str]:
    found = list[str]()
    for _ in range(count):
        message = reader.receive(PATIENCE_S)
        assert message is not None, f"{found} came"
        found.append(message.body.decode())
    return found


def test_messages_dropped_by_retention_are_counted_and_skipped(
    client: Client, topic: str, tmp_path: Path
) -> None:
    from txmq.errors import OffsetOutOfRange

    with open_reader(client, topic, tmp_path) as reader:
        reader._state.skip_to_retained(
            (topic, 0), OffsetOutOfRange("gone", detail={"first": 3, "end": 4})
        )
        assert (reader.missed, reader.positions[topic, 0]) == (3, 3)
        with pytest.raises(OffsetOutOfRange):
            reader._state.skip_to_retained(
                (topic, 0), OffsetOutOfRange("beyond", detail={"first": 0, "end": 4})
            )


def test_a_reader_at_the_end_is_woken_by_a_transaction_of_several_parts(
    client: Client,
    topic: str,
    real: RealBroker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol_reader, "POLL_S", POLL_S)
    count = 2 * PART_ROWS
    with (
        busy_log(real.url),
        open_reader(client, topic, tmp_path) as reader,
        ThreadPoolExecutor(1) as pool,
    ):
        assert len(bodies(reader, 8)) == 8
        for _ in range(5):
            received = pool.submit(bodies, reader, count)
            with client.transaction() as tx:
                tx.send_many(topic, [b"x"] * count, [f"k{n % 7}" for n in range(count)])
            assert received.result(POLL_S - 10) == ["x"] * count


@pytest.mark.parametrize("more", [0, 3, 6])
@pytest.mark.parametrize("running", [False, True])
def test_positions_are_refused_by_a_log_that_was_restored_to_before_them(
    own_broker: RealBroker, connect: Connect, tmp_path: Path, more: int, *, running: bool
) -> None:
    client = connect(own_broker.url, timeout=PATIENCE_S)
    send = partial(client.send, "t", b"x", partition=0)
    send()
    backup = tmp_path / "backup"
    own_broker.stop()
    shutil.copytree(tmp_path / "own" / "data", backup)
    own_broker.start()
    with open_reader(client, "t", tmp_path / "offsets") as reader:
        for _ in range(3):
            send()
        assert len(bodies(reader, 4)) == 4
        reader.commit()
        own_broker.stop()
        shutil.rmtree(tmp_path / "own" / "data")
        shutil.copytree(backup, tmp_path / "own" / "data")
        own_broker.start()
        for _ in range(more):
            send()
        if running:
            with pytest.raises(LogChanged):
                bodies(reader, 1)
            return
    with open_reader(client, "t", tmp_path / "offsets") as reader, pytest.raises(LogChanged):
        bodies(reader, 1)


def test_a_reader_goes_on_over_restarts_and_where_retention_has_removed_what_it_read(
    own_broker: RealBroker, connect: Connect, tmp_path: Path
) -> None:
    client = connect(own_broker.url, timeout=PATIENCE_S)
    client.send_batch("t", [Message(b"%d" % n) for n in range(10)], partition=0)
    with open_reader(client, "t", tmp_path / "offsets", start="last") as reader:
        assert reader.receive(0.0) is None
    for expected in ("10", "11"):
        own_broker.stop()
        own_broker.start()
        client.send("t", expected.encode(), partition=0)
        with open_reader(client, "t", tmp_path / "offsets") as reader:
            assert bodies(reader, 1) == [expected]
            reader.commit()


def test_positions_of_another_version_are_refused_and_left_alone(
    client: Client, topic: str, tmp_path: Path
) -> None:
    saved = json.dumps({"version": 2, "log_id": str(client.log_id), "offsets": {}, "batches": {}})
    (tmp_path / "r.json").write_text(saved)
    with pytest.raises(ConfigError, match="no positions of version 1"):
        open_reader(client, topic, tmp_path)
    assert (tmp_path / "r.json").read_text() == saved
