"""Spans of what a broker does, as an exporter gets them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, format_span_id, format_trace_id

from tests.broker.support import BrokerInMemory
from tests.cli.support import run
from txmq.batch import encode
from txmq.broker.monitoring import spans
from txmq.broker.monitoring.spans import BrokerSpans, find_tracer
from txmq.core.topics.topics import CreateTopic
from txmq.errors import ConfigError
from txmq.model.decider import ByBroker
from txmq.model.message import Message
from txmq.wire.data_requests import Fetch, Opcode, pack_fetch, send_header
from txmq.wire.frames import encode_frame

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Watched:
    """A broker whose spans are kept."""

    def __init__(self) -> None:
        self.broker = BrokerInMemory()
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        BrokerSpans(self.broker.engine, find_tracer(provider))

    def spans(self) -> list[ReadableSpan]:
        found = list(self.exporter.get_finished_spans())
        self.exporter.clear()
        return found

    def only(self) -> ReadableSpan:
        [span] = self.spans()
        return span

    def send(self, *messages: Message, sequence: int = 0) -> None:
        data = encode(messages, producer_id=b"p" * 16, epoch=0, sequence=sequence, born_at=1)
        answer = self.broker.connect().ask(Opcode.SEND, send_header("t", 0, 0) + data)
        assert answer.status == 0


def traced_span(number: int = 0) -> str:
    return format_span_id(int(SPAN, 16) + number)


def traced(number: int = 0) -> Message:
    return Message(b"x", headers={"traceparent": f"00-{TRACE}-{traced_span(number)}-01"})


def linked(span: ReadableSpan) -> list[str]:
    return [format_span_id(link.context.span_id) for link in span.links]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.fixture
def watched() -> Watched:
    watched = Watched()
    watched.broker.do(CreateTopic("t", 1))
    return watched


def test_a_stored_message_continues_the_trace_of_its_producer(watched: Watched) -> None:
    watched.send(traced())
    span = watched.only()
    assert (span.name, span.kind) == ("store t", SpanKind.SERVER)
    assert format_trace_id(span.context.trace_id) == TRACE
    assert span.parent is not None
    assert linked(span) == [format_span_id(span.parent.span_id)] == [SPAN]
    assert attributes(span) == {
        "messaging.system": "txmq",
        "messaging.operation.name": "store",
        "messaging.operation.type": "store",
        "messaging.destination.name": "t",
        "messaging.destination.partition.id": "0",
        "messaging.batch.message_count": 1,
    }
    assert span.start_time == watched.broker.now() * 1_000
    scope = span.instrumentation_scope
    assert scope is not None
    assert (scope.schema_url or "").endswith("/1.44.0")


def test_of_many_messages_a_span_has_links(watched: Watched) -> None:
    watched.send(*(traced(n) for n in range(200)), Message(b"without"))
    span = watched.only()
    assert (span.parent, len(span.links)) == (None, spans.MOST_LINKS)
    assert attributes(span)["messaging.batch.message_count"] == 201


@pytest.mark.parametrize("value", ["", "00-0-0-01", "00-" + "0" * 32 + f"-{SPAN}-01", "\u202ex"])
def test_a_context_that_is_none_is_no_link(watched: Watched, value: str) -> None:
    watched.send(Message(b"x", headers={"traceparent": value}))
    assert watched.only().links == ()


@pytest.mark.parametrize("outcome", ["COMMIT", "ROLLBACK"])
def test_checks_and_the_decision_are_in_the_trace_of_the_half_message(
    watched: Watched, outcome: str
) -> None:
    token = watched.broker.half(1, traced())
    half = watched.only()
    assert (half.name, linked(half)) == ("store_half t", [SPAN])
    watched.broker.start()
    watched.broker.pass_time(10)
    checked = watched.only()
    assert (checked.name, checked.kind, linked(checked)) == ("check", SpanKind.INTERNAL, [SPAN])
    assert attributes(checked)["messaging.txmq.check.tries"] == 1
    watched.broker.ask(
        "tx.decide", token=token, outcome=outcome, operator="ann", reason="r", force=True
    )
    [decided] = [span for span in watched.spans() if span.name == outcome.lower()]
    assert linked(decided) == [SPAN]
    assert attributes(decided)["messaging.txmq.transaction"] == token
    assert "ann" in attributes(decided)["messaging.txmq.decided_by"]


def test_a_local_transaction_is_stored_and_decided_at_once(watched: Watched) -> None:
    watched.broker.half(1, traced(), decider=ByBroker())
    assert watched.only().name == "store t"


@pytest.mark.parametrize("buried", [False, True])
def test_dead_letters_and_their_replay_are_in_the_trace_of_their_message(
    watched: Watched,
    buried: bool,  # noqa: FBT001
) -> None:
    watched.send(traced())
    client: Any = watched.broker.connect()
    joined = client.call(
        "consumer.join", group="g", topics=["t"], member="m", instance="i", start="first"
    )
    member = {"group": "g", "member": "m", "generation": joined["generation"]}
    fetch = Fetch(joined["generation"], 0, 1_000, 10, "g", "m")
    assert client.ask(Opcode.FETCH, pack_fetch(fetch)).status == 0
    watched.spans()
    client.call("consumer.nack", **member, topic="t", partition=0, offset=0, dead=not buried)
    if buried:
        client.call("retry.bury", group="g", letters=[["t", 0, 0]], reason="a bug")
    watched.broker.ask("dlq.replay", group="g", letters=[["t", 0, 0]], operator="ann", reason="r")
    letter, replay = (span for span in watched.spans() if not span.name.startswith("store"))
    for span, name in ((letter, "dead_letter t"), (replay, "replay t")):
        assert (span.name, span.kind, linked(span)) == (name, SpanKind.INTERNAL, [SPAN])
        assert attributes(span)["messaging.consumer.group.name"] == "g"
        assert attributes(span)["messaging.txmq.message.offset"] == 0


def test_letters_that_a_plan_puts_back_are_linked_to_its_span(watched: Watched) -> None:
    watched.send(*(traced(number) for number in range(3)))
    client: Any = watched.broker.connect()
    joined = client.call(
        "consumer.join", group="g", topics=["t"], member="m", instance="i", start="first"
    )
    member = {"group": "g", "member": "m", "generation": joined["generation"]}
    fetch = Fetch(joined["generation"], 0, 1_000, 10, "g", "m")
    assert client.ask(Opcode.FETCH, pack_fetch(fetch)).status == 0
    for offset in range(3):
        client.call("consumer.nack", **member, topic="t", partition=0, offset=offset, dead=True)
    watched.broker.start()
    watched.broker.ask("plan.create", name="p", group="g", settings={"rate": 0, "start": True})
    watched.broker.ask("plan.add", name="p", letters=[["t", 0, 0], ["t", 0, 2]])
    watched.broker.ask("plan.freeze", name="p")
    watched.broker.pass_time(1)
    [replay] = [span for span in watched.spans() if span.name == "replay t"]
    assert sorted(linked(replay)) == [traced_span(0), traced_span(2)]
    found = attributes(replay)
    assert (found["messaging.batch.message_count"], found["messaging.txmq.plan"]) == (2, 1)
    assert found["messaging.consumer.group.name"] == "g"


def test_a_flood_makes_so_many_spans_and_says_how_many_it_left_out(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "MOST_SPANS", 2)
    client = watched.broker.connect()
    frames = b""
    for number in range(5):
        data = encode([traced()], producer_id=b"p" * 16, epoch=0, sequence=number, born_at=1)
        frames += encode_frame(Opcode.SEND, number, send_header("t", 0, 0) + data)
    client.send(frames)
    found = watched.spans()
    assert len(found) == 2
    assert attributes(found[0])["messaging.txmq.spans_left_out"] == 3


def test_a_span_tells_of_nothing_that_a_crash_takes_back(watched: Watched) -> None:
    data = encode([traced()], producer_id=b"p" * 16, epoch=0, sequence=0, born_at=1)
    frame = encode_frame(Opcode.SEND, 1, send_header("t", 0, 0) + data)
    watched.broker.connect().session.dataReceived(frame)  # type: ignore[attr-defined]
    engine = watched.broker.engine
    assert engine.store.durable < engine.store.end
    assert watched.spans() == []
    watched.broker.pass_time(0)
    assert watched.only().name == "store t"


def test_without_a_provider_the_setting_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match="opentelemetry-instrument"):
        find_tracer()
    refused = run("broker", "--otel", "--data", "/nonexistent/never-made")
    assert refused.exit_code != 0
    assert "opentelemetry-instrument txmq broker --otel" in refused.stderr


def test_without_the_setting_nothing_is_imported() -> None:
    code = "import sys, txmq.broker.service; print('opentelemetry' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


def test_hostile_contexts_take_a_bounded_memory(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "MOST_KEPT", 3)
    large = traced()
    state = ",".join(f"v{number}={'x' * 200}" for number in range(30))
    stated = Message(b"x", headers={**(large.headers or {}), "tracestate": state})
    tokens = [watched.broker.half(number, stated) for number in range(1, 6)]
    for span in watched.spans():
        assert all(not link.context.trace_state for link in span.links)
    for token in tokens:
        watched.broker.ask(
            "tx.decide", token=token, outcome="COMMIT", operator="ann", reason="r", force=True
        )
    found = [linked(span) for span in watched.spans() if span.name == "commit"]
    assert found == [[], [], [SPAN], [SPAN], [SPAN]]
