"""Readers without a group: every message in order, from stored positions."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.client.faces.face import Face, given
from tests.client.proxy import Proxy
from tests.client.real import RealBroker
from tests.client.scripted_member import fresh
from txmq.client.protocol import reader as protocol_reader
from txmq.client.protocol.offsets import FileOffsets, Offsets
from txmq.errors import ConfigError, LocalProtocolError, LogChanged, TopicReplaced, UnknownTopic
from txmq.testing.wait import PATIENCE_S
from txmq.wire.data_requests import Opcode

POLL_S = 60.0  # the longest that a broker waits with its answer
ALL = [f"{partition}/{offset}" for partition in range(2) for offset in range(4)]


async def client_and_topic(face: Face, broker: RealBroker | Proxy) -> tuple[Any, str]:
    """A topic of two partitions with four messages each; the body is the place."""
    client, topic = face.connect(broker.url), fresh("t")
    await client.call("topic.create", name=topic, partitions=2)
    for partition in range(2):
        for offset in range(4):
            await client.send(topic, f"{partition}/{offset}".encode(), partition=partition)
    return client, topic


async def opened(client: Any, topic: str, directory: Path, **options: Any) -> Any:
    return await client.reader("r", [topic], FileOffsets(directory), **options)


async def bodies(reader: Any, count: int, timeout_s: float = PATIENCE_S) -> list[str]:
    found: list[str] = []
    for _ in range(count):
        message = await reader.receive(timeout_s)
        assert message is not None, f"{found} came"
        found.append(message.body.decode())
    return found


def saved(directory: Path, topic: str) -> dict[str, int]:
    """Return the stored positions by partition."""
    file = directory / "r.json"
    return dict(json.loads(file.read_text())["offsets"][topic]) if file.exists() else {}


async def test_every_message_comes_once_and_in_the_order_of_its_partition(
    face: Face, real: RealBroker, tmp_path: Path
) -> None:
    client, topic = await client_and_topic(face, real)
    async with await opened(client, topic, tmp_path) as reader:
        found = await bodies(reader, 8)
        assert [body for p in "01" for body in found if body.startswith(p)] == ALL
        assert await reader.receive(0.05) is None
        waiting = face.begin(bodies(reader, 1))
        await face.pause()
        if face.name != "blocking":  # whose readers belong to one thread
            with pytest.raises(LocalProtocolError, match="another call"):
                await reader.receive()
        await client.send(topic, b"1/4", partition=1)
        assert await waiting == ["1/4"]


async def test_iteration_ends_when_it_is_closed(
    face: Face, real: RealBroker, tmp_path: Path
) -> None:
    client, topic = await client_and_topic(face, real)
    reader, found = await opened(client, topic, tmp_path), list[str]()
    async for message in reader:
        found.append(message.body.decode())
        if len(found) == len(ALL):
            await reader.close()
    assert sorted(found) == ALL
    assert await reader.receive() is None


async def test_a_reader_goes_on_after_the_last_processed_message(
    face: Face, real: RealBroker, tmp_path: Path
) -> None:
    client, topic = await client_and_topic(face, real)
    async with await opened(client, topic, tmp_path) as reader:
        first = await bodies(reader, 3)
    async with await opened(client, topic, tmp_path) as reader:
        again = await bodies(reader, 6)
        await reader.commit()
        assert sorted(first[:2] + again) == ALL, (
            "the third was handed out, but nobody said that it was processed"
        )
        assert reader.positions == {(topic, 0): 4, (topic, 1): 4}
    async with await opened(client, topic, tmp_path) as reader:
        assert await reader.receive(0.05) is None


async def test_positions_are_saved_every_few_seconds(
    face: Face, real: RealBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(face.module("reader"), "SAVE_S", 0.01)
    client, topic = await client_and_topic(face, real)
    async with await opened(client, topic, tmp_path) as reader:
        await bodies(reader, 8)

        async def all_saved() -> bool:
            assert await reader.receive(0.0) is None
            return saved(tmp_path, topic) == {"0": 4, "1": 4}

        await face.until(all_saved)


@pytest.mark.parametrize(("start", "count"), [("first", 8), ("last", 0), ("between", 6)])
async def test_a_reader_begins_where_its_start_says(
    face: Face, real: RealBroker, tmp_path: Path, start: str, count: int
) -> None:
    client, topic = await client_and_topic(face, real)
    options: dict[str, Any] = {"start": start}
    if start == "between":
        [third] = [one async for one in client.find(topic, partition=0) if one.offset == 2]
        options["start"] = datetime.fromtimestamp(third.stored_at / 1_000_000, UTC)
    async with await opened(client, topic, tmp_path, **options) as reader:
        assert len(await bodies(reader, count)) == count
        assert await reader.receive(0.05) is None


async def test_a_reader_saves_its_positions_before_it_reads_other_partitions(
    face: Face, real: RealBroker, tmp_path: Path
) -> None:
    client, topic = await client_and_topic(face, real)
    async with await opened(client, topic, tmp_path) as reader:
        await given(reader.assign({(topic, 1)}))
        assert await bodies(reader, 4) == ALL[4:]
        await given(reader.assign({(topic, 0)}))
        assert saved(tmp_path, topic) == {"0": 0, "1": 4}
        assert await bodies(reader, 4) == ALL[:4]
        await given(reader.assign(None))
        await client.send(topic, b"1/4", partition=1)
        assert await bodies(reader, 1) == ["1/4"]


async def test_partitions_that_a_topic_has_grown_are_read_from_their_beginning(
    face: Face, real: RealBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = face.module("reader")
    monkeypatch.setattr(module, "SAVE_S", 0.05)
    monkeypatch.setattr(module, "REFRESH_S", 0.0)
    client, topic = await client_and_topic(face, real)
    async with await opened(client, topic, tmp_path, start="last") as reader:
        await client.call("topic.grow", name=topic, partitions=3)
        await client.send(topic, b"2/0", partition=2)
        assert await bodies(reader, 1) == ["2/0"]


async def test_a_reader_survives_a_broker_that_is_away_and_refuses_another_log(
    face: Face, own_broker: RealBroker, tmp_path: Path
) -> None:
    client = face.connect(own_broker.url)
    await client.call("topic.create", name="t", partitions=1)
    await client.send("t", b"before")
    async with await opened(client, "t", tmp_path / "offsets") as reader:
        assert await bodies(reader, 1) == ["before"]
        own_broker.kill()
        assert await reader.receive(0.3) is None
        own_broker.start()
        await client.send("t", b"after")
        assert await bodies(reader, 1) == ["after"]
        own_broker.kill()
        (tmp_path / "other").mkdir()
        own_broker._directory = tmp_path / "other"
        own_broker.start()
        with pytest.raises(LogChanged):
            await bodies(reader, 1)


async def test_a_reader_goes_on_where_a_frozen_broker_keeps_its_connection_open(
    face: Face, real: RealBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REPLY_S", "SAVE_S"):
        monkeypatch.setattr(face.module("reader"), name, 0.2)
    with Proxy(real.url) as proxy:
        client, topic = await client_and_topic(face, proxy)
        async with await opened(client, topic, tmp_path) as reader:
            await bodies(reader, len(ALL))
            proxy.hold.add(Opcode.READ)
            await client.send(topic, b"0/4", partition=0)

            async def is_held() -> bool:
                return await reader.receive(0.05) is None and proxy.held > 0

            await face.until(is_held)
            proxy.hold.clear()
            assert await bodies(reader, 1) == ["0/4"]


async def test_invalid_arguments_are_refused(face: Face, real: RealBroker, tmp_path: Path) -> None:
    client, topic = await client_and_topic(face, real)
    with pytest.raises(LocalProtocolError):
        await client.reader("r", topic, FileOffsets(tmp_path))
    with pytest.raises(LocalProtocolError):
        await opened(client, topic, tmp_path, start="now")
    async with await opened(client, topic, tmp_path):
        with pytest.raises(ConfigError):
            await opened(client, topic, tmp_path)


class FullDiskOffsets(FileOffsets):
    """A store on a disk that is full."""

    def save(self, name: str, log_id: Any, offsets: Offsets) -> None:
        raise OSError(28, "No space left on device")


async def test_a_store_that_cannot_save_ends_the_reader(
    face: Face, real: RealBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(face.module("reader"), "SAVE_S", 0.01)
    client, topic = await client_and_topic(face, real)
    reader = await client.reader("r", [topic], FullDiskOffsets(tmp_path))
    with pytest.raises(OSError, match="No space left"):
        await bodies(reader, 9)
    with pytest.raises(OSError, match="No space left"):
        await reader.close()


async def remake(client: Any, topic: str) -> None:
    await client.call("topic.delete", name=topic)
    await client.call("topic.create", name=topic, partitions=2)


@pytest.mark.parametrize("messages", [0, 3, 6])
async def test_a_running_reader_refuses_a_topic_that_is_made_again(
    face: Face, real: RealBroker, tmp_path: Path, messages: int
) -> None:
    client, topic = await client_and_topic(face, real)
    async with await opened(client, topic, tmp_path) as reader:
        assert len(await bodies(reader, 8)) == 8
        await remake(client, topic)
        for _ in range(messages):
            await client.send(topic, b"new", partition=0)
        # a read that waited was answered before the topic was there again
        with pytest.raises((TopicReplaced, UnknownTopic)):
            await bodies(reader, 1)


async def test_a_reader_of_a_deleted_topic_asks_again_whether_it_is_there(
    face: Face, real: RealBroker, tmp_path: Path
) -> None:
    client, topic = await client_and_topic(face, real)
    async with await opened(client, topic, tmp_path) as reader:
        assert len(await bodies(reader, 8)) == 8
        await client.call("topic.delete", name=topic)
        for _ in range(2):
            with pytest.raises(UnknownTopic):
                await bodies(reader, 1)
        await client.call("topic.create", name=topic, partitions=2)
        for _ in range(2):
            with pytest.raises(TopicReplaced, match="made again"):
                await bodies(reader, 1)


async def test_a_waiting_reader_is_told_that_its_topic_is_deleted(
    face: Face, real: RealBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol_reader, "POLL_S", POLL_S)
    client, topic = await client_and_topic(face, real)
    async with await opened(client, topic, tmp_path) as reader:
        assert len(await bodies(reader, 8)) == 8
        waiting = face.begin(bodies(reader, 1, POLL_S - 10))
        await client.call("topic.delete", name=topic)
        with pytest.raises(UnknownTopic):
            await waiting


async def test_stored_positions_are_refused_by_a_topic_that_is_made_again(
    face: Face, real: RealBroker, tmp_path: Path
) -> None:
    client, topic = await client_and_topic(face, real)
    async with await opened(client, topic, tmp_path) as reader:
        assert len(await bodies(reader, 8)) == 8
        await reader.commit()
    await remake(client, topic)
    with pytest.raises(TopicReplaced, match="begin anew"):
        await opened(client, topic, tmp_path)
