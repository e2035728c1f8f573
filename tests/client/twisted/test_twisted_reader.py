"""Readers on the reactor: every message in order, from stored positions."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from twisted.internet.task import deferLater

import txmq.twisted
from tests.client.reactor_thread import WAIT_S, InReactor
from tests.client.real import RealBroker
from tests.client.scripted_member import fresh
from txmq.client.protocol.awaited import reader as shared
from txmq.client.protocol.offsets import FileOffsets, Offsets
from txmq.client.twisted import reader as module
from txmq.errors import ConfigError, LocalProtocolError, LogChanged, TopicReplaced, UnknownTopic
from txmq.twisted import Client, Reader

ALL = [f"{partition}/{offset}" for partition in range(2) for offset in range(4)]


@pytest.fixture
def client(reactor: Any, shared_broker: RealBroker, in_reactor: InReactor) -> Iterator[Client]:
    client = txmq.twisted.connect(reactor, shared_broker.url, service="tests", timeout=WAIT_S)
    yield client

    async def close() -> None:
        await client.close()

    in_reactor(close)


async def make(client: Client) -> str:
    """A topic of two partitions with four messages each; the body is the place."""
    topic = fresh("t")
    await client.call("topic.create", name=topic, partitions=2)
    for partition in range(2):
        bodies = [f"{partition}/{offset}".encode() for offset in range(4)]
        await client.send_many(topic, bodies, partition=partition)
    return topic


async def bodies(reader: Reader, count: int) -> list[str]:
    found = list[str]()
    for _ in range(count):
        message = await reader.receive(WAIT_S)
        assert message is not None, f"{found} came"
        found.append(message.body.decode())
    return found


def test_a_reader_goes_on_after_the_last_processed_message(
    client: Client, tmp_path: Path, in_reactor: InReactor
) -> None:
    async def story() -> None:
        topic = await make(client)
        async with await client.reader("r", [topic], FileOffsets(tmp_path)) as reader:
            first = await bodies(reader, 3)
        async with await client.reader("r", [topic], FileOffsets(tmp_path)) as reader:
            again = await bodies(reader, 6)
            await reader.commit()
            assert sorted(first[:2] + again) == ALL, (
                "the third was handed out, but nobody said that it was processed"
            )
            assert reader.positions == {(topic, 0): 4, (topic, 1): 4}
            assert await reader.receive(0.05) is None
            waiting = reader.receive()
            with pytest.raises(LocalProtocolError):
                reader.receive()
            await client.send(topic, b"1/4", partition=1)
            last = await waiting
            assert last is not None
            assert last.body == b"1/4"

    in_reactor(story)


def test_iteration_ends_when_it_is_closed_and_messages_keep_their_order(
    client: Client, tmp_path: Path, in_reactor: InReactor
) -> None:
    async def story() -> None:
        topic, found = await make(client), list[str]()
        reader = await client.reader("r", [topic], FileOffsets(tmp_path))
        async for message in reader:
            found.append(message.body.decode())
            if len(found) == 8:
                await reader.close()
        assert [body for body in found if body < "1"] + [
            body for body in found if body >= "1"
        ] == ALL
        waiting = (await client.reader("s", [topic], FileOffsets(tmp_path), start="last")).receive()
        await client.close()
        assert await waiting is None

    in_reactor(story)


def test_positions_are_saved_every_few_seconds(
    client: Client,
    reactor: Any,
    tmp_path: Path,
    in_reactor: InReactor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SAVE_S", 0.01)

    async def story() -> None:
        topic, store = await make(client), FileOffsets(tmp_path)
        async with await client.reader("r", [topic], store) as reader:
            await bodies(reader, 8)
            waiting = reader.receive()
            log_id, ends = await client.log_id(), reactor.seconds() + WAIT_S
            while dict(store.load("r", log_id)) != {(topic, 0): 4, (topic, 1): 4}:
                assert reactor.seconds() < ends
                await deferLater(reactor, 0.01)
        assert await waiting is None

    in_reactor(story)


def test_a_reader_saves_its_positions_before_it_reads_other_partitions(
    client: Client, tmp_path: Path, in_reactor: InReactor
) -> None:
    async def story() -> None:
        topic, store = await make(client), FileOffsets(tmp_path)
        async with await client.reader("r", [topic], store, start=timedelta(days=1)) as reader:
            await reader.assign({(topic, 1)})
            assert await bodies(reader, 4) == ALL[4:]
            await reader.assign({(topic, 0)})
            assert store.load("r", await client.log_id()) == {(topic, 0): 0, (topic, 1): 4}
            assert await bodies(reader, 4) == ALL[:4]
            await reader.assign(None)
            await client.send(topic, b"1/4", partition=1)
            assert await bodies(reader, 1) == ["1/4"]

    in_reactor(story)


def test_partitions_that_a_topic_has_grown_are_read_from_their_beginning(
    client: Client, tmp_path: Path, in_reactor: InReactor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SAVE_S", 0.05)
    monkeypatch.setattr(shared, "REFRESH_S", 0.0)

    async def story() -> None:
        topic = await make(client)
        async with await client.reader("r", [topic], FileOffsets(tmp_path), start="last") as reader:
            await client.call("topic.grow", name=topic, partitions=3)
            await client.send(topic, b"2/0", partition=2)
            assert await bodies(reader, 1) == ["2/0"]

    in_reactor(story)


def test_a_reader_on_a_reactor_refuses_a_topic_that_is_made_again(
    client: Client, tmp_path: Path, in_reactor: InReactor
) -> None:
    async def story() -> None:
        topic = await make(client)
        async with await client.reader("r", [topic], FileOffsets(tmp_path)) as reader:
            assert len(await bodies(reader, 8)) == 8
            await reader.commit()
            await client.call("topic.delete", name=topic)
            await client.call("topic.create", name=topic, partitions=2)
            # a read that waited was answered before the topic was there again
            with pytest.raises((TopicReplaced, UnknownTopic)):
                await bodies(reader, 1)
        with pytest.raises(TopicReplaced):
            await client.reader("r", [topic], FileOffsets(tmp_path))

    in_reactor(story)


def test_invalid_arguments_are_refused(
    client: Client, tmp_path: Path, in_reactor: InReactor
) -> None:
    async def story() -> None:
        topic = await make(client)
        with pytest.raises(LocalProtocolError):
            client.reader("r", topic, FileOffsets(tmp_path))
        with pytest.raises(LocalProtocolError):
            client.reader("r", [topic], FileOffsets(tmp_path), start="now")  # type: ignore[arg-type]  # refused
        async with await client.reader("r", [topic], FileOffsets(tmp_path)):
            with pytest.raises(ConfigError):
                await client.reader("r", [topic], FileOffsets(tmp_path))

    in_reactor(story)


class FullDiskOffsets(FileOffsets):
    """A store on a disk that is full."""

    def save(self, name: str, log_id: Any, offsets: Offsets) -> None:
        raise OSError(28, "No space left on device")


def test_a_store_that_cannot_save_ends_the_reader(
    client: Client, tmp_path: Path, in_reactor: InReactor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SAVE_S", 0.01)

    async def story() -> None:
        topic = await make(client)
        reader = await client.reader("r", [topic], FullDiskOffsets(tmp_path))
        with pytest.raises(OSError, match="No space left"):
            await bodies(reader, 9)
        with pytest.raises(OSError, match="No space left"):
            await reader.close()

    in_reactor(story)


def test_a_reader_survives_a_broker_that_is_away_and_refuses_another_log(
    reactor: Any, in_reactor: InReactor, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    broker = RealBroker(tmp_path_factory.mktemp("restarted"))
    client = txmq.twisted.connect(reactor, broker.url, timeout=WAIT_S)
    kept: list[Reader] = []

    async def before() -> None:
        await client.send("t", b"before", partition=0)
        kept.append(await client.reader("r", ["t"], FileOffsets(tmp_path / "offsets")))
        assert await bodies(kept[0], 1) == ["before"]

    async def after() -> None:
        waiting = kept[0].receive(WAIT_S)
        await client.send("t", b"after", partition=0)
        message = await waiting
        assert message is not None
        assert message.body == b"after"

    async def in_another_log() -> None:
        with pytest.raises(LogChanged):
            await kept[0].receive(WAIT_S)
        await client.close()

    try:
        in_reactor(before)
        broker.kill()
        broker.start()
        in_reactor(after)
        broker.kill()
        (tmp_path / "other").mkdir()
        broker._directory = tmp_path / "other"
        broker.start()
        in_reactor(in_another_log)
    finally:
        broker.stop()
