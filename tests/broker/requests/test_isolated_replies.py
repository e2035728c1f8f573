"""What one client, or one timer, does wrong does not reach the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest

from tests.broker.support import BrokerInMemory, Client, send_payload
from txmq import errors
from txmq.batch import BatchView, Codec, encode
from txmq.broker.calls import topics
from txmq.broker.delivery import fetch_service
from txmq.broker.monitoring.liveness import SILENT_S, Liveness
from txmq.core import machine
from txmq.core.topics.topics import CreateTopic, DeleteTopic
from txmq.model import limits
from txmq.model.decider import ByChecker
from txmq.model.message import Message
from txmq.store.tables import IndexDamaged
from txmq.wire import data_requests
from txmq.wire.calls.encoding import encode_call
from txmq.wire.chunks import Chunk, unpack_chunks
from txmq.wire.data_requests import Fetch, Opcode, pack_fetch
from txmq.wire.frames import encode_frame
from txmq.wire.json import parse
from txmq.wire.status import STATUS_BY_ERROR, to_error

MIB = 1 << 20


def send(broker: BrokerInMemory, sequence: int = 0) -> None:
    client = broker.connect()
    assert client.ask(Opcode.SEND, send_payload(sequence)).status == 0


def join(client: Client, **options: Any) -> int:
    joined: Any = client.call(
        "consumer.join", group="g", topics=["t"], instance="i", member="m", **options
    )
    return int(joined["generation"])


def fetch_frame(generation: int, *, wait_ms: int = 0) -> bytes:
    request = Fetch(generation, wait_ms, 64 * MIB, 10_000, "g", "m")
    return encode_frame(Opcode.FETCH, 9, pack_fetch(request))


def fetched(client: Client, generation: int) -> list[Chunk]:
    client.send(fetch_frame(generation))
    [reply] = client.replies()
    assert reply.status == 0, to_error(reply.status, reply.payload)
    assert len(reply.payload) < limits.FRAME
    return list(unpack_chunks(reply.payload).chunks)


def store(broker: BrokerInMemory, batch: bytes) -> None:
    client = broker.connect()
    payload = data_requests.send_header("t", 0, 0) + batch
    assert client.ask(Opcode.SEND, payload).status == 0


@contextmanager
def bug(monkeypatch: pytest.MonkeyPatch, where: object, name: str) -> Iterator[None]:
    """Plant a bug: a function that raises."""

    def broken(*_args: object, **_options: object) -> None:
        raise KeyError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(where, name, broken)
        yield


def test_a_reply_that_cannot_be_built_is_an_error_for_its_session_alone(
    broker: BrokerInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply is built when the write is done, among the replies of others."""
    broker.do(CreateTopic("t", 1))
    one, other = broker.connect(), broker.connect()
    alter = encode_frame(Opcode.CALL, 3, encode_call("topic.alter", {"name": "t"} | OPEN))
    with bug(monkeypatch, topics, "_settings_view"):
        one.session.dataReceived(alter)  # type: ignore[attr-defined]
        other.session.dataReceived(encode_frame(Opcode.SEND, 4, send_payload()))  # type: ignore[attr-defined]
        broker.pass_time(1)
    assert isinstance(one.refusal(), errors.BrokerFailed)
    [reply] = other.replies()
    assert (reply.correlation, reply.status) == (4, 0)
    assert one.ask(Opcode.PING, b"").status == 0
    assert broker.engine.failed is None
    assert [alarm["name"] for alarm in broker.ask("broker.alarms")["alarms"]] == ["broker.fault"]


OPEN: dict[str, Any] = {"retention_ms": 1_000}


def test_a_decision_that_raises_is_refused_and_nothing_is_recorded(
    broker: BrokerInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, end = broker.connect(), broker.log.end
    with monkeypatch.context() as patched:
        patched.setitem(machine.DECIDERS, CreateTopic, lambda *_args: 1 // 0)
        client.send(encode_frame(Opcode.CALL, 3, encode_call("topic.create", NEW)))
        assert isinstance(client.refusal(), errors.BrokerFailed)
    assert broker.log.end == end
    client.send(encode_frame(Opcode.CALL, 3, encode_call("topic.create", NEW)))
    assert client.replies()[0].status == 0


NEW: dict[str, Any] = {"name": "u", "partitions": 1}


def test_an_event_that_cannot_be_applied_is_not_written(
    broker: BrokerInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state would differ from the log, so the broker stops: without the record."""
    durable = broker.log.durable
    from txmq.core.events.topics import TopicCreated

    with monkeypatch.context() as patched:
        patched.setitem(machine.APPLIERS, TopicCreated, lambda *_args: 1 // 0)
        client = broker.connect()
        client.send(encode_frame(Opcode.CALL, 3, encode_call("topic.create", NEW)))
        broker.pass_time(1)
    assert broker.engine.failed is not None
    assert broker.log.durable == durable


def test_a_timer_that_raises_goes_on_and_the_others_with_it(
    broker: BrokerInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bug(monkeypatch, broker.assembly.retention, "_visit_topics"):
        broker.do(CreateTopic("t", 1))
        broker.pass_time(700)
    assert broker.engine.faults.counts["retention"] > 0
    assert "an internal error" in broker.assembly.retention.free.held_by
    broker.pass_time(700)
    assert broker.assembly.retention.free.held_by == "what is new"
    assert broker.engine.failed is None


def test_health_notices_a_broker_that_answers_nobody(broker: BrokerInMemory) -> None:
    alive = Liveness(broker.engine, broker.assembly.sessions, broker.clock)
    alive.tick()
    broker.pass_time(SILENT_S + 1)
    assert not alive.is_silent
    broker.assembly.sessions.buffer_replies()  # and no flush ends it
    alive.tick()
    broker.pass_time(SILENT_S + 1)
    assert alive.is_silent
    broker.assembly.sessions.flush_replies()
    assert not alive.is_silent


def test_health_notices_a_write_that_hangs(broker: BrokerInMemory) -> None:
    from twisted.internet.defer import Deferred

    alive = Liveness(broker.engine, broker.assembly.sessions, broker.clock)
    broker.hanging = hanging = Deferred[None]()
    for name in ("a", "b"):
        broker.engine.submit(CreateTopic(name, 1), lambda _reply: None)
    broker.pass_time(SILENT_S + 1)
    assert alive.is_silent
    hanging.callback(None)
    broker.pass_time(0)
    assert not alive.is_silent


def test_unpacked_retries_are_bounded_by_their_real_bytes(broker: BrokerInMemory) -> None:
    """Every other one of 600 messages of 27 KB in one small compressed batch returns:
    none has a neighbour to be delivered with.
    """
    broker.do(CreateTopic("t", 1))
    client = broker.connect()
    generation = join(client)
    messages = [Message(bytes([n % 7]) * (27 << 10), f"k{n}") for n in range(600)]
    packed = encode(
        messages,
        producer_id=b"p" * 16,
        epoch=0,
        sequence=0,
        born_at=1,
        codec=Codec.ZSTD,
    )
    assert len(packed) < MIB
    store(broker, packed)
    [chunk] = fetched(client, generation)
    assert chunk.rows == 600
    back = range(0, 600, 2)
    for offset in back:
        place = {"group": "g", "member": "m", "generation": generation, "topic": "t"}
        client.call("consumer.nack", **place, partition=0, offset=offset, delay_ms=0)
    broker.pass_time(1)
    seen: list[int] = []
    for _ in range(600):
        chunks = fetched(client, generation)
        assert sum(len(chunk.batch) for chunk in chunks) <= fetch_service.REPLY_BYTES
        for one in chunks:
            assert BatchView(one.batch).bodies[one.first_row] == messages[one.base_offset].body
            assert one.rows == 1
            seen.append(one.base_offset + one.first_row)
        if len(seen) >= len(back):
            break
    assert sorted(seen) == list(back)
    assert client.call("group.show", group="g")["leased"] == 600  # type: ignore[index]


def test_pieces_of_a_large_batch_are_bounded_too(broker: BrokerInMemory) -> None:
    """Every third message has expired, so the others go out in pieces, and each piece
    carries the whole batch.
    """
    broker.do(CreateTopic("t", 1))
    client = broker.connect()
    generation = join(client)
    messages = [Message(b"b" * 4_000, f"k{n}", ttl=0.5 if n % 3 == 2 else None) for n in range(300)]
    store(broker, encode(messages, producer_id=b"p" * 16, epoch=0, sequence=0, born_at=1))
    broker.pass_time(1)
    seen: set[int] = set()
    for _ in range(200):
        for chunk in fetched(client, generation):
            first = chunk.base_offset + chunk.first_row
            rows = set(range(first, first + chunk.rows))
            assert not rows & seen
            seen |= rows
        if len(seen) == 200:
            break
    assert seen == {n for n in range(300) if n % 3 != 2}


def test_checkers_get_large_halves_in_several_replies(broker: BrokerInMemory) -> None:
    """16 undecided transactions of 4 MB, and one of 15 MB in one batch."""
    numbers = count(1)
    tokens = {
        broker.half(next(numbers), Message(b"h" * (limits.MESSAGE - 100)), decider=CHECKER)
        for _ in range(16)
    }
    rows = [Message(b"h" * (3 << 20)) for _ in range(5)]
    token = broker.token(next(numbers))
    batch = encode(rows, producer_id=token, epoch=0, sequence=0, born_at=1)
    tokens.add(broker.store(token, [batch], decider=CHECKER))
    broker.pass_time(7)
    client = broker.connect()
    wait = {"service": "shop", "wait_ms": 0, "max": 100}
    offered: set[str] = set()
    while len(offered) < len(tokens):
        reply = client.ask(Opcode.CALL, encode_call("checks.wait", wait))
        assert reply.status == 0
        checks: Any = parse(reply.payload)
        new = {check["token"] for check in checks["checks"]}
        assert new, "it offers all of them"
        assert all(check["batches"] for check in checks["checks"])
        offered |= new
    assert offered == tokens


CHECKER = ByChecker("c")


def test_an_alteration_and_a_deletion_at_one_moment_both_have_replies(
    broker: BrokerInMemory,
) -> None:
    broker.do(CreateTopic("t", 1))
    client = broker.connect()
    join(client)
    calls = [
        ("topic.alter", {"name": "t"} | OPEN),
        ("topic.delete", {"name": "t"}),
        ("group.alter", {"group": "g", "max_parked": 7}),
        ("consumer.leave", {"group": "g", "member": "m", "instance": "i"}),
        ("group.delete", {"group": "g"}),
    ]
    client.send(
        b"".join(
            encode_frame(Opcode.CALL, number, encode_call(name, args))
            for number, (name, args) in enumerate(calls)
        )
    )
    broker.pass_time(1)
    replies = {reply.correlation: reply for reply in client.replies()}
    assert [replies[number].status for number in range(len(calls))] == [0] * len(calls)
    altered: Any = parse(replies[0].payload)
    assert altered["settings"]["retention_ms"] == 1_000
    regrouped: Any = parse(replies[2].payload)
    assert regrouped["settings"]["max_parked"] == 7
    assert not broker.engine.faults.counts


def test_a_fetch_survives_the_deletion_of_its_topic(broker: BrokerInMemory) -> None:
    broker.do(CreateTopic("t", 1))
    client = broker.connect()
    generation = join(client)
    send(broker)
    delete = encode_call("topic.delete", {"name": "t"})
    client.send(encode_frame(Opcode.CALL, 8, delete) + fetch_frame(generation, wait_ms=100))
    broker.pass_time(1)
    statuses = {reply.correlation: reply.status for reply in client.replies()}
    # its group may have been rebalanced meanwhile
    assert statuses[8] == 0
    assert statuses[9] in (0, STATUS_BY_ERROR[errors.StaleGeneration])
    assert not broker.engine.faults.counts
    assert type(broker.do(DeleteTopic("t"))) is errors.UnknownTopic


def test_a_read_has_no_more_than_its_bytes_whatever_it_asks_for(broker: BrokerInMemory) -> None:
    broker.do(CreateTopic("t", 1))
    client = broker.connect()
    read = data_requests.pack_read(data_requests.Read(0, 0, 0, 2**32 - 1, "t"))
    for number in range(8):
        batch = encode(
            [Message(b"b" * (2 * MIB))],
            producer_id=b"p" * 16,
            epoch=0,
            sequence=number,
            born_at=1,
        )
        store(broker, batch)
    reply = client.ask(Opcode.READ, read)
    assert reply.status == 0
    assert 2 * MIB < len(reply.payload) < 5 * MIB


def test_a_damaged_index_ends_the_broker_whoever_meets_it(
    broker: BrokerInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 140: the next start makes another; going on would serve wrong rows."""
    broker.do(CreateTopic("t", 1))
    client = broker.connect()

    def damaged(*_args: object) -> None:
        raise IndexDamaged("the index is damaged")

    monkeypatch.setattr(topics, "visible_end", damaged)
    client.send(encode_frame(Opcode.CALL, 3, encode_call("topic.show", {"name": "t"})))
    assert isinstance(client.refusal(), errors.BrokerFailed)
    assert broker.engine.failed is not None
    assert isinstance(broker.engine.failed.value, IndexDamaged)
