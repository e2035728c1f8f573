"""A broker's session that is fed bytes: hellos, strangers, and malicious input."""

from __future__ import annotations

from struct import pack

import pytest
from structlog.testing import capture_logs

from tests.broker.support import HELLO, BrokerInMemory, QuickDisk, send_payload
from txmq import errors
from txmq.batch import encode
from txmq.broker.reactor.bounded_log import MOST
from txmq.model.decider import ByPostgres
from txmq.model.message import Message
from txmq.wire import data_requests
from txmq.wire.calls.encoding import encode_call
from txmq.wire.calls.registry import CALLS
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import encode_frame
from txmq.wire.json import parse
from txmq.wire.status import to_error


@pytest.fixture
def broker() -> BrokerInMemory:
    return BrokerInMemory()


def test_a_greeting_is_answered_with_the_broker_s_identity(broker: BrokerInMemory) -> None:
    client = broker.connect(None)
    client.send(HELLO)
    [reply] = client.replies()
    assert parse(reply.payload)["log_id"] == str(broker.engine.store.log_id)  # type: ignore[call-overload, index]


def test_nothing_else_is_done_before_the_greeting(broker: BrokerInMemory) -> None:
    client = broker.connect(None)
    client.send(encode_frame(Opcode.SEND, 1, send_payload()))
    assert isinstance(client.refusal(), errors.BadRequest)
    assert client.closed


def test_a_connection_that_never_greets_is_cut(broker: BrokerInMemory) -> None:
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
def test_anything_but_a_hello_ends_the_connection_and_harms_no_other(
    broker: BrokerInMemory, data: bytes
) -> None:
    other, stranger = broker.connect(), broker.connect(None)
    stranger.send(data)
    assert isinstance(stranger.refusal(), errors.BadRequest)
    assert stranger.closed
    assert other.ask(Opcode.PING, b"").status == 0


def test_a_wrong_request_is_refused_and_the_next_one_served(broker: BrokerInMemory) -> None:
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


def test_a_batch_with_a_wrong_checksum_is_not_stored(broker: BrokerInMemory) -> None:
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
    broker: BrokerInMemory, topic: str, partition: int, error: type
) -> None:
    client = broker.connect()
    client.call("topic.create", name="t", partitions=1)
    reply = client.ask(Opcode.SEND, send_payload(topic=topic, partition=partition))
    assert type(to_error(reply.status, reply.payload)) is error


def test_a_fetch_waits_for_a_message_and_ends_with_its_connection(broker: BrokerInMemory) -> None:
    client, producer = broker.connect(), broker.connect()
    client.call("topic.create", name="t", partitions=1)
    read = data_requests.pack_read(data_requests.Read(0, 0, 10_000, 1 << 20, "t"))
    client.send(encode_frame(Opcode.READ, 5, read))
    gone = broker.connect()
    gone.send(encode_frame(Opcode.READ, 5, read))
    gone.session.connectionLost()  # type: ignore[attr-defined]
    assert client.replies() == []
    assert producer.ask(Opcode.SEND, send_payload()).status == 0
    assert [reply.correlation for reply in client.replies()] == [5]
    assert gone.replies() == []


def test_an_unanswered_read_ends_after_its_time(broker: BrokerInMemory) -> None:
    client = broker.connect()
    client.call("topic.create", name="t", partitions=1)
    client.send(
        encode_frame(
            Opcode.READ, 5, data_requests.pack_read(data_requests.Read(0, 0, 500, 1 << 20, "t"))
        )
    )
    broker.clock.advance(0.4)
    assert client.replies() == []
    broker.clock.advance(0.2)
    assert len(client.replies()) == 1


def test_a_half_message_needs_a_resolver_for_its_database(broker: BrokerInMemory) -> None:
    from txmq.wire.bundle import BundleDescription, BundlePart, PartBatch, bundle_digest, pack_part

    client = broker.connect()
    client.call("topic.create", name="t", partitions=1)
    batch = encode([Message(b"m")], producer_id=b"t" * 16, epoch=0, sequence=0, born_at=1)
    described = BundleDescription(ByPostgres(1, 1, 5, None, 1), "s", (), 0)
    part = BundlePart(
        b"t" * 16, 0, 0, True, False, bytes(32), described, (PartBatch("t", 0, 0, batch),)
    )
    reply = client.ask(
        Opcode.GROUP, b"".join(pack_part(part._replace(digest=bundle_digest([part]))))
    )
    assert isinstance(to_error(reply.status, reply.payload), errors.NoResolver)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_every_call_refuses_arguments_that_it_does_not_know(
    broker: BrokerInMemory, name: str
) -> None:
    reply = broker.connect().ask(Opcode.CALL, encode_call(name, {"surprise": 1}))
    assert isinstance(to_error(reply.status, reply.payload), errors.BadRequest)


def test_a_client_that_does_not_read_is_asked_nothing_more_and_cut_in_the_end(
    broker: BrokerInMemory,
) -> None:
    client = broker.connect()
    client.transport.producer.pauseProducing()  # type: ignore[union-attr]
    assert client.transport.producerState == "paused"
    broker.clock.advance(29)
    assert not client.closed
    broker.clock.advance(2)
    assert client.closed


def test_a_client_that_reads_again_goes_on(broker: BrokerInMemory) -> None:
    client = broker.connect()
    client.transport.producer.pauseProducing()  # type: ignore[union-attr]
    client.transport.producer.resumeProducing()  # type: ignore[union-attr]
    broker.clock.advance(60)
    assert not client.closed


def test_refused_connections_are_logged_once_a_minute() -> None:
    from twisted.internet.task import Clock

    from txmq.broker.reactor.held_sends import HeldSends
    from txmq.broker.reactor.session_factory import SessionFactory

    def never(*_args: object) -> None:
        raise AssertionError("nobody asks")

    clock = Clock()
    sends = HeldSends(QuickDisk(), clock)
    factory = SessionFactory(never, never, clock, sends, connection_limit=lambda: 1)  # type: ignore[arg-type]
    with capture_logs() as logs:
        taken = factory.buildProtocol(None)
        assert taken is not None
        for _ in range(3):
            for _ in range(10_000):
                assert factory.buildProtocol(None) is None
            clock.advance(61)
    assert [log["refused"] for log in logs] == [1, 10_001, 20_001]


def test_warnings_about_connections_are_so_many_a_minute(broker: BrokerInMemory) -> None:
    with capture_logs() as logs:
        for _ in range(300):
            broker.connect(None).send(b"GET / HTTP/1.1\r\n\r\n")
        assert len(logs) == MOST
        broker.clock.advance(61)
        broker.connect(None).send(bytes(64))
    [left_out, *more] = logs[MOST:]
    assert (left_out["event"], left_out["lines"]) == ("session.warnings_left_out", 300 - MOST)
    assert 1 <= len(more) <= MOST
