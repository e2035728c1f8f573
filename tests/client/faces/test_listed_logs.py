"""Logs that are added while clients run: who uses them, and where keys stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any
from uuid import UUID, uuid4

import pytest

import txmq
from tests.client.effects import EFFECT, effects, with_effects
from tests.client.faces.face import Face
from tests.client.listed import BY, add_logs, ask, stored
from txmq.client.aio import readers as aio_readers
from txmq.client.blocking import reader as blocking_reader
from txmq.client.protocol.offsets import Offsets
from txmq.errors import UnknownTopic
from txmq.model.keys import partition_of
from txmq.model.message import ReceivedMessage
from txmq.testing.broker_thread import BrokerThread
from txmq.testing.wait import PATIENCE_S

KEYS = [f"k{number}" for number in range(12)]


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[list[BrokerThread]]:
    """Three brokers, of which none knows of the others; each makes 2 partitions."""
    settings = {"broker": {"partitions": 2}}
    with ExitStack() as opened:
        yield [
            opened.enter_context(BrokerThread(tmp_path / name, settings=settings))
            for name in ("a", "b", "c")
        ]


def homes(logs: list[BrokerThread], topic: str) -> dict[str, int]:
    """Return the log of each key, which has one."""
    found: dict[str, int] = {}
    for number, broker in enumerate(logs):
        with suppress(UnknownTopic), txmq.connect(broker.url, timeout=PATIENCE_S) as client:
            for message in client.find(topic):
                if message.key:
                    assert found.setdefault(message.key, number) == number
    return found


async def send_until(face: Face, cluster: Any, topic: str, broker: BrokerThread) -> None:
    before = stored(broker, topic)

    async def has_some() -> bool:
        await cluster.send(topic, b"anywhere")
        return stored(broker, topic) > before

    await face.until(has_some, "the log gets messages")


async def test_clients_find_a_log_that_is_added_and_consume_it(
    face: Face, logs: list[BrokerThread]
) -> None:
    cluster = face.connect([logs[0].url, logs[1].url])
    await cluster.send("orders", b"before", partition=0)
    await cluster.send("orders", b"before", partition=2)
    # as by a client that heard of it earlier
    await face.connect(logs[2].url).send("orders", b"anywhere")
    async with await cluster.consumer("billing", ["orders"], start="last") as consumers:
        add_logs(logs[0], logs[1], logs[2], together=True)
        await send_until(face, cluster, "orders", logs[2])
        wanted = sum(stored(one, "orders") for one in logs) - 2
        for _ in range(wanted):
            message = await consumers.receive(PATIENCE_S)
            assert message is not None
            assert message.body == b"anywhere"
            await consumers.ack(message, wait=True)
        assert await consumers.receive(0.0) is None
    assert len(cluster.clients) == 3


async def test_a_reader_reads_a_log_that_is_added_and_goes_on_there(
    face: Face, logs: list[BrokerThread], tmp_path: Path
) -> None:
    cluster = face.connect([logs[0].url, logs[1].url])
    await cluster.send("orders", b"before", partition=0)
    await cluster.send("orders", b"before", partition=2)
    await face.connect(logs[2].url).send("orders", b"anywhere")
    saved, wanted = tmp_path / "positions", 0
    async with await cluster.reader(
        "audit", ["orders"], txmq.FileOffsets(saved), start="last"
    ) as reader:
        add_logs(logs[0], logs[1], logs[2], together=True)
        await send_until(face, cluster, "orders", logs[2])
        wanted = sum(stored(one, "orders") for one in logs) - 2
        for _ in range(wanted):
            message = await reader.receive(PATIENCE_S)
            assert message is not None
            assert message.body == b"anywhere"
        await reader.commit()
    await face.connect(logs[2].url).send("orders", b"after")
    async with await cluster.reader("audit", ["orders"], txmq.FileOffsets(saved)) as reader:
        message = await reader.receive(PATIENCE_S)
        assert message is not None
        assert message.body == b"after"


async def test_a_reader_begins_at_its_start_in_each_log_that_is_listed_already(
    face: Face, logs: list[BrokerThread], tmp_path: Path
) -> None:
    add_logs(logs[0], logs[1], together=True)
    for one in logs[:2]:
        await face.connect(one.url).send("orders", b"old")
    cluster = face.connect([logs[0].url])  # which has not heard of the other
    positions = txmq.FileOffsets(tmp_path / "positions")
    async with await cluster.reader("audit", ["orders"], positions, start="last") as reader:
        for one in logs[:2]:
            await face.connect(one.url).send("orders", b"new")
        for _ in logs[:2]:
            message = await reader.receive(PATIENCE_S)
            assert message is not None
            assert message.body == b"new"


async def test_a_store_that_fails_at_an_added_log_is_told(
    face: Face, logs: list[BrokerThread], tmp_path: Path
) -> None:
    class Failing(txmq.FileOffsets):
        def load(self, name: str, log_id: UUID) -> Offsets:
            if name.endswith(added):
                raise OSError("no room for another log")
            return super().load(name, log_id)

    added = ask(logs[1], "broker.show")["log_id"]
    cluster = face.connect([logs[0].url])
    await cluster.send("orders", b"here")
    async with await cluster.reader("audit", ["orders"], Failing(tmp_path / "positions")) as reader:
        message = await reader.receive(PATIENCE_S)
        assert message is not None
        assert message.body == b"here"
        add_logs(logs[0], logs[1], together=True)
        with pytest.raises(OSError, match="no room"):
            await reader.receive(PATIENCE_S)


async def test_a_reader_goes_on_where_an_added_log_refuses_it_and_tries_again(
    face: Face,
    logs: list[BrokerThread],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (blocking_reader, aio_readers):  # they try again at once
        monkeypatch.setattr(module, "REFRESH_S", 0.0)
    strict = {"broker": {"partitions": 2, "create_topics": False}}
    with BrokerThread(tmp_path / "strict", settings=strict) as added:
        listed = [
            {
                "log_id": ask(one, "broker.show")["log_id"],
                "addresses": one.url.removeprefix("txmq://"),
            }
            for one in (logs[0], added)
        ]
        cluster = face.connect([logs[0].url])
        await cluster.send("orders", b"here")
        async with await cluster.reader("audit", ["orders"], txmq.FileOffsets(tmp_path)) as reading:
            assert (await reading.receive(PATIENCE_S)).body == b"here"
            ask(logs[0], "cluster.add_logs", logs=listed, **BY)  # it has no topics yet

            async def is_refused() -> bool:
                assert await reading.receive(0.02) is None
                return "reader.not_joined" in caplog.text

            await face.until(is_refused)
            ask(added, "topic.create", name="orders", partitions=1)
            await face.connect(added.url).send("orders", b"there")
            message = await reading.receive(PATIENCE_S)
            assert message is not None
            assert message.body == b"there"


async def test_keys_stay_and_those_of_new_topics_are_at_all_logs(
    face: Face, logs: list[BrokerThread]
) -> None:
    urls = [logs[0].url, logs[1].url]
    before = face.connect(urls)
    for key in KEYS:
        await before.send("old", b"1", key=key)
    was = homes(logs, "old")
    assert was == {key: partition_of(key, 4) // 2 for key in KEYS}
    add_logs(logs[0], logs[1], together=True)
    add_logs(logs[0], logs[2])
    knows_one = face.connect([logs[1].url])  # and learns the others
    for cluster in (before, face.connect(urls), knows_one):
        for topic in ("old", "new"):
            for key in KEYS:
                await cluster.send(topic, b"2", key=key)
    assert homes(logs, "old") == was
    assert homes(logs, "new") == {key: partition_of(key, 6) // 2 for key in KEYS}
    async with before.transaction() as tx:
        tx.send("new", b"3", key="k0")
    await (await face.begin_send(before, "new", b"3", key="k1"))
    assert homes(logs, "new") == {key: partition_of(key, 6) // 2 for key in KEYS}


async def test_the_order_of_a_key_holds_while_logs_are_added(
    face: Face, logs: list[BrokerThread]
) -> None:
    added = Event()

    def add() -> None:
        try:
            add_logs(logs[0], logs[1], together=True)
            add_logs(logs[0], logs[2])
        finally:
            added.set()

    urls, adding, sent = [logs[0].url, logs[1].url], Thread(target=add), Counter[str]()
    topics = [f"new-{number}" for number in range(8)]  # made before, meanwhile and after

    async def send_on(name: str) -> None:
        cluster, left, new = face.connect(urls), 3, iter(topics)
        while left:  # rounds after both were added
            left -= added.is_set()
            topic = next(new, topics[-1])
            for key in KEYS:
                number = sent[f"{name}-{key}"]
                await cluster.send("orders", str(number).encode(), key=f"{name}-{key}")
                await cluster.send(topic, b"", key=key)
                sent[f"{name}-{key}"] += 1

    consumers = await face.connect(urls).consumer("billing", ["orders"], mode="ordered")
    async with consumers:
        senders = [face.begin(send_on(name)) for name in ("early", "late")]
        await face.until(lambda: sent["early-k0"] > 1)
        adding.start()
        for sender in senders:
            await sender
        adding.join()
        seen = Counter[str]()
        while seen != sent:
            message = await consumers.receive(PATIENCE_S)
            assert message is not None
            assert int(message.body) == seen[message.key]
            seen[message.key] += 1
            await consumers.ack(message, wait=True)
    for topic in topics:
        homes(logs, topic)  # one of each key


async def test_a_log_that_does_not_answer_as_itself_is_not_used(
    face: Face, logs: list[BrokerThread]
) -> None:
    cluster = face.connect([logs[0].url, logs[1].url])
    await cluster.send("orders", b"1", key="k")
    add_logs(logs[0], logs[1], together=True)
    place = logs[2].url.removeprefix("txmq://")
    listed = [
        {"log_id": uuid4().hex, "addresses": "127.0.0.1:1"},
        {"log_id": uuid4().hex, "addresses": place},  # where another log is
    ]
    ask(logs[0], "cluster.add_logs", logs=listed, **BY)

    async def knows() -> bool:
        await cluster.send("orders", b"anywhere")
        return len(cluster.clients) == 4

    await face.until(knows)
    for _ in range(6):
        await cluster.send("orders", b"anywhere")
    async with await cluster.consumer("billing", ["orders"]) as consumers:
        message = await consumers.receive(PATIENCE_S)
        assert message is not None
    assert stored(logs[2], "orders") == 0


async def test_a_drained_log_gets_nothing_new_but_keys_that_it_has(
    face: Face, logs: list[BrokerThread]
) -> None:
    cluster = face.connect([one.url for one in logs])
    for key in KEYS:
        await cluster.send("old", b"1", key=key)
    was = homes(logs, "old")
    listed = add_logs(logs[0], logs[1], logs[2], together=True)
    log_id = listed["logs"][1]["log_id"]
    ask(logs[0], "cluster.drain_log", log_id=log_id, **BY)
    for key in KEYS:
        await cluster.send("old", b"2", key=key)
        await cluster.send("new", b"2", key=key)
    for _ in range(6):
        await cluster.send("new", b"anywhere")
    assert homes(logs, "old") == was
    assert stored(logs[1], "new") == 0


async def test_with_an_inbox_messages_of_an_added_log_take_effect_once(
    face: Face, logs: list[BrokerThread], database: str
) -> None:
    cluster, connect = face.connect([logs[0].url, logs[1].url]), with_effects(database)
    await cluster.send("orders", b"first")

    async def handle(message: ReceivedMessage, connection: Any) -> None:
        await face.execute(connection, EFFECT, (message.message_id, message.attempt))

    consumers = await cluster.consumer("billing", ["orders"])
    async with face.consuming(consumers, handle, inbox=database, workers=2):
        add_logs(logs[0], logs[1], logs[2], together=True)
        await send_until(face, cluster, "orders", logs[2])
        wanted = sum(stored(one, "orders") for one in logs)
        await face.until(lambda: consumers.stats.acked == wanted)
    assert len(set(effects(connect))) == len(effects(connect)) == wanted


async def test_a_consumer_goes_on_where_an_added_log_refuses_it(
    face: Face, logs: list[BrokerThread], caplog: pytest.LogCaptureFixture
) -> None:
    there = await face.connect(logs[2].url).consumer("billing", ["orders"], mode="ordered")
    cluster = face.connect([logs[0].url, logs[1].url])
    await cluster.send("orders", b"first")
    async with there, await cluster.consumer("billing", ["orders"]) as consumers:
        add_logs(logs[0], logs[1], logs[2], together=True)

        async def is_refused() -> bool:
            await cluster.send("orders", b"anywhere")
            return "consumer.not_joined" in caplog.text

        await face.until(is_refused)
        for _ in range(stored(logs[0], "orders") + stored(logs[1], "orders")):
            message = await consumers.receive(PATIENCE_S)
            assert message is not None
            await consumers.ack(message, wait=True)


async def test_checkers_of_a_client_answer_to_an_added_log(
    face: Face, logs: list[BrokerThread]
) -> None:
    cluster, asked = face.connect([logs[0].url, logs[1].url]), list[str]()

    def decide(half: txmq.Half) -> txmq.Decision:
        asked.append(half.checker)
        return txmq.COMMIT

    cluster.register_checker("orders", decide)
    await cluster.send("orders", b"first")
    add_logs(logs[0], logs[1], logs[2], together=True)
    await send_until(face, cluster, "orders", logs[2])
    there = face.connect(logs[2].url)  # which has no checker
    await face.half(there, "halves", b"1", checker="orders", check_after=1.0)
    logs[2].clock.advance(10.0)
    await face.until(lambda: asked, "the client with the checker is asked")
