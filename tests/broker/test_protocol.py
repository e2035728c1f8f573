"""A session of the broker's, fed bytes: greetings, strangers, and input that is up to
no good.
"""

from __future__ import annotations

from struct import pack

import pytest

from tests.broker.support import HELLO, Broker, send_payload
from txmq import errors
from txmq.batch import encode
from txmq.model.message import Message
from txmq.wire import headers
from txmq.wire.calls import CALLS, encode_call
from txmq.wire.frames import encode_frame
from txmq.wire.headers import Opcode
from txmq.wire.json import parse
from txmq.wire.status import to_error


@pytest.fixture
def broker() -> Broker:
    return Broker()


def test_a_greeting_is_answered_with_the_broker_s_identity(broker: Broker) -> None:
    client = broker.connect(None)
    client.send(HELLO)
    [reply] = client.replies()
    assert parse(reply.payload)["log_id"] == str(broker.engine.store.log_id)  # type: ignore[call-overload, index]


def test_nothing_else_is_done_before_the_greeting(broker: Broker) -> None:
    client = broker.connect(None)
    client.send(encode_frame(Opcode.SEND, 1, send_payload()))
    assert isinstance(client.refusal(), errors.BadRequest)
    assert client.closed


def test_a_connection_that_never_greets_is_cut(broker: Broker) -> None:
    client = broker.connect(None)
    broker.clock.advance(9)
    assert not client.closed
    broker.clock.advance(2)
    assert client.closed


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        b"\xff" * 64,
        b"\x00" * 64,
        pack("<I", 5000) + bytes(100),
        HELLO[:-1] + bytes([HELLO[-1] ^ 1]),
    ],
    ids=["http", "tls", "ones", "zeros", "too long before the hello", "flipped bit"],
)
def test_what_is_no_greeting_ends_the_connection_and_harms_nobody(
    broker: Broker, data: bytes
) -> None:
    other, stranger = broker.connect(), broker.connect(None)
    stranger.send(data)
    assert isinstance(stranger.refusal(), errors.BadRequest)
    assert stranger.closed
    assert other.ask(Opcode.PING, b"").status == 0


def test_a_wrong_request_is_refused_and_the_next_one_served(broker: Broker) -> None:
    client = broker.connect()
    for opcode, payload in (
        (99, b""),
        (Opcode.SEND, b"x"),
        (Opcode.CALL, b"{"),
        (Opcode.CALL, encode_call("no.such", {})),
    ):
        reply = client.ask(opcode, payload)
        assert isinstance(to_error(reply.status, reply.payload), errors.BadRequest)
    assert client.ask(Opcode.PING, b"").status == 0
    assert not client.closed


def test_a_batch_with_a_wrong_checksum_is_not_stored(broker: Broker) -> None:
    client = broker.connect()
    client.call("topic.create", name="t", partitions=1)
    payload = send_payload()
    end = broker.engine.store.end
    reply = client.ask(Opcode.SEND, payload[:-1] + bytes([payload[-1] ^ 1]))
    assert isinstance(to_error(reply.status, reply.payload), errors.BadRequest)
    assert broker.engine.store.end == end


@pytest.mark.parametrize(
    ("topic", "partition", "error"),
    [("u", 0, errors.UnknownTopic), ("t", 9, errors.UnknownPartition)],
)
def test_a_send_that_cannot_be_placed_is_refused(
    broker: Broker, topic: str, partition: int, error: type
) -> None:
    client = broker.connect()
    client.call("topic.create", name="t", partitions=1)
    reply = client.ask(Opcode.SEND, send_payload(topic=topic, partition=partition))
    assert type(to_error(reply.status, reply.payload)) is error


def test_a_fetch_waits_for_a_message_and_ends_with_its_connection(broker: Broker) -> None:
    client, producer = broker.connect(), broker.connect()
    client.call("topic.create", name="t", partitions=1)
    read = headers.pack_read(headers.Read(0, 0, 10_000, 1 << 20, "t"))
    client.send(encode_frame(Opcode.READ, 5, read))
    gone = broker.connect()
    gone.send(encode_frame(Opcode.READ, 5, read))
    gone.session.connectionLost()  # type: ignore[attr-defined]
    assert client.replies() == []
    assert producer.ask(Opcode.SEND, send_payload()).status == 0
    assert [reply.correlation for reply in client.replies()] == [5]
    assert gone.replies() == []


def test_an_unanswered_read_ends_after_its_time(broker: Broker) -> None:
    client = broker.connect()
    client.call("topic.create", name="t", partitions=1)
    client.send(
        encode_frame(Opcode.READ, 5, headers.pack_read(headers.Read(0, 0, 500, 1 << 20, "t")))
    )
    broker.clock.advance(0.4)
    assert client.replies() == []
    broker.clock.advance(0.2)
    assert len(client.replies()) == 1


def test_a_half_message_needs_a_resolver_for_its_database(broker: Broker) -> None:
    from txmq.wire.group import Description, Part, PartBatch, group_digest, pack_part

    client = broker.connect()
    client.call("topic.create", name="t", partitions=1)
    batch = encode([Message(b"m")], producer_id=b"t" * 16, epoch=0, sequence=0, born_at=1)
    described = Description(("postgres", 1, 1, 5, None), "s", (), 0)
    part = Part(b"t" * 16, 0, 0, True, False, bytes(32), described, (PartBatch("t", 0, 0, batch),))
    reply = client.ask(
        Opcode.GROUP, b"".join(pack_part(part._replace(digest=group_digest([part]))))
    )
    assert isinstance(to_error(reply.status, reply.payload), errors.NoResolver)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_every_call_refuses_arguments_that_it_does_not_know(broker: Broker, name: str) -> None:
    reply = broker.connect().ask(Opcode.CALL, encode_call(name, {"surprise": 1}))
    assert isinstance(to_error(reply.status, reply.payload), errors.BadRequest)


def test_a_client_that_does_not_read_is_asked_nothing_more_and_cut_in_the_end(
    broker: Broker,
) -> None:
    client = broker.connect()
    client.transport.producer.pauseProducing()  # type: ignore[union-attr]
    assert client.transport.producerState == "paused"
    broker.clock.advance(29)
    assert not client.closed
    broker.clock.advance(2)
    assert client.closed


def test_a_client_that_reads_again_goes_on(broker: Broker) -> None:
    client = broker.connect()
    client.transport.producer.pauseProducing()  # type: ignore[union-attr]
    client.transport.producer.resumeProducing()  # type: ignore[union-attr]
    broker.clock.advance(60)
    assert not client.closed
