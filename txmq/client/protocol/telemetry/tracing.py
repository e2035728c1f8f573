"""Spans and metrics of messaging operations, as the conventions have them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from opentelemetry import context as contexts
from opentelemetry import metrics, trace
from opentelemetry.trace import Link, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from txmq.client.protocol.telemetry.completion import when_done
from txmq.model.message import COMMIT as COMMITTED
from txmq.model.message import Decision, Message, Receipt
from txmq.model.origin import REDRIVE_TRACE
from txmq.model.tracebacks import text_of
from txmq.version import __version__

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Span, TracerProvider

SCHEMA = "https://opentelemetry.io/schemas/1.44.0"
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
MOST_LINKS = 128  # which the SDK keeps of a span
Headers = Mapping[str, str] | None


class OperationKind(NamedTuple):
    """Operation as the conventions see it: its type, and the kind of its span."""

    type: str
    span: SpanKind


CREATE = OperationKind("create", SpanKind.PRODUCER)
SEND = OperationKind("send", SpanKind.CLIENT)
# The span's own context is in the message.
SEND_CREATING = OperationKind("send", SpanKind.PRODUCER)
RECEIVE = OperationKind("receive", SpanKind.CLIENT)
PROCESS = OperationKind("process", SpanKind.CONSUMER)
SETTLE = OperationKind("settle", SpanKind.CLIENT)
# The rows of operations that the conventions do not have: their types are ours.
COMMIT = OperationKind("commit", SpanKind.CLIENT)
ROLLBACK = OperationKind("rollback", SpanKind.CLIENT)
CHECK = OperationKind("check", SpanKind.CONSUMER)
REPLAY = OperationKind("replay", SpanKind.CLIENT)
# Attributes that describe an operation, but would make a metric of each message.
CLIENT_ID = "messaging.client.id"
OF_SPANS = frozenset(
    (
        CLIENT_ID,
        *("messaging.message.id", "messaging.batch.message_count"),
        *("messaging.destination.partition.id", "messaging.txmq.transaction"),
        "messaging.txmq.message.attempt",
    )
)


class BufferedSend(Protocol):
    """A send of a transaction, as its buffer keeps it."""

    @property
    def topic(self) -> str: ...
    @property
    def content(self) -> object: ...
    @property
    def message_count(self) -> int: ...


class Telemetry:
    """Providers for a client's spans and metrics: `txmq.connect(url, telemetry=…)`.

    By default to the providers that the program has set with OpenTelemetry's API.
    """

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        self._tracer = trace.get_tracer("txmq", __version__, tracer_provider, SCHEMA)
        meter = metrics.get_meter("txmq", __version__, meter_provider, SCHEMA)
        self._propagator = TraceContextTextMapPropagator()
        self._client: dict[str, Any] = {}
        self.durations = meter.create_histogram(
            "messaging.client.operation.duration",
            "s",
            "Duration of messaging operation initiated by a producer or consumer client.",
            explicit_bucket_boundaries_advisory=BUCKETS,
        )
        self.process_durations = meter.create_histogram(
            "messaging.process.duration",
            "s",
            "Duration of processing operation.",
            explicit_bucket_boundaries_advisory=BUCKETS,
        )
        self.sent = meter.create_counter(
            "messaging.client.sent.messages",
            "{message}",
            "Number of messages producer attempted to send to the broker.",
        )
        self.consumed = meter.create_counter(
            "messaging.client.consumed.messages",
            "{message}",
            "Number of messages that were delivered to the application.",
        )

    def at(self, host: str, port: int) -> Self:
        """Return the same for the client of a broker at this address."""
        return self._with({"server.address": host, "server.port": port})

    def of_client(self, instance: str | None) -> Self:
        """Return the same for a client: of this instance, or of this process."""
        return self._with({CLIENT_ID: instance or f"{socket.gethostname()}@{os.getpid()}"})

    def _with(self, more: dict[str, Any]) -> Self:
        own = copy(self)
        own._client = self._client | more  # noqa: SLF001  # its own
        return own

    def start(
        self,
        name: str,
        kind: OperationKind,
        destination: str = "",
        *,
        links: Sequence[Link] = (),
        parent: Context | None = None,
        start_time: int | None = None,
        **attributes: object,
    ) -> Operation:
        """Begin an operation. `attributes` are without the prefix "messaging.", with
        "__" for a dot.
        """
        named: dict[str, Any] = {
            "messaging.system": "txmq",
            "messaging.operation.name": name,
            "messaging.operation.type": kind.type,
            **self._client,
        }
        if destination:
            named["messaging.destination.name"] = destination
        named |= attributes_of(attributes)
        span = self._tracer.start_span(
            f"{name} {destination}" if destination else name,
            parent,
            kind.span,
            named,
            links[:MOST_LINKS],
            start_time,
        )
        return Operation(self, span, kind, named, start_time)

    def link(self, headers: Headers) -> Link | None:
        """Return a link to the creation context that is in a message's headers."""
        found = self._creation(headers)
        return None if found is None else Link(found)

    def links(self, headers: Iterable[Headers]) -> list[Link]:
        """Return links to the creation contexts of messages, as a span keeps them."""
        found = (link for each in headers if (link := self.link(each)) is not None)
        return list(islice(found, MOST_LINKS))

    def parent(self, headers: Headers) -> Context | None:
        """Return the context of a message for what is done in no span of its own."""
        if trace.get_current_span().get_span_context().is_valid:
            return None
        return self._propagator.extract(headers or {})

    def _creation(self, headers: Headers) -> trace.SpanContext | None:
        if not headers or "traceparent" not in headers:
            return None
        found = self._propagator.extract(headers, contexts.Context())
        creation = trace.get_current_span(found).get_span_context()
        return creation if creation.is_valid else None

    def injected(self, message: Message, span: Span) -> Message:
        """Return the message with the context of a span."""
        headers = dict(message.headers or {})
        self._propagator.inject(headers, trace.set_span_in_context(span))
        return message._replace(headers=headers)

    def context_of(self, span: Span) -> dict[str, str]:
        """Return the context of a span, as an argument of a call; empty for none."""
        carrier = dict[str, str]()
        self._propagator.inject(carrier, trace.set_span_in_context(span))
        return {name: text for name, text in carrier.items() if name == "traceparent"}

    def create(self, topic: str, message: Message) -> Message:
        """Return a message with a creation context: its own, or that of a span."""
        if self.link(message.headers) is not None:
            return message
        created = self.start("create", CREATE, topic)
        message = self.injected(message, created.span)
        created.end()
        return message

    def send(self, name: str, topic: str, message: Message, call: Callable[[Message], Any]) -> Any:  # noqa: ANN401  # of any face
        """Send one message by `call`, with the context of the span.

        A message that has a context keeps it, as one that is sent again: the span links
        to it.
        """
        link = self.link(message.headers)
        kind = SEND_CREATING if link is None else SEND
        operation = self.start(name, kind, topic, links=[] if link is None else [link])
        if link is None:
            message = self.injected(message, operation.span)
        return operation.around(lambda: call(message), sent=1)

    def send_batch(
        self, topic: str, messages: Iterable[Message], call: Callable[[list[Message]], Any]
    ) -> Any:  # noqa: ANN401  # of any face
        """Send messages by `call`, each with a context of its own."""
        created = [self.create(topic, message) for message in messages]
        links = self.links(message.headers for message in created)
        operation = self.start("send", SEND, topic, links=links, batch__message_count=len(created))
        return operation.around(lambda: call(created), sent=len(created))

    def store(self, items: Sequence[BufferedSend], *, decided: bool) -> Operation:
        """Begin the operation that stores a bundle; `decided`: this commits it, too."""
        topics = {item.topic for item in items}
        messages = [item.content for item in items if isinstance(item.content, Message)]
        count = sum(item.message_count for item in items)
        operation = self.start(
            "commit" if decided else "send_half",
            COMMIT if decided else SEND,
            topics.pop() if len(topics) == 1 else "",
            links=self.links(message.headers for message in messages),
            batch__message_count=count,
        )
        operation.sent = count
        return operation

    def decide(self, token: object, outcome: Decision) -> Operation:
        """Begin the operation that decides a bundle."""
        name, kind = ("commit", COMMIT) if outcome is COMMITTED else ("rollback", ROLLBACK)
        return self.start(name, kind, txmq__transaction=str(token))

    @contextmanager
    def deciding(self, token: object, outcome: Decision) -> Iterator[None]:
        """Decide a bundle within the block."""
        operation = self.decide(token, outcome)
        try:
            with operation.current():
                yield
        except BaseException as error:
            operation.end(None, error)
            raise
        operation.end()

    def dead_letter(self, message: Any, group: str, error: BaseException) -> None:  # noqa: ANN401  # as delivered
        """Record that a message was dead-lettered at its receipt."""
        self.start("dead_letter", SETTLE, message.topic, **self.of_message(message, group)).end(
            None, error=error
        )

    def of_message(self, message: Any, group: str) -> dict[str, Any]:  # noqa: ANN401  # as delivered
        """Return the attributes of one delivered message, and the links: to its
        creation, and to the redrive that copied it.
        """
        redrive = (message.headers or {}).get(REDRIVE_TRACE)
        contexts_of = (message.headers, {"traceparent": redrive} if redrive else None)
        return {
            "links": self.links(contexts_of),
            "consumer__group__name": group,
            "destination__partition__id": str(message.partition),
            "message__id": message.message_id,
        }


class Operation:
    """A span, and the metrics that go with it. `sent` counts messages."""

    __slots__ = ("_attributes", "_kind", "_started", "_telemetry", "sent", "span")

    def __init__(
        self,
        telemetry: Telemetry,
        span: Span,
        kind: OperationKind,
        attributes: dict[str, Any],
        start_time: int | None,
    ) -> None:
        self._telemetry, self.span, self._kind = telemetry, span, kind
        self._attributes, self.sent = attributes, 0
        passed = 0 if start_time is None else time.time_ns() - start_time
        self._started = time.perf_counter_ns() - passed

    def current(self) -> AbstractContextManager[Any]:
        """Return a block in which the span is the current one."""
        return trace.use_span(
            self.span, end_on_exit=False, record_exception=False, set_status_on_exception=False
        )

    def around(self, call: Callable[[], Any], *, sent: int = 0) -> Any:  # noqa: ANN401  # of any face
        """Make a call within the span, and end it with the call."""
        self.sent = sent or self.sent
        try:
            with self.current():
                result = call()
        except BaseException as error:
            self.end(None, error)
            raise
        return when_done(result, self.end)

    def end(
        self,
        value: object = None,
        error: BaseException | None = None,
        *,
        consumed: int = 0,
    ) -> None:
        """End with a value or an error."""
        span, telemetry = self.span, self._telemetry
        if error is not None:
            kind = type(error)
            name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
            self._attributes["error.type"] = name
            span.set_attribute("error.type", name)
            _record(span, name, error)
            span.set_status(Status(StatusCode.ERROR, text_of(error)))
        elif span.is_recording():
            span.set_attributes(_of_value(value))
        span.end()
        measured = {name: value for name, value in self._attributes.items() if name not in OF_SPANS}
        seconds = (time.perf_counter_ns() - self._started) / 1e9
        if self._kind is PROCESS:
            telemetry.process_durations.record(seconds, measured)
        elif self._kind is not CREATE:
            telemetry.durations.record(seconds, measured)
        if self.sent:
            telemetry.sent.add(self.sent, measured)
        if consumed:
            telemetry.consumed.add(consumed, measured)


def _record(span: Span, name: str, error: BaseException) -> None:
    """Record an error, whose own methods may raise."""
    try:
        span.record_exception(error)
    except Exception:  # noqa: BLE001  # of the error's class
        told = {"exception.type": name, "exception.message": text_of(error)}
        span.add_event("exception", told)


def attributes_of(given: Mapping[str, object]) -> dict[str, Any]:
    """Return keyword arguments as attributes: `batch__message_count` is
    "messaging.batch.message_count".
    """
    return {
        f"messaging.{name.replace('__', '.')}": value
        for name, value in given.items()
        if value is not None
    }


def _partition_id(partition: int) -> str | None:
    return str(partition) if partition >= 0 else None  # it is not known yet


def _of_value(value: object) -> dict[str, Any]:
    """Return the attributes of what a call has returned."""
    if isinstance(value, Receipt):
        return attributes_of(
            {
                "message__id": value.message_id,
                "destination__partition__id": _partition_id(value.partition),
            }
        )
    token = getattr(value, "token", None)
    return {} if token is None else {"messaging.txmq.transaction": str(token)}
