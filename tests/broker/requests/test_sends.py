"""Frames of many sends: one record, one flush, one reply, and an answer for each
send.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker.support import BrokerInMemory, Client, writes
from txmq import errors
from txmq.batch import BatchView, encode
from txmq.broker.requests import sends
from txmq.config.broker import FlushEvery, load_broker
from txmq.core.events.topics import BatchStored
from txmq.core.topics.topics import CreateTopic
from txmq.core.transactions.instances import RegisterInstance
from txmq.model.message import Message
from txmq.store.log.record import LOST
from txmq.wire import data_requests
from txmq.wire.batched import pack_requests, unpack_replies
from txmq.wire.chunks import unpack_chunks
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import encode_frame
from txmq.wire.hello import Hello
from txmq.wire.status import to_error

P, Q = b"p" * 16, b"q" * 16


@pytest.fixture
def broker() -> BrokerInMemory:
    broker = BrokerInMemory()
    for name in ("t", "u"):
        broker.do(CreateTopic(name, 1))
    return broker


def send(
    sequence: int,
    topic: str = "t",
    *,
    key: str | None = None,
    producer: bytes = P,
    size: int = 0,
    **fields: Any,
) -> bytes:
    body = b"%c%d" % (producer[0], sequence) + bytes(size)
    batch = encode(
        [Message(body, key, **fields)], producer_id=producer, epoch=0, sequence=sequence, born_at=1
    )
    return data_requests.send_header(topic, 0, 0) + batch


def frame(*payloads: bytes) -> bytes:
    return encode_frame(Opcode.SENDS, 7, b"".join(pack_requests(payloads)))


def answers(client: Client) -> list[object]:
    """Return the answer to each send: its offset, or the error's type."""
    [reply] = client.replies()
    return [
        type(to_error(*answer))
        if answer.status
        else data_requests.unpack_send_receipt(answer.payload).offset
        for answer in unpack_replies(reply.payload)
    ]


def ask(client: Client, *payloads: bytes) -> list[object]:
    client.send(frame(*payloads))
    return answers(client)


def bodies(client: Client, topic: str = "t") -> list[bytes]:
    reply = client.ask(
        Opcode.READ, data_requests.pack_read(data_requests.Read(0, 0, 0, 1 << 20, topic))
    )
    return [
        body
        for chunk in unpack_chunks(reply.payload).chunks
        for body in BatchView(chunk.batch).bodies
    ]


def records(broker: BrokerInMemory) -> int:
    return sum(record.kind != LOST for record in broker.log.scan(broker.log.first))


def test_a_frame_is_one_record_brought_to_disk_at_once(
    broker: BrokerInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes = writes(broker, monkeypatch)
    client, before = broker.connect(), records(broker)
    assert ask(client, *(send(number, "tu"[number % 2]) for number in range(20))) == [
        n // 2 for n in range(20)
    ]
    assert (len(flushes), records(broker)) == (1, before + 1)
    assert bodies(client, "u") == [b"p%d" % number for number in range(1, 20, 2)]


def test_a_frame_of_large_sends_is_cut_into_several_records(broker: BrokerInMemory) -> None:
    client, before = broker.connect(), records(broker)
    half = sends.MAX_RECORD_BYTES // 2
    assert ask(client, *(send(number, size=half) for number in range(5))) == list(range(5))
    assert records(broker) == before + 3


def test_each_send_of_a_frame_is_answered_in_its_place(broker: BrokerInMemory) -> None:
    client = broker.connect()
    damaged = bytearray(send(0, producer=b"d" * 16))
    damaged[-20] ^= 1
    neighbours = b"?", send(0, "none", producer=Q), bytes(damaged)
    told = ask(client, send(0), *neighbours, send(1, "u"), send(0), send(2), send(4))
    assert told == [
        0, errors.BadRequest, errors.UnknownTopic, errors.BadRequest, 0, 0, 1, errors.SequenceGap,
    ]  # fmt: skip
    assert bodies(client) == [b"p0", b"p2"]


def test_a_message_that_is_too_large_is_refused_alone() -> None:
    broker = BrokerInMemory(settings=load_broker(None, {"data": "/data", "message_bytes": 1_024}))
    broker.do(CreateTopic("t", 1))
    assert ask(broker.connect(), send(0, size=2_000), send(0, producer=Q)) == [
        errors.MessageTooLarge,
        0,
    ]


def test_a_send_that_has_to_wait_leaves_its_neighbours_their_order(broker: BrokerInMemory) -> None:
    """An undecided half message holds key k of topic t."""
    client, token = broker.connect(), broker.half(1, Message(b"half", "k"))
    told = ask(
        client,
        send(0, key="a"),
        send(1, key="k"),
        send(2, "u"),
        send(3, key="k"),
        send(4, delay=60.0),
        send(5),
    )
    assert told == [0, -1, 0, -1, -1, 1]
    assert (bodies(client), bodies(client, "u")) == ([b"p0", b"p5"], [b"p2"])
    client.call(
        "tx.decide", token=token, outcome="COMMIT", operator="me", reason="test", force=True
    )
    assert bodies(client) == [b"p0", b"p5", b"half", b"p1", b"p3"]
    broker.start()
    broker.pass_time(61)
    assert bodies(client)[5:] == [b"p4"]


def test_a_repeated_frame_gets_its_receipts_again(broker: BrokerInMemory) -> None:
    client = broker.connect()
    frames = [send(0), send(1, "u"), send(2)]
    assert ask(client, *frames) == [0, 0, 1]
    client.send(frame(*frames[::-1], send(3)))
    [reply] = client.replies()
    receipts = [
        data_requests.unpack_send_receipt(answer.payload)
        for answer in unpack_replies(reply.payload)
    ]
    assert [(receipt.offset, receipt.duplicate) for receipt in receipts] == [
        (1, True),
        (0, True),
        (0, True),
        (2, False),
    ]


def test_an_older_incarnation_stores_nothing_new_and_gets_its_old_receipts(
    broker: BrokerInMemory,
) -> None:
    epoch = broker.do(RegisterInstance("s", "one"))
    hello = Hello(versions=(1, 1), client="test", service="s", instance="one", incarnation=epoch)
    client = broker.connect(encode_frame(Opcode.HELLO, 1, hello.encode()))
    assert ask(client, send(0), send(1, "u")) == [0, 0]
    broker.do(RegisterInstance("s", "one"))
    assert ask(client, send(2), send(1, "u"), send(0), send(0, producer=Q)) == [
        errors.ProducerFenced, 0, 0, errors.ProducerFenced,
    ]  # fmt: skip


def test_a_disk_that_runs_full_refuses_new_sends_but_tells_of_those_that_are_stored(
    broker: BrokerInMemory,
) -> None:
    client = broker.connect()
    ask(client, send(0), send(1, "u"))
    broker.engine.disk.refusing = True
    assert ask(client, send(1, "u"), send(2), send(0), send(0, "u", producer=Q)) == [
        0, errors.ReadOnly, 0, errors.ReadOnly,
    ]  # fmt: skip
    broker.engine.disk.refusing = False
    assert ask(client, send(2), send(3, "u")) == [1, 1]


def policies(broker: BrokerInMemory, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let topic t wait for the disk, v and w not. Return whether each write was
    synced.
    """
    broker.do(CreateTopic("v", 1))
    broker.do(CreateTopic("w", 1))
    for name, messages in (("v", 10), ("w", 4)):
        broker.ask("topic.alter", name=name, flush=[60_000, messages])
    return writes(broker, monkeypatch)


def test_a_frame_waits_for_the_disk_where_one_of_its_topics_does(
    broker: BrokerInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, client = policies(broker, monkeypatch), broker.connect()
    assert ask(client, send(0, "v"), send(1, "v")) == [0, 1]
    assert synced == [False]
    assert broker.log.durable < broker.log.end
    assert ask(client, send(2, "v"), send(3), send(4, "v")) == [2, 0, 3]
    assert synced == [False, True]
    assert broker.log.durable == broker.log.end


def test_messages_of_a_frame_count_for_the_strictest_policy_among_them(
    broker: BrokerInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, client = policies(broker, monkeypatch), broker.connect()
    assert ask(client, *(send(number, "v") for number in range(3))) == [0, 1, 2]
    assert synced == [False]
    assert ask(client, send(3, "w")) == [0]
    assert synced == [False, True]
    assert ask(client, *(send(number, "vw"[number % 2]) for number in range(4, 7))) == [3, 1, 4]
    assert synced == [False, True, False]


def test_a_refusal_waits_for_the_records_it_may_rest_on(
    broker: BrokerInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, client = policies(broker, monkeypatch), broker.connect()
    assert ask(client, send(0, "v"), send(5, "v"), send(1, "v")) == [0, errors.SequenceGap, 1]
    assert synced == [False]
    assert broker.log.durable == broker.log.end


def test_the_policy_of_the_broker_holds_for_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = BrokerInMemory()
    broker.engine.flush_policy = broker.engine._schedule.policy = FlushEvery(
        every_ms=60_000, messages=100
    )
    broker.do(CreateTopic("t", 1))
    synced, client = policies(broker, monkeypatch), broker.connect()
    broker.ask("topic.alter", name="t", flush="sync")
    synced.clear()
    assert ask(client, send(0, "v"), send(1, "w")) == [0, 0]
    assert synced == [False]
    assert ask(client, send(2, "v"), send(3)) == [1, 0]
    assert synced[-1]


def test_a_listener_gets_each_event_of_a_shared_record(broker: BrokerInMemory) -> None:
    heard: list[tuple[int, int]] = []
    broker.engine.listen(
        BatchStored, lambda event, place: heard.append((event.topic_id, place.attachment_position))
    )
    ask(broker.connect(), send(0), send(1, "u"))
    [(first, begin), (second, after)] = heard
    assert (first, second, after - begin) == (
        1,
        2,
        len(send(0)) - len(data_requests.send_header("t", 0, 0)),
    )


def test_a_frame_that_cannot_be_taken_apart_is_refused_as_a_whole(broker: BrokerInMemory) -> None:
    client = broker.connect()
    client.send(encode_frame(Opcode.SENDS, 7, b"\1\0\0\0\5\0\0\0abc"))
    assert type(client.refusal()) is errors.BadRequest
