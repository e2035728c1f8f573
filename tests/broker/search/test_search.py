"""Search by id, key, time and place: exact, page by page, and within what readers may
see.
"""

from __future__ import annotations

from base64 import b64decode
from typing import Any

import pytest

from tests.broker.support import BrokerInMemory, Client
from txmq import errors
from txmq.batch import Codec, decode, encode
from txmq.batch.codecs import decompress
from txmq.broker.search import search
from txmq.broker.search.search import Search, SearchQuery
from txmq.client.protocol.calls import calls_by
from txmq.client.protocol.lives import trace_messages
from txmq.core.topics import topics
from txmq.errors import CorruptRecord
from txmq.faces import run
from txmq.model.message import Message
from txmq.model.topic_partition import TopicPartition
from txmq.model.units import SECOND
from txmq.wire import data_requests
from txmq.wire.calls.encoding import encode_call
from txmq.wire.data_requests import Opcode
from txmq.wire.status import to_error


@pytest.fixture
def client(broker: BrokerInMemory) -> Client:
    client = broker.connect()
    client.call("topic.create", name="t", partitions=2)
    return client


def send(
    client: Client, *messages: Message, producer: int = 1, sequence: int = 0, partition: int = 0,
    codec: Codec = Codec.NONE,
) -> None:  # fmt: skip
    batch = encode(
        messages,
        producer_id=bytes([producer]) * 16,
        epoch=0,
        sequence=sequence,
        born_at=5,
        codec=codec,
    )
    reply = client.ask(Opcode.SEND, data_requests.send_header("t", partition, 0) + batch)
    assert reply.status == 0


def found(broker: BrokerInMemory, **wanted: Any) -> list[dict[str, Any]]:
    """Return all pages."""
    rows: list[dict[str, Any]] = []
    after = None
    while True:
        page = broker.ask("message.find", topic="t", after=after, **wanted)
        rows += page["messages"]
        after = page["next"]
        if after is None:
            return rows


def places(rows: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(row["partition"], row["offset"]) for row in rows]


def test_by_key_exactly_in_all_partitions_or_in_one(broker: BrokerInMemory, client: Client) -> None:
    for partition in range(2):
        messages = [Message(b"x", f"k{n % 3}") for n in range(9)]
        send(client, *messages, producer=partition, partition=partition)
    assert places(found(broker, key="k1")) == [(p, n) for p in range(2) for n in (1, 4, 7)]
    assert places(found(broker, key="k1", partition=1, offset=2)) == [(1, 4), (1, 7)]
    assert found(broker, key="k") == []


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_pages_neither_leave_out_nor_repeat(
    broker: BrokerInMemory, client: Client, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "PAGE_BATCHES", 2)
    for n in range(12):
        send(client, *[Message(b"x", f"k{n % 2}")] * (1 + n % 3), producer=n, partition=n % 2)
    everything = found(broker, limit=limit)
    assert places(everything) == [(p, n) for p in range(2) for n in range(12)]
    assert places(found(broker, key="k1", limit=limit)) == [(1, n) for n in range(12)]


def test_by_time_from_then_on_and_before(broker: BrokerInMemory, client: Client) -> None:
    times = []
    for n in range(5):
        times.append(broker.now())
        send(client, Message(b"x"), producer=n)
        broker.pass_time(10)
    assert places(found(broker, start=times[1], end=times[3])) == [(0, 1), (0, 2)]
    assert places(found(broker, start=times[4] + SECOND)) == []


def test_by_id_in_a_batch_of_many(broker: BrokerInMemory, client: Client) -> None:
    send(client, *[Message(str(n).encode(), headers={"n": str(n)}) for n in range(10)], producer=7)
    send(client, *[Message(b"other")] * 10, producer=8)
    [row] = found(broker, id="07" * 16 + "-4", bodies=True)
    assert (row["offset"], b64decode(row["body"]), row["headers"], row["born_at"]) == (
        4,
        b"4",
        {"n": "4"},
        5,
    )
    assert found(broker, id="07" * 16 + "-10") == []


def test_by_id_alone_delayed_recalled_and_undecided_messages_are_found(
    broker: BrokerInMemory, client: Client
) -> None:
    send(client, Message(b"a", "k", delay=60), Message(b"b", delay=60), producer=9)
    client.call("message.recall", ids=["09" * 16 + "-1"])
    token = broker.half(1, Message(b"half", "h"))

    def shown(name: str) -> Any:
        return broker.ask("message.show", id=name, bodies=True)["message"]

    waiting = shown("09" * 16 + "-0")
    assert (waiting["state"], waiting["due_at"], b64decode(waiting["body"])) == (
        "delayed", broker.now() + 60 * SECOND, b"a",
    )  # fmt: skip
    assert shown("09" * 16 + "-1") == {"state": "recalled", "message_id": "09" * 16 + "-1"}
    undecided = shown(f"{token}-0")
    assert (undecided["state"], undecided["offset"], undecided["key"]) == ("undecided", None, "h")
    assert shown(f"{token}-1") is None
    assert shown("0a" * 16 + "-0") is None
    client.call("tx.decide", token=token, outcome="COMMIT", operator="o", reason="r", force=True)
    assert (shown(f"{token}-0")["state"], shown(f"{token}-0")["offset"]) == ("published", 0)


def test_a_message_of_a_deleted_topic_is_not_taken_for_one_of_a_new_topic(
    broker: BrokerInMemory, client: Client
) -> None:
    token = broker.half(1, Message(b"old", "h"))
    client.call("tx.decide", token=token, outcome="COMMIT", operator="o", reason="r", force=True)
    client.call("topic.delete", name="t")
    client.call("topic.create", name="t", partitions=1)
    send(client, Message(b"new", "h"))

    def ask(name: str, **args: Any) -> Any:
        return broker.ask(name, **args)

    traced = run(trace_messages(calls_by(ask), {"id": f"{token}-0"}, 10))
    [message] = traced.messages
    assert (message["state"], message["offset"]) == ("deleted with its topic", None)
    assert message["transaction"]["token"] == token
    assert [event.what for event in traced.events][-1] == "deleted with its topic"
    by_key = run(trace_messages(calls_by(ask), {"key": "h"}, 10))
    assert [message["message_id"] for message in by_key.messages] == [f"{'01' * 16}-0"]


def test_large_messages_come_in_pages_that_fit_in_a_reply(
    broker: BrokerInMemory, client: Client
) -> None:
    for n in range(5):
        send(client, Message(bytes(600_000)), producer=n)
    first = broker.ask("message.find", topic="t", bodies=True)
    assert 0 < len(first["messages"]) < 5
    assert places(found(broker, bodies=True)) == [(0, n) for n in range(5)]


@pytest.mark.parametrize(("key", "opened"), [("k", 1), ("none has it", 0)])
def test_a_step_shows_about_so_many_bytes_however_small_they_are_compressed(
    broker: BrokerInMemory, client: Client, key: str, opened: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of 1 KiB in the log may have 16 MiB of bodies."""
    for n in range(3):
        send(client, *[Message(bytes(100_000), "k")] * 2, producer=n, codec=Codec.ZSTD)
    sizes: list[int] = []

    def counted(codec: int, data: bytes, size: int) -> bytes:
        sizes.append(size)
        return decompress(codec, data, size)

    monkeypatch.setattr(decode, "decompress", counted)
    state = broker.engine.state
    query, topic = SearchQuery(key, bodies=True), state.topics["t"]
    page = Search(broker.log, state, topic, query, size=64 << 10).page(range(1), 0)
    assert sizes == [200_000] * opened
    assert page.following == ((0, 2) if opened else None)
    assert places(found(broker, key="k", bodies=True)) == [(0, n) for n in range(6)]


def test_a_step_ends_with_a_page(broker: BrokerInMemory, client: Client) -> None:
    send(client, *[Message(bytes(600_000), "k")] * 5)
    state = broker.engine.state
    page = Search(broker.log, state, state.topics["t"], SearchQuery(bodies=True)).page(range(1), 0)
    assert (len(page.messages), page.following) == (2, (0, 2))


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        ({"topic": "nowhere"}, errors.UnknownTopic),
        ({"topic": "t", "partition": 2}, errors.UnknownPartition),
        ({"topic": "t", "after": [7, 0]}, errors.UnknownPartition),
        ({"topic": "t", "id": "x"}, errors.BadRequest),
        ({"topic": "t", "key": ""}, errors.BadRequest),
        ({"topic": "t", "limit": 0}, errors.BadRequest),
        ({"topic": "t", "start": -1}, errors.BadRequest),
        ({}, errors.BadRequest),
    ],
)
def test_impossible_requests_are_refused(
    client: Client, wanted: dict[str, Any], error: type[Exception]
) -> None:
    reply = client.ask(Opcode.CALL, encode_call("message.find", wanted))
    assert isinstance(to_error(reply.status, reply.payload), error)


def test_a_scan_lets_others_in_between(
    broker: BrokerInMemory, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 MiB without a catalogue held the reactor's thread for a tenth of a second."""
    for n in range(12):
        send(client, *[Message(b"x" * 1_000, "other")] * 100, producer=n)
    send(client, Message(b"x", "k"), producer=12)
    replies: list[Any] = []
    with monkeypatch.context() as patch:
        # each look at the clock finds it later, so that each step takes its time
        ticks = iter(range(1 << 30))
        patch.setattr(broker.clock, "seconds", lambda: next(ticks) / 1_000)
        broker.assembly.calls.ask("message.find", {"topic": "t", "key": "k"}, replies.append)
        at_once = len(replies)
    broker.pass_time(1)
    assert not at_once
    assert places(replies[0]["messages"]) == [(0, 1_200)]
    assert replies[0]["next"] is None


def test_damage_behind_what_is_found_begins_the_next_page(
    broker: BrokerInMemory, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(4):
        send(client, *[Message(b"x" * 1_000, "k")] * 100, producer=n)
    topic = broker.engine.state.topics["t"]
    rows = list(topics.scan_entries(broker.engine.state, TopicPartition(topic.topic_id, 0), 0))
    position = rows[2][1].position + 100
    read = broker.log.read

    def damaged(at: int, length: int) -> bytes:
        if at <= position < at + length:
            raise CorruptRecord("/data/log", position, "a flipped bit")
        return read(at, length)

    monkeypatch.setattr(broker.log, "read", damaged)
    page = broker.ask("message.find", topic="t", key="k", limit=1_000)
    assert (len(page["messages"]), page["next"]) == (200, (0, 200))
    refused = broker.ask("message.find", topic="t", key="k", after=list(page["next"]))
    assert type(refused) is errors.MessagesDamaged
