"""Connections to a broker: found, refused, lost, closed, inherited by a child."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any
from uuid import UUID, uuid4

import pytest

import txmq
from tests.client.scripted_broker import FakeBroker, HangUp, Raw
from txmq.client.blocking.client import Client
from txmq.client.blocking.connections import pool
from txmq.client.protocol.address import Address, parse_url
from txmq.client.protocol.conversation import Conversation, LogIdentity
from txmq.errors import (
    BadRequest,
    BrokerUnavailable,
    ClientClosed,
    ConfigError,
    ConnectionLost,
    LogChanged,
    NotPermitted,
    RemoteProtocolError,
    RequestTimeout,
    UnknownTopic,
)
from txmq.testing.wait import PATIENCE_S
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import FrameDecoder, encode_frame
from txmq.wire.hello import BrokerLimits, Hello, Welcome

WELCOME = (
    '{"version":%d,"broker":"b","log_id":"%s","boot_epoch":1,"limits":{"frame":9999,"message":99}}'
)
EACH_S = 0.05  # from one signal to the next
Connect = Callable[..., Client]


@pytest.mark.parametrize(
    ("url", "addresses"),
    [
        ("txmq://127.0.0.1:7650", [("127.0.0.1", 7650)]),
        ("txmq://broker", [("broker", 7650)]),
        ("txmq://a:1,b:2", [("a", 1), ("b", 2)]),
        ("txmq://a:1,txmq://b/", [("a", 1), ("b", 7650)]),
        ("txmq://[::1]:99,[::2]", [("::1", 99), ("::2", 7650)]),
    ],
)
def test_a_url_names_one_or_more_addresses(url: str, addresses: list[tuple[str, int]]) -> None:
    assert list(parse_url(url)) == addresses


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://a:1",
        "txmq://",
        "txmq://a:x",
        "txmq://a:0",
        "txmq://a:70000",
        "txmq://::1:5",
        "txmq://a/b",
        "txmq://a:1,",
    ],
)
def test_an_invalid_url_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError, match="txmq://"):
        txmq.connect(url)


def test_an_address_is_written_as_in_a_url() -> None:
    assert [str(Address("::1", 5)), str(Address("a", 5))] == ["[::1]:5", "a:5"]


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": 0},
        {"timeout": "3"},
        {"retries": -1},
        {"connections": 0},
        {"window": 0},
        {"partitioner": 5},
        {"colour": "red"},
        {"service": "no name"},
    ],
)
def test_wrong_settings_are_refused_before_anything_is_connected(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        txmq.connect("txmq://127.0.0.1:1", **options)


def test_nothing_is_connected_before_it_is_needed(fake: FakeBroker, connect: Connect) -> None:
    client = connect(fake.url)
    assert fake.accepted == 0
    client.call("broker.show")
    assert fake.accepted == 1


def test_the_hello_names_client_and_service(fake: FakeBroker, connect: Connect) -> None:
    connect(fake.url).call("broker.show")
    assert b'"service":"orders"' in fake.frames[0].payload
    assert b"txmq-python/" in fake.frames[0].payload


def test_without_a_broker_the_error_says_what_was_tried_and_what_to_do(connect: Connect) -> None:
    one, two = _closed_port(), _closed_port()
    with pytest.raises(BrokerUnavailable) as caught:
        connect(f"txmq://127.0.0.1:{one},127.0.0.1:{two}", timeout=0.2).send("orders", b"x")
    text = str(caught.value)
    assert f"127.0.0.1:{one}" in text
    assert f"127.0.0.1:{two}" in text
    assert "txmq broker --data" in text
    assert (caught.value.outcome, caught.value.retriable) == ("not done", True)


def test_the_next_address_is_tried_where_one_does_not_answer(
    fake: FakeBroker, connect: Connect
) -> None:
    with FakeBroker() as mute:
        mute.greeting = b""
        url = f"txmq://127.0.0.1:{_closed_port()},127.0.0.1:{mute.port},127.0.0.1:{fake.port}"
        assert connect(url, timeout=9).send("orders", b"x").offset == 0


def test_a_broker_that_starts_a_little_later_is_found(connect: Connect) -> None:
    port = _closed_port()
    got: list[txmq.Receipt] = []
    client = connect(f"txmq://127.0.0.1:{port}", timeout=PATIENCE_S)
    caller = threading.Thread(target=lambda: got.append(client.send("orders", b"x")))
    caller.start()
    with FakeBroker(port=port):
        caller.join()
    assert got[0].offset == 0


@pytest.mark.parametrize(
    ("greeting", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "HTTP"),
        (b"\x15\x03\x01\x00\x02\x02\x46", "TLS"),
        (b"\xff\xff\xff\xff garbage", "frame"),
        (encode_frame(Opcode.PING, 1, b""), "not made"),
        (encode_frame(Opcode.HELLO, 1, b"{}"), "Welcome"),
    ],
)
def test_another_protocol_on_the_port_is_reported_at_once(
    fake: FakeBroker, connect: Connect, greeting: bytes, words: str
) -> None:
    fake.greeting = greeting
    with pytest.raises(RemoteProtocolError, match=words):
        connect(fake.url).send("orders", b"x")
    assert fake.accepted == 1, "it was not tried again"


def test_a_protocol_version_that_was_not_offered_is_refused(
    fake: FakeBroker, connect: Connect
) -> None:
    welcome = WELCOME % (7, fake.log_id)
    fake.greeting = encode_frame(Opcode.HELLO, 1, welcome.encode())
    with pytest.raises(RemoteProtocolError, match="version 7"):
        connect(fake.url).send("orders", b"x")


def test_a_refused_hello_raises_the_brokers_error(fake: FakeBroker, connect: Connect) -> None:
    refusal = b'{"error":"NotPermitted","message":"who are you?","detail":{}}'
    fake.greeting = encode_frame(Opcode.HELLO, 1, refusal, status=3)
    with pytest.raises(NotPermitted, match="who are you"):
        connect(fake.url).send("orders", b"x")


def test_an_unreadable_request_raises_the_brokers_error(fake: FakeBroker, connect: Connect) -> None:
    refusal = b'{"error":"BadRequest","message":"damaged","detail":{}}'
    fake.script.append(Raw(encode_frame(Opcode.HELLO, 0, refusal, status=1)))
    with pytest.raises(BadRequest, match="damaged"):
        connect(fake.url).send("orders", b"x")


def test_another_log_behind_the_same_address_is_refused(fake: FakeBroker, connect: Connect) -> None:
    client = connect(fake.url)
    client.send("orders", b"x")
    fake.log_id = UUID(int=7)
    fake.hang_up()
    with pytest.raises(LogChanged, match=str(UUID(int=7))):
        client.send("orders", b"y")
    assert [bodies for bodies in fake.bodies() if b"y" in bodies] == []


def test_a_connection_that_the_broker_closed_meanwhile_is_not_used(
    fake: FakeBroker, connect: Connect
) -> None:
    client = connect(fake.url, retries=0)
    client.send("orders", b"x")
    fake.hang_up()
    client._core.pool._idle[0].idle_since -= 60
    assert client.send("orders", b"y").offset == 1


def test_a_damaged_reply_ends_the_connection_and_leaves_the_outcome_unknown(
    fake: FakeBroker, connect: Connect
) -> None:
    reply = bytearray(encode_frame(Opcode.SEND, 3, b"\0" * 17))
    reply[-1] ^= 1
    fake.script.append(Raw(bytes(reply)))
    client = connect(fake.url)
    with pytest.raises(RemoteProtocolError, match="checksum") as caught:
        client.send("orders", b"x")
    assert caught.value.outcome == "unknown"
    assert client.send("orders", b"y").offset == 0


def test_a_reply_that_drips_in_ends_with_the_time_out(fake: FakeBroker, connect: Connect) -> None:
    def drip(frame: Any) -> Any:
        return Raw(encode_frame(frame.opcode, frame.correlation, b"\0" * 17)[:7])

    client = connect(fake.url)
    client.send("orders", b"first")  # so that nothing has to succeed in the time that follows
    fake.script += [drip] * 3
    began = time.monotonic()
    with pytest.raises(RequestTimeout):
        client.send("orders", b"x", timeout=0.3)
    assert time.monotonic() - began < PATIENCE_S


def test_a_closed_client_refuses_every_call(fake: FakeBroker, connect: Connect) -> None:
    client = connect(fake.url)
    client.send("orders", b"x")
    client.send_async("orders", b"x").result()
    client.close()
    calls: list[Callable[[], object]] = [
        lambda: client.send("orders", b"x"),
        lambda: client.send_async("orders", b"x"),
        lambda: client.send_many("orders", [b"x"]),
        lambda: client.call("broker.show"),
        client.flush,
    ]
    for call in calls:
        with pytest.raises(ClientClosed, match=r"new one with connect"):
            call()
    client.close()
    assert client.stats.messages == 1


def test_calls_return_json_or_raise_the_brokers_refusal(fake: FakeBroker, connect: Connect) -> None:
    client = connect(fake.url)
    fake.answers = {
        "topic.list": {"topics": []},
        "topic.show": UnknownTopic("no such topic", hint="create it"),
    }
    assert client.call("topic.list") == {"topics": []}
    with pytest.raises(UnknownTopic, match=r"no such topic \(create it\)"):
        client.call("topic.show", name="none")


def test_a_call_is_not_repeated_when_its_answer_is_lost(fake: FakeBroker, connect: Connect) -> None:
    client = connect(fake.url)
    client.call("topic.list")
    fake.others = lambda _frame: HangUp
    with pytest.raises(ConnectionLost):
        client._core.request(Opcode.PING)
    assert [frame.opcode for frame in fake.frames].count(Opcode.PING) == 1
    with pytest.raises(ConnectionLost):
        client._core.request(Opcode.PING, repeat=True)
    assert [frame.opcode for frame in fake.frames].count(Opcode.PING) == 4


def test_a_reply_of_many_pieces_is_put_together(fake: FakeBroker, connect: Connect) -> None:
    fake.others = lambda _frame: b"x" * (3 << 20)
    assert connect(fake.url)._core.request(Opcode.READ) == b"x" * (3 << 20)


def test_a_large_request_goes_out_whole(fake: FakeBroker, connect: Connect) -> None:
    connect(fake.url)._core.request(Opcode.READ, [b"x" * (4 << 20), b"y" * (4 << 20)])
    assert fake.frames[-1].payload == b"x" * (4 << 20) + b"y" * (4 << 20)


def test_an_idle_connection_is_dropped_once_another_node_leads(
    fake: FakeBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "FRESH_S", 0.0)  # as if it had been idle for longer
    core = connect(fake.url)._core
    core.request(Opcode.PING)
    core.request(Opcode.PING)
    assert fake.accepted == 1
    core._log.boot_epoch += 1  # of the welcome of another connection
    core.request(Opcode.PING)
    assert fake.accepted == 2


def test_a_child_after_a_fork_has_connections_of_its_own(
    fake: FakeBroker, connect: Connect
) -> None:
    client = connect(fake.url)
    client.send("orders", b"parent")
    client.send_async("orders", b"parent too").result()
    child = os.fork()
    if not child:  # nothing of pytest may run here
        try:
            client.send("orders", b"child")
            client.send_async("orders", b"child too").result(PATIENCE_S)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    client.send("orders", b"parent again")
    sessions = {
        body: producer for [body], (producer, _) in zip(fake.bodies(), fake.origins(), strict=True)
    }
    assert sessions[b"parent"] == sessions[b"parent again"]
    assert len(set(sessions.values())) == 4
    assert fake.origins()[-1] == (sessions[b"parent"], 1)


def test_a_conversation_accepts_its_bytes_one_by_one() -> None:
    pin = LogIdentity()
    one = Conversation("orders", pin)
    correlation = int.from_bytes(b"".join(one.hello())[12:16], "little")
    welcome = WELCOME % (1, UUID(int=5))
    for byte in encode_frame(Opcode.HELLO, correlation, welcome.encode()):
        assert one.receive(bytes((byte,))) == []
    assert one.limits.frame == 9_999
    assert pin.log_id == UUID(int=5)
    first, second = (one.request(Opcode.PING)[0] for _ in range(2))
    data = encode_frame(Opcode.PING, second, b"2") + encode_frame(Opcode.PING, first, b"1")
    assert [(reply.correlation, reply.payload) for reply in one.receive(data)] == [
        (second, b"2"),
        (first, b"1"),
    ]
    with pytest.raises(RemoteProtocolError, match="not made"):
        one.receive(encode_frame(Opcode.PING, first, b"1"))


def test_an_earlier_boot_epoch_of_a_log_is_refused_in_the_whole_process() -> None:
    log_id = uuid4()

    def greet(epoch: int) -> None:
        one = Conversation("orders", LogIdentity())
        correlation = int.from_bytes(b"".join(one.hello())[12:16], "little")
        welcome = Welcome(
            version=1,
            broker="b-1",
            log_id=log_id,
            boot_epoch=epoch,
            limits=BrokerLimits(frame=9_999, message=9_999),
        )
        assert one.receive(encode_frame(Opcode.HELLO, correlation, welcome.encode())) == []

    greet(3)
    greet(3)
    greet(5)
    with pytest.raises(LogChanged, match="is in boot epoch 4, and was in 5 before"):
        greet(4)
    greet(6)


def test_all_connections_of_a_process_name_it_and_those_of_a_child_name_the_child() -> None:
    def process() -> str | None:
        [frame] = FrameDecoder(1 << 16).feed(
            b"".join(Conversation("orders", LogIdentity()).hello())
        )
        return Hello.parse(frame).process

    assert process() == process() is not None
    theirs, ours = os.pipe()
    child = os.fork()
    if not child:
        os.write(ours, (process() or "").encode())
        os._exit(0)
    os.waitpid(child, 0)
    told = os.read(theirs, 64).decode()
    os.close(theirs)
    os.close(ours)
    assert len(told) == 32
    assert told != process()


def test_a_client_without_a_service_names_no_process() -> None:
    [frame] = FrameDecoder(1 << 16).feed(b"".join(Conversation(None, LogIdentity()).hello()))
    assert Hello.parse(frame).process is None


def _closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_a_request_times_out_though_signals_come_all_the_time() -> None:
    """A kernel's time-out begins anew with each of them."""
    signals = count()

    def interrupt(_signal: int, _frame: object) -> None:
        assert next(signals) < PATIENCE_S / EACH_S, "it waits for ever"

    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"txmq://127.0.0.1:{silent.getsockname()[1]}"
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, EACH_S, EACH_S)
        try:
            with pytest.raises(BrokerUnavailable, match="did not answer in time"):
                txmq.connect(url, timeout=0.5).call("topic.list")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    assert next(signals) > 1
