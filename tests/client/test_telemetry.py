"""OpenTelemetry by the conventions for messaging: a walk through their table."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import psycopg
import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import BaseModel
from twisted.internet.task import deferLater

import txmq
import txmq.aio
import txmq.twisted
from tests.client.faces.face import AioFace, TwistedFace
from tests.client.reactor_thread import InReactor
from tests.client.real import RealBroker
from tests.client.real_consumers import drain, run_until
from tests.client.scripted_member import fresh
from tests.client.world import World
from txmq.client.blocking.client import Client
from txmq.errors import ConfigError, LocalProtocolError, TransactionAborted
from txmq.model import limits
from txmq.model.message import Message
from txmq.testing.wait import PATIENCE_S, wait_until

PRODUCER, CONSUMER, CLIENT = (
    trace.SpanKind.PRODUCER,
    trace.SpanKind.CONSUMER,
    trace.SpanKind.CLIENT,
)
FOREIGN = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
# Name of an operation: its type and the kinds of its span. The span that sends is a
# producer's where its own context is in the message.
TABLE: dict[str, tuple[str, *tuple[trace.SpanKind, ...]]] = {
    "send": ("send", PRODUCER, CLIENT),
    "send_half": ("send", PRODUCER, CLIENT),
    "create": ("create", PRODUCER),
    "receive": ("receive", CLIENT),
    "process": ("process", CONSUMER),
    "ack": ("settle", CLIENT),
    "nack": ("settle", CLIENT),
    "dead_letter": ("settle", CLIENT),
    "commit": ("commit", CLIENT),
    "rollback": ("rollback", CLIENT),
    "check": ("check", CONSUMER),
    "replay": ("replay", CLIENT),
}


class Order(BaseModel):
    """A body."""

    id: int


class Unspeakable(Exception):
    """An error whose texts raise."""

    def __str__(self) -> str:
        raise KeyError("text")


def raise_unspeakable(_message: Any) -> None:
    raise Unspeakable


class Seen:
    """What a client has exported."""

    def __init__(self) -> None:
        self._spans, self._reader = InMemorySpanExporter(), InMemoryMetricReader()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        self.telemetry = txmq.Telemetry(tracers, MeterProvider([self._reader]))
        self.tracer = tracers.get_tracer("tests")

    def spans(self, name: str = "") -> list[ReadableSpan]:
        return [span for span in self._spans.get_finished_spans() if name in ("", span.name)]

    def one(self, name: str) -> ReadableSpan:
        wait_until(lambda: self.spans(name), what=name)
        [span] = self.spans(name)
        return span

    def metrics(self) -> dict[str, list[Any]]:
        data: Any = self._reader.get_metrics_data()
        return {
            metric.name: list(metric.data.data_points)
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def check_table(self) -> set[str]:
        """Check each span against its row, and return the names of the operations."""
        names = set()
        for span in self.spans():
            found: Any = span.attributes
            if "messaging.system" not in found:
                continue  # the test's own
            name = found["messaging.operation.name"]
            assert found["messaging.system"] == "txmq"
            destination = found.get("messaging.destination.name")
            expected = f"{name} {destination}" if destination else name
            assert span.name == expected
            kind, *allowed = TABLE[name]
            assert found["messaging.operation.type"] == kind
            assert span.kind in allowed, span.name
            names.add(name)
        return names


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def client(shared_broker: RealBroker, seen: Seen) -> Iterator[Client]:
    with txmq.connect(
        shared_broker.url, service=fresh("s"), timeout=PATIENCE_S, telemetry=seen.telemetry
    ) as client:
        yield client


@pytest.fixture
def topic(client: Client) -> str:
    client.call("topic.create", name=(topic := fresh("t")), partitions=1)
    return topic


class Ids(NamedTuple):
    """A trace and a span."""

    trace_id: int
    span_id: int


def ids(span: ReadableSpan) -> Ids:
    context: Any = span.context
    return Ids(context.trace_id, context.span_id)


def linked(span: ReadableSpan) -> list[Ids]:
    return [Ids(link.context.trace_id, link.context.span_id) for link in span.links]


def test_a_message_carries_the_context_of_its_send_to_its_handler(
    client: Client, seen: Seen, topic: str, real: RealBroker
) -> None:
    with seen.tracer.start_as_current_span("request") as request:
        receipt = client.send(topic, b"x", key="k", headers={"h": "v"})
    sent = seen.one(f"send {topic}")
    attributes: Any = sent.attributes
    assert sent.kind is PRODUCER
    assert sent.parent == request.get_span_context()
    assert attributes["messaging.message.id"] == receipt.message_id
    assert attributes["messaging.destination.partition.id"] == "0"
    host, port = attributes["server.address"], attributes["server.port"]
    assert real.url == f"txmq://{host}:{port}"
    assert attributes["messaging.client.id"] == f"{socket.gethostname()}@{os.getpid()}"
    inner, headers = [], []

    def handle(message: Any) -> None:
        inner.append(trace.get_current_span().get_span_context())
        headers.append(dict(message.headers))

    with client.consumer(fresh("g"), [topic]) as consumer:
        drain(client, consumer, handle)
    worked, acked = seen.one(f"process {topic}"), seen.one(f"ack {topic}")
    assert headers[0]["h"] == "v"
    assert inner == [worked.context]
    assert linked(worked) == linked(acked) == [ids(sent)]
    assert worked.parent is not None
    assert Ids(worked.parent.trace_id, worked.parent.span_id) == ids(sent)
    assert (worked.attributes or {})["messaging.consumer.group.name"] == consumer.group
    assert (worked.attributes or {})["messaging.txmq.message.attempt"] == 1
    assert seen.check_table() == {"send", "process", "ack"}


def test_batches_link_to_each_message(client: Client, seen: Seen, topic: str) -> None:
    client.send_batch(topic, [Message(b"a"), Message(b"b", headers=FOREIGN)])
    created, sent = seen.one(f"create {topic}"), seen.one(f"send {topic}")
    foreign = Ids(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
    assert sent.kind is CLIENT
    assert linked(sent) == [ids(created), foreign]
    assert (sent.attributes or {})["messaging.batch.message_count"] == 2
    with client.consumer(fresh("g"), [topic]) as consumer:
        messages = consumer.receive_many(2, PATIENCE_S)
        assert messages[1].headers == FOREIGN, "a context that is there is kept"
        consumer.ack_many(messages)
        assert consumer.receive(0.01) is None
    assert linked(seen.one(f"receive {topic}")) == linked(seen.one(f"ack {topic}")) == linked(sent)
    client.send_many(topic, [b"c"] * 3)
    assert [span.kind for span in seen.spans(f"send {topic}")] == [CLIENT, CLIENT]
    assert seen.check_table() == {"create", "send", "receive", "ack"}


def test_a_message_that_is_sent_again_keeps_its_context_and_is_linked(
    client: Client, seen: Seen, topic: str
) -> None:
    group = fresh("g")
    client.send(topic, b"x")
    first = seen.one(f"send {topic}")
    with client.consumer(group, [topic]) as consumer:
        message = consumer.receive(PATIENCE_S)
        assert message is not None
        consumer.dead_letter(message, "no use")
        assert linked(seen.one(f"dead_letter {topic}")) == [ids(first)]
        wait_until(lambda: list(client.letters(group)), what="the letter")
        client.call("dlq.replay", group=group, letters=[[topic, 0, 0]])
        again = consumer.receive(PATIENCE_S)
        assert again is not None
        assert again.headers == message.headers
        consumer.ack(again, wait=True)
    replay: Any = seen.one(f"replay {topic}").attributes
    assert replay["messaging.consumer.group.name"] == group
    client.send(topic, b"copy", headers=again.headers)
    _first, copy = seen.spans(f"send {topic}")
    assert copy.kind is CLIENT
    assert linked(copy) == [ids(first)]
    assert seen.check_table() == {"send", "receive", "dead_letter", "replay", "ack"}


def test_a_copy_is_linked_to_its_producer_and_to_its_redrive(
    client: Client, seen: Seen, topic: str
) -> None:
    group, copies = fresh("g"), fresh("t")
    client.call("topic.create", name=copies, partitions=1)
    client.send(topic, b"x")
    with client.consumer(group, [topic]) as consumer:
        message = consumer.receive(PATIENCE_S)
        assert message is not None
        consumer.dead_letter(message, "no use")
        wait_until(lambda: list(client.letters(group)), what="the letter")
        client.redrive_letters(
            group, letters=[(topic, 0, 0)], to=copies, operator="me", reason="again"
        )
    produced, replayed = seen.one(f"send {topic}"), seen.one(f"replay {topic}")
    with client.consumer(fresh("g"), [copies]) as consumer:
        drain(client, consumer, lambda _message: None)
    assert linked(seen.one(f"process {copies}")) == [ids(produced), ids(replayed)]
    assert linked(seen.one(f"ack {copies}")) == [ids(produced), ids(replayed)]


def test_transactions_and_half_messages_have_operations_of_their_own(
    client: Client, seen: Seen, topic: str
) -> None:
    with client.transaction() as tx:
        tx.send(topic, b"a")
        tx.send(topic, b"b")
    committed = seen.one(f"commit {topic}")
    assert linked(committed) == [ids(span) for span in seen.spans(f"create {topic}")]
    asked = []

    def decide(half: Any) -> Any:
        asked.append(half)
        return txmq.COMMIT

    client.register_checker("c", decide)
    tx = client.transaction(checker="c")
    with suppress(TransactionAborted), tx:
        tx.send(topic, b"c")
        tx.prepare()
        tx.set_rollback_only()
    stored = seen.one(f"send_half {topic}")
    wait_until(lambda: seen.spans("rollback"), what="the rollback")
    half = client.half_async(topic, b"d", checker="c").result(PATIENCE_S)
    assert half.commit().result(PATIENCE_S) is True
    # Only its token is kept: nobody here works on it any more.
    left = client.half_async(topic, b"e", checker="c").result(PATIENCE_S).token
    client.call("tx.check", token=left.hex)
    wait_until(lambda: asked, what="the check-back")
    seen.one("check")
    kinds = [span.kind for span in seen.spans(f"send_half {topic}")]
    assert (stored.kind, kinds) == (CLIENT, [CLIENT, PRODUCER, PRODUCER])
    told: Any = seen.one("commit").attributes
    assert told["messaging.txmq.transaction"] == str(half.token)
    assert seen.check_table() == {"create", "commit", "rollback", "check", "send_half"}


def test_what_does_not_fit_its_model_is_a_dead_letter_with_an_error(
    client: Client, seen: Seen, topic: str
) -> None:
    orders = client.topic(topic, Order)
    client.send(topic, b"{}")
    orders.send(Order(id=1))
    with client.consumer(fresh("g"), [orders]) as consumer:
        message = consumer.receive(PATIENCE_S)
        assert message is not None
        assert message.value == Order(id=1)
    refused: Any = seen.one(f"dead_letter {topic}").attributes
    assert refused["error.type"] == "txmq.errors.base.BodyMismatch"
    assert seen.check_table() == {"send", "receive", "dead_letter"}


def test_a_message_with_all_headers_that_it_may_have_is_traced_and_redriven(
    client: Client, seen: Seen, topic: str
) -> None:
    headers, group = {str(number): "x" for number in range(limits.HEADER_PAIRS)}, fresh("g")
    client.send(topic, b"a", headers=headers)
    assert seen.one(f"send {topic}").status.status_code is trace.StatusCode.UNSET
    with client.consumer(group, [topic]) as consumer:
        message = consumer.receive(PATIENCE_S)
        assert message is not None
        consumer.dead_letter(message, "no")
    copies = fresh("copies")
    client.call("topic.create", name=copies, partitions=1)
    named: dict[str, Any] = {"operator": "ada", "reason": "mended"}
    client.redrive_letters(group, to=copies, error_type="dead-lettered", **named)
    with client.consumer(fresh("g"), [copies]) as consumer:
        copy = consumer.receive(PATIENCE_S)
    assert copy is not None
    assert headers.items() <= copy.headers.items()


def test_an_error_whose_text_raises_is_recorded_and_counted(
    client: Client, seen: Seen, topic: str
) -> None:
    client.send(topic, b"a")
    with client.consumer(fresh("g"), [topic], retry=txmq.RetryPolicy((PATIENCE_S,))) as consumer:
        run_until(consumer, raise_unspeakable, lambda: consumer.stats.nacked == 1)
    failed = seen.one(f"process {topic}")
    [event] = failed.events
    told = "<Unspeakable, whose text raises KeyError>"
    assert (event.attributes or {})["exception.message"] == failed.status.description == told


def test_errors_and_the_four_metrics(client: Client, seen: Seen, topic: str) -> None:
    client.send(topic, b"a")
    client.send_many(topic, [b"b"] * 2)
    with pytest.raises(LocalProtocolError):
        client.send(topic, "text")  # type: ignore[arg-type]  # the mistake

    def fail(_message: Any) -> None:
        raise ZeroDivisionError("no")

    later = txmq.RetryPolicy((PATIENCE_S,))  # no message comes again meanwhile
    with client.consumer(fresh("g"), [topic], retry=later) as consumer:
        assert len(consumer.receive_many(1, PATIENCE_S)) == 1
        run_until(consumer, fail, lambda: consumer.stats.nacked >= 2)
    failed = seen.spans(f"process {topic}")[0]
    assert failed.status.status_code is trace.StatusCode.ERROR
    assert (failed.attributes or {})["error.type"] == "ZeroDivisionError"
    assert [event.name for event in failed.events] == ["exception"]
    found = seen.metrics()
    assert found.keys() == {
        "messaging.client.operation.duration",
        "messaging.client.sent.messages",
        "messaging.client.consumed.messages",
        "messaging.process.duration",
    }
    sent = {point.attributes.get("error.type"): point.value for point in
            found["messaging.client.sent.messages"]}  # fmt: skip
    assert sent == {None: 3, "txmq.errors.base.LocalProtocolError": 1}
    [consumed] = found["messaging.client.consumed.messages"]
    assert consumed.value == 1, "handlers do not receive"
    operations = {
        point.attributes["messaging.operation.name"]: point.count
        for point in found["messaging.client.operation.duration"]
        if "error.type" not in point.attributes
    }
    assert operations == {"send": 2, "receive": 1, "nack": 2}
    assert sum(point.count for point in found["messaging.process.duration"]) == 2
    names = {name for points in found.values() for point in points for name in point.attributes}
    assert not names & {"messaging.message.id", "messaging.batch.message_count"}


def test_the_twisted_face_has_the_same_spans(
    reactor: Any, shared_broker: RealBroker, in_reactor: InReactor, seen: Seen
) -> None:
    topic = fresh("t")

    async def story() -> None:
        client = txmq.twisted.connect(
            reactor,
            shared_broker.url,
            service="tests",
            timeout=PATIENCE_S,
            telemetry=seen.telemetry,
        )
        async with client:
            await client.call("topic.create", name=topic, partitions=1)
            await client.send(topic, b"a")
            await client.send_batch(topic, [Message(b"b")])
            async with client.transaction() as tx:
                tx.send(topic, b"c")
            half = await client.half(topic, b"d", checker="c")
            await half.rollback()

            async def handle(message: Any) -> None:
                await deferLater(reactor, 0.001)
                inner.append(trace.get_current_span().get_span_context())

            consumer = await client.consumer(fresh("g"), [topic])
            first = await consumer.receive(PATIENCE_S)
            assert first is not None
            consumer.nack(first, delay=0.0)
            await TwistedFace(reactor).drain(client, consumer, handle)

    inner: list[Any] = []
    in_reactor(story)
    check_face(seen, topic, inner)


def test_the_asyncio_face_has_the_same_spans(shared_broker: RealBroker, seen: Seen) -> None:
    topic, inner = fresh("t"), list[Any]()

    async def story() -> None:
        async with txmq.aio.connect(
            shared_broker.url, service="tests", timeout=PATIENCE_S, telemetry=seen.telemetry
        ) as client:
            await client.call("topic.create", name=topic, partitions=1)
            await (await client.send_async(topic, b"a"))
            await client.send_batch(topic, [Message(b"b")])
            async with client.transaction() as tx:
                tx.send(topic, b"c")
            half = await client.half(topic, b"d", checker="c")
            await half.rollback()

            async def handle(message: Any) -> None:
                await asyncio.sleep(0.001)
                inner.append(trace.get_current_span().get_span_context())

            consumer = await client.consumer(fresh("g"), [topic])
            first = await consumer.receive(PATIENCE_S)
            assert first is not None
            consumer.nack(first, delay=0.0)
            await AioFace().drain(client, consumer, handle)

    asyncio.run(story())
    check_face(seen, topic, inner)


def check_face(seen: Seen, topic: str, inner: list[Any]) -> None:
    """Check the spans of the story that each face on an event loop has told."""
    names = {"send", "create", "commit", "send_half", "rollback", "receive", "nack"}
    assert seen.check_table() == names | {"process", "ack"}
    [alone, batch] = seen.spans(f"send {topic}")
    assert (alone.kind, batch.kind) == (PRODUCER, CLIENT)
    assert (alone.attributes or {}).keys() >= {"messaging.message.id"}
    worked = seen.spans(f"process {topic}")
    assert inner == [span.context for span in worked]
    created = {ids(span) for span in seen.spans(f"create {topic}")}
    assert {one for span in worked for one in linked(span)} - created <= {ids(alone)}
    [committed] = seen.spans(f"commit {topic}")
    assert set(linked(committed)) < created


def test_a_cluster_has_one_span_for_each_send(shared_broker: RealBroker, seen: Seen) -> None:
    topic = fresh("t")
    with txmq.connect([shared_broker.url], telemetry=seen.telemetry, timeout=PATIENCE_S) as cluster:
        cluster.send(topic, b"a")
        cluster.send_async(topic, b"b").result(PATIENCE_S)
        cluster.send_batch(topic, [Message(b"c")])
        cluster.send_one_way(topic, b"d")
        cluster.flush()
    assert len(seen.spans(f"send {topic}")) == 4
    assert seen.check_table() == {"send", "create"}


def test_without_the_option_nothing_is_imported_or_replaced(shared_broker: RealBroker) -> None:
    with txmq.connect(shared_broker.url, telemetry=False) as client:
        assert not vars(client).keys() & {"send", "call", "consumer"}
    with pytest.raises(ConfigError, match=r"telemetry: 'yes' is not accepted"):
        txmq.connect(shared_broker.url, telemetry="yes")  # type: ignore[call-overload]  # the mistake
    code = (
        "import sys, txmq, txmq.aio; txmq.connect('txmq://127.0.0.1:1');"
        "txmq.aio.connect('txmq://127.0.0.1:1'); assert 'opentelemetry' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_transaction_with_a_database_is_stored_and_then_decided(world: World, seen: Seen) -> None:
    url = world.broker.url
    with txmq.connect(
        url, service="orders", telemetry=seen.telemetry, timeout=PATIENCE_S
    ) as client:
        with (
            seen.tracer.start_as_current_span("request") as request,
            client.transaction(world.connection) as tx,
        ):
            world.insert("o-1")
            tx.send(world.topic, b"o-1")
        with suppress(ZeroDivisionError), client.transaction(world.connection) as tx:
            tx.send(world.topic, b"o-2")
            raise ZeroDivisionError
    assert seen.check_table() == {"create", "send_half", "commit"}
    created = seen.spans(f"create {world.topic}")[0]
    stored = seen.one(f"send_half {world.topic}")
    assert linked(stored) == [ids(created)]
    told: Any = seen.one("commit")
    for span in (created, stored, told):
        assert span.parent == request.get_span_context()


def test_a_transaction_on_asyncio_with_a_database_has_the_same(world: World, seen: Seen) -> None:
    async def story() -> None:
        async with (
            await psycopg.AsyncConnection.connect(world.dsn) as connection,
            txmq.aio.connect(
                world.broker.url, service="orders", telemetry=seen.telemetry, timeout=PATIENCE_S
            ) as client,
        ):
            async with client.transaction(connection) as tx:
                await connection.execute("SELECT 1")
                tx.send(world.topic, b"o-1")
            with suppress(ZeroDivisionError):
                async with client.transaction(connection) as tx:
                    tx.send(world.topic, b"o-2")
                    raise ZeroDivisionError
            async with client.transaction(checker="c") as half:
                half.send(world.topic, b"o-3")

    asyncio.run(story())
    assert seen.check_table() == {"create", "send_half", "commit"}
    assert len(seen.spans("commit")) == len(seen.spans(f"send_half {world.topic}")) == 2
