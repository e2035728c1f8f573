"""Delayed messages: published by the broker's own clock, listed, recalled, and stored
in transactions.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker.support import BrokerInMemory, Client
from txmq import errors
from txmq.batch import BatchView, encode
from txmq.core.topics.delay_rules import RECALL_RETENTION
from txmq.core.topics.delayed import scan
from txmq.model.decider import ByBroker
from txmq.model.message import Message
from txmq.model.units import SECOND
from txmq.wire import data_requests
from txmq.wire.bundle import (
    BundleDescription,
    BundlePart,
    PartBatch,
    bundle_digest,
    pack_part,
    unpack_bundle_receipt,
)
from txmq.wire.calls.encoding import encode_call
from txmq.wire.chunks import unpack_chunks
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import encode_frame
from txmq.wire.status import to_error

PRODUCER = b"p" * 16


@pytest.fixture
def client(broker: BrokerInMemory) -> Client:
    client = broker.connect()
    client.call("topic.create", name="t", partitions=1)
    return client


def send(client: Client, *messages: Message, sequence: int = 0) -> Any:
    batch = encode(messages, producer_id=PRODUCER, epoch=0, sequence=sequence, born_at=1)
    return data_requests.unpack_send_receipt(
        client.ask(Opcode.SEND, data_requests.send_header("t", 0, 0) + batch).payload
    )


def bodies(client: Client) -> list[bytes]:
    frame = client.ask(
        Opcode.READ, data_requests.pack_read(data_requests.Read(0, 0, 0, 1 << 20, "t"))
    )
    return [
        body
        for chunk in unpack_chunks(frame.payload).chunks
        for body in BatchView(chunk.batch).bodies
    ]


def refusal(client: Client, name: str, **args: object) -> errors.TxmqError:
    reply = client.ask(Opcode.CALL, encode_call(name, args))
    return to_error(reply.status, reply.payload)


def test_a_message_is_published_at_its_time_to_the_millisecond(
    broker: BrokerInMemory, client: Client
) -> None:
    assert send(client, Message(b"x", delay=10)).offset == -1
    broker.pass_time(9.9)
    broker.clock.advance(0.099)
    assert bodies(client) == []
    broker.clock.advance(0.001)
    broker.clock.advance(0)
    assert bodies(client) == [b"x"]


def test_a_reader_at_the_tail_gets_it_when_it_is_due(
    broker: BrokerInMemory, client: Client
) -> None:
    send(client, Message(b"x", delay=5))
    reader = broker.connect()
    reader.send(
        encode_frame(
            Opcode.READ, 3, data_requests.pack_read(data_requests.Read(0, 0, 20_000, 1 << 20, "t"))
        )
    )
    assert reader.replies() == []
    broker.pass_time(5.1)
    [reply] = reader.replies()
    assert BatchView(unpack_chunks(reply.payload).chunks[0].batch).bodies == [b"x"]


def test_delayed_messages_are_listed_page_by_page_in_the_order_of_their_times(
    broker: BrokerInMemory, client: Client
) -> None:
    send(client, *[Message(b"x" * n, delay=30 - n) for n in range(5)])
    client.call("topic.create", name="other", partitions=1)
    first = broker.ask("message.delayed", limit=2)
    assert [row["message_id"][-2:] for row in first["messages"]] == ["-4", "-3"]
    assert first["delayed"] == 5
    second = broker.ask("message.delayed", limit=3, after=first["next"], topic="t")
    assert [row["due_at"] - broker.now() for row in second["messages"]] == [
        n * SECOND for n in (28, 29, 30)
    ]
    assert second["next"] is None
    assert broker.ask("message.delayed", topic="other")["messages"] == []
    assert broker.ask("broker.show")["delayed"] == 5


def test_a_message_is_recalled_by_its_id_or_reported_as_too_late(
    broker: BrokerInMemory, client: Client
) -> None:
    send(client, Message(b"a", delay=1), Message(b"b", delay=5))
    ids = [f"{PRODUCER.hex()}-{n}" for n in range(2)]
    broker.pass_time(2)
    late = refusal(client, "message.recall", ids=ids)
    assert isinstance(late, errors.RecallTooLate)
    assert late.detail == {"late": ids[:1]}
    assert client.call("message.recall", ids=ids[1:]) == {"recalled": 1}
    assert client.call("message.recall", ids=ids[1:]) == {"recalled": 0}
    broker.pass_time(10)
    assert bodies(client) == [b"a"]


@pytest.mark.parametrize(
    "ids", [[], ["x"], ["0" * 32 + "--1"], ["0" * 32 + "-1"] * 1_001, [7], "0" * 32 + "-1", [None]]
)
def test_anything_but_a_list_of_ids_is_refused(client: Client, ids: object) -> None:
    assert isinstance(refusal(client, "message.recall", ids=ids), errors.BadRequest)


def test_recalls_are_swept_after_a_week(broker: BrokerInMemory, client: Client) -> None:
    send(client, Message(b"a", delay=30 * 24 * 3_600))
    client.call("message.recall", ids=[f"{PRODUCER.hex()}-0"])
    broker.clock.advance(RECALL_RETENTION / SECOND + 1)
    broker.pass_time(1_300)
    assert not list(broker.engine.state.tables["recalled"].range(b""))


def test_messages_of_a_transaction_wait_one_by_one(broker: BrokerInMemory, client: Client) -> None:
    token = broker.token(1)
    batch = encode([Message(b"a", "k", delay=2), Message(b"b"), Message(b"c", delay=1)],
                   producer_id=token, epoch=0, sequence=0, born_at=1)  # fmt: skip
    parts = [
        BundlePart(
            token,
            0,
            0,
            True,
            True,
            bytes(32),
            BundleDescription(ByBroker(), "s", (), 0),
            (PartBatch("t", 0, 0, batch),),
        )
    ]
    part = parts[0]._replace(digest=bundle_digest(parts))
    unpack_bundle_receipt(client.ask(Opcode.GROUP, b"".join(pack_part(part))).payload)
    broker.pass_time(0.5)
    assert bodies(client) == [b"b"]
    shown = broker.ask("tx.show", token=token.hex(), detail=True, limit=10)
    assert [row["offset"] for row in shown["rows"]] == [None, 0, None]
    assert shown["messages"] == 3
    broker.pass_time(2)
    assert bodies(client) == [b"b", b"c", b"a"]


def test_a_clock_that_is_put_forward_publishes_the_messages_due_by_it(
    broker: BrokerInMemory, client: Client
) -> None:
    send(client, *[Message(str(n).encode(), delay=600 + n) for n in range(3)])
    jump = 601 * SECOND
    now = broker.engine._now
    broker.engine._now = lambda: now() + jump
    broker.pass_time(0.2)
    assert bodies(client) == [b"0", b"1"]
    assert len(list(scan(broker.engine.state))) == 1


def test_more_than_one_record_takes_are_published_one_record_after_the_other(
    broker: BrokerInMemory, client: Client
) -> None:
    for sequence in range(0, 2_000, 1_000):
        send(client, *[Message(b"x", delay=1)] * 1_000, sequence=sequence)
    broker.pass_time(1.5)
    for _ in range(20):
        broker.clock.advance(0)
    assert broker.engine.state.delayed_count == 0
    assert len(bodies(client)) == 2_000


def fetched(client: Client, member: dict[str, Any]) -> list[bytes]:
    wanted = data_requests.Fetch(member["generation"], 0, 1 << 20, 100, "g", "m")
    chunks = unpack_chunks(
        client.ask(Opcode.FETCH, data_requests.pack_fetch(wanted)).payload
    ).chunks
    return [
        body
        for c in chunks
        for body in BatchView(c.batch).bodies[c.first_row : c.first_row + c.rows]
    ]


def test_messages_expired_by_the_brokers_clock_are_not_delivered_and_counted(
    broker: BrokerInMemory, client: Client
) -> None:
    now = broker.now()
    messages = [
        Message(b"a", ttl=5),
        Message(b"b"),
        Message(b"c", expire_at=now + 20 * SECOND),
        Message(b"d", ttl=5, delay=4),
    ]
    send(client, *messages)
    broker.pass_time(8)
    joined: Any = client.call("consumer.join", group="g", member="m", instance="i", topics=["t"])
    assert fetched(client, joined) == [b"b", b"c", b"d"]
    client.call("consumer.leave", group="g", member="m", instance="i")
    broker.pass_time(13)
    joined = client.call("consumer.join", group="g", member="m", instance="i", topics=["t"])
    assert fetched(client, joined) == [b"b"]
    assert broker.ask("group.show", group="g")["expired"] == 3
    assert bodies(client) == [b"a", b"b", b"c", b"d"]


def test_a_fetch_finds_messages_behind_many_expired_ones(
    broker: BrokerInMemory, client: Client
) -> None:
    for n in range(3_000):
        send(client, Message(b"x", ttl=1), sequence=n)
    send(client, Message(b"alive"), sequence=3_000)
    broker.pass_time(2)
    joined: Any = client.call("consumer.join", group="g", member="m", instance="i", topics=["t"])
    wanted = data_requests.Fetch(joined["generation"], 10_000, 1 << 10, 10, "g", "m")
    client.send(encode_frame(Opcode.FETCH, 9, data_requests.pack_fetch(wanted)))
    for _ in range(400):
        broker.clock.advance(0)
    [reply] = client.replies()
    assert BatchView(unpack_chunks(reply.payload).chunks[0].batch).bodies == [b"alive"]


def test_a_connection_that_is_lost_meanwhile_fetches_nothing_more(
    broker: BrokerInMemory, client: Client
) -> None:
    for n in range(20):
        send(client, Message(b"x", ttl=1 if n < 19 else None), sequence=n)
    broker.pass_time(2)
    joined: Any = client.call("consumer.join", group="g", member="m", instance="i", topics=["t"])
    wanted = data_requests.Fetch(joined["generation"], 10_000, 1 << 10, 3, "g", "m")
    client.session.dataReceived(encode_frame(Opcode.FETCH, 9, data_requests.pack_fetch(wanted)))  # type: ignore[attr-defined]
    client.session.connectionLost()  # type: ignore[attr-defined]
    broker.clock.advance(0)
    assert broker.ask("group.show", group="g")["leased"] == 0
