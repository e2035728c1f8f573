"""The calls of one client, and of its consumers, with spans around them.

The calls are replaced on the object, so that a client without telemetry has none of it.
All faces have the same names; what they return is told apart by `when_done`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial, wraps
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import Any

from txmq.client.protocol.telemetry.completion import when_done
from txmq.client.protocol.telemetry.tracing import (
    CHECK,
    PROCESS,
    RECEIVE,
    REPLAY,
    SEND,
    SETTLE,
    Telemetry,
)
from txmq.model.message import Message, ReceivedMessage

REPLAYS = ("dlq.replay", "dlq.redrive", "plan.start")
# Calls of a consumer about one message, and what the operation is called.
OF_ONE = {"ack": "ack", "nack": "nack", "postpone": "postpone", "dead_letter": "dead_letter"}
OF_BATCHES = {"ack_batch": "ack", "nack_batch": "nack"}
# Calls of the members, which handlers that run settle by, too.
OF_LISTS = {"ack_many": "ack", "nack_many": "nack"}
Call = Callable[..., Any]


def instrument_client(client: Any, telemetry: Telemetry) -> None:  # noqa: ANN401  # of any face
    """Put spans around the calls of a client."""

    def replace(name: str, wrap: Callable[[Call], Call]) -> None:
        if hasattr(client, name):
            setattr(client, name, wrap(getattr(client, name)))

    half = getattr(client, "half_async", None)  # that of the faces with a `send_async`
    blocks = half is not None and not iscoroutinefunction(half)
    for name, operation in (
        ("send", "send"),
        ("send_async", "send"),
        ("half", "send_half"),
        ("half_async", "send_half"),
    ):
        replace(name, partial(_send, telemetry, operation))
    if not blocks or hasattr(client, "clients"):
        # Of a blocking client it calls `send_async`.
        replace("send_one_way", partial(_send, telemetry, "send"))
    replace("send_batch", partial(_send_batch, telemetry))
    replace("send_many", partial(_send_many, telemetry))
    core = getattr(client, "_core", None)  # letters and plans call by it, too
    if core is not None:
        core.call = _control(telemetry, core.call)
    replace("register_checker", partial(_register_checker, telemetry))
    replace("consumer", partial(_consumer, telemetry))
    for one in getattr(client, "clients", ()):  # of a cluster: plans belong to one broker
        one.call = _control(telemetry, one.call)


def _send(telemetry: Telemetry, name: str, call: Call) -> Call:
    @wraps(call)
    def send(topic: str, body: bytes, **options: Any) -> Any:  # noqa: ANN401  # as the call
        message = Message(body, headers=options.pop("headers", None))
        return telemetry.send(
            name,
            topic,
            message,
            lambda sent: call(topic, body, headers=sent.headers, **options),
        )

    return send


def _send_batch(telemetry: Telemetry, call: Call) -> Call:
    @wraps(call)
    def send_batch(topic: str, messages: Any, **options: Any) -> Any:  # noqa: ANN401  # as the call
        listed = list(messages)
        if not all(isinstance(message, Message) for message in listed):
            return call(topic, listed, **options)  # which refuses it
        return telemetry.send_batch(topic, listed, lambda sent: call(topic, sent, **options))

    return send_batch


def _send_many(telemetry: Telemetry, call: Call) -> Call:
    @wraps(call)
    def send_many(topic: str, bodies: Sequence[bytes], *columns: Any, **options: Any) -> Any:  # noqa: ANN401  # as the call
        # Columns have no headers, and so no context.
        operation = telemetry.start("send", SEND, topic, batch__message_count=len(bodies))
        return operation.around(lambda: call(topic, bodies, *columns, **options), sent=len(bodies))

    return send_many


def _control(telemetry: Telemetry, call: Call) -> Call:
    @wraps(call)
    def control(name: str, args: dict[str, Any], **how: Any) -> Any:  # noqa: ANN401  # as the call
        if name not in REPLAYS:
            return call(name, args, **how)
        topics = {place[0] for place in args.get("letters") or ()}
        operation = telemetry.start(
            "replay",
            REPLAY,
            topics.pop() if len(topics) == 1 else "",
            consumer__group__name=args.get("group"),
            batch__message_count=len(args["letters"]) if args.get("letters") else None,
        )
        if args.get("to") is not None:  # the copies link to it
            args = args | telemetry.context_of(operation.span)
        return operation.around(lambda: call(name, args, **how))

    return control


def _register_checker(telemetry: Telemetry, call: Call) -> Call:
    @wraps(call)
    def register_checker(name: str, checker: Call) -> Any:  # noqa: ANN401  # as the call
        def check(half: Any) -> Any:  # noqa: ANN401  # of any face
            operation = telemetry.start("check", CHECK, txmq__checker=name)
            return operation.around(lambda: checker(half))

        return call(name, check)

    return register_checker


def _consumer(telemetry: Telemetry, call: Call) -> Call:
    @wraps(call)
    def consumer(*args: Any, **options: Any) -> Any:  # noqa: ANN401  # as the call
        def joined(consumer: Any, error: BaseException | None) -> None:  # noqa: ANN401  # of any face
            if error is None:
                instrument_consumer(consumer, telemetry)

        return when_done(call(*args, **options), joined)

    return consumer


def instrument_consumer(consumer: Any, telemetry: Telemetry) -> None:  # noqa: ANN401  # of any face
    """Put spans around the calls of a consumer, and around its handlers."""
    traced = TracedConsumer(telemetry, consumer.settings.group)
    for name in ("receive", "receive_many", "receive_batch"):
        setattr(consumer, name, traced.receive(getattr(consumer, name)))
    for name, operation in OF_ONE.items():
        setattr(consumer, name, traced.settle_one(operation, getattr(consumer, name)))
    for name, operation in OF_BATCHES.items():
        setattr(consumer, name, traced.settle_batch(operation, getattr(consumer, name)))
    members = consumer._members  # noqa: SLF001  # the calls that a run settles by
    for name, operation in OF_LISTS.items():
        setattr(members, name, traced.settle_list(operation, getattr(members, name)))
    for member in members.members:
        member.operations.on_refused = traced.dead_lettered
    consumer.run = traced.run(consumer.run)


class TracedConsumer:
    """The wrappers of the calls of one consumer."""

    def __init__(self, telemetry: Telemetry, group: str) -> None:
        self._telemetry, self._group = telemetry, group

    def receive(self, call: Call) -> Call:
        """Wrap a call that receives. There is no span where nothing came."""

        @wraps(call)
        def receive(*args: Any, **options: Any) -> Any:  # noqa: ANN401  # as the call
            began = time.time_ns()
            return when_done(
                call(*args, **options), lambda found, error: self._received(found, error, began)
            )

        return receive

    def _received(self, found: Any, error: BaseException | None, began: int) -> None:  # noqa: ANN401
        if error is not None or not found:
            return
        if isinstance(found, ReceivedMessage):  # one message
            attributes = self._telemetry.of_message(found, self._group)
            operation = self._telemetry.start(
                "receive", RECEIVE, found.topic, start_time=began, **attributes
            )
        else:
            operation = self._of_list("receive", RECEIVE, found, start_time=began)
        count = 1 if isinstance(found, ReceivedMessage) else len(found)
        operation.end(found, consumed=count)

    def _of_list(self, name: str, kind: Any, found: Any, **more: Any) -> Any:  # noqa: ANN401
        """Begin an operation on a list of messages, or on a batch of columns."""
        if hasattr(found, "headers"):
            topics, headers = {found.topic}, found.headers
        else:
            topics, headers = {each.topic for each in found}, [each.headers for each in found]
        return self._telemetry.start(
            name,
            kind,
            topics.pop() if len(topics) == 1 else "",
            links=self._telemetry.links(headers),
            consumer__group__name=self._group,
            batch__message_count=len(found),
            **more,
        )

    def settle_one(self, name: str, call: Call) -> Call:
        """Wrap a call about one message."""

        @wraps(call)
        def settle(message: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401  # as the call
            attributes = self._telemetry.of_message(message, self._group)
            operation = self._telemetry.start(name, SETTLE, message.topic, **attributes)
            return operation.around(lambda: call(message, *args, **options))

        return settle

    def settle_batch(self, name: str, call: Call) -> Call:
        """Wrap a call about a batch of columns."""

        @wraps(call)
        def settle(batch: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401  # as the call
            operation = self._of_list(name, SETTLE, batch)
            return operation.around(lambda: call(batch, *args, **options))

        return settle

    def settle_list(self, name: str, call: Call) -> Call:
        """Wrap a call about several messages."""

        @wraps(call)
        def settle(messages: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401  # as the call
            listed = list(messages)
            if not listed:
                return call(listed, *args, **options)
            if len(listed) == 1:
                attributes = self._telemetry.of_message(listed[0], self._group)
                operation = self._telemetry.start(name, SETTLE, listed[0].topic, **attributes)
            else:
                operation = self._of_list(name, SETTLE, listed)
            return operation.around(lambda: call(listed, *args, **options))

        return settle

    def dead_lettered(self, message: Any, error: BaseException) -> None:  # noqa: ANN401  # as delivered
        """Record that a body did not fit its model."""
        self._telemetry.dead_letter(message, self._group, error)

    def run(self, call: Call) -> Call:
        """Wrap the call that runs a handler."""

        @wraps(call)
        def run(handler: Any, **options: Any) -> Any:  # noqa: ANN401  # as the call
            return call(self._handler(handler), **options)

        return run

    def _handler(self, handler: Any) -> Any:  # noqa: ANN401  # what no handler is, the run refuses
        called = getattr(type(handler), "__call__", None)  # noqa: B004  # of an object
        if not callable(handler) or isgeneratorfunction(handler) or isasyncgenfunction(handler):
            return handler
        if iscoroutinefunction(handler) or iscoroutinefunction(called):

            async def work(delivered: Any, *connection: Any) -> Any:  # noqa: ANN401
                operation = self._process(delivered)
                with operation.current():
                    return await when_done(handler(delivered, *connection), operation.end)

            return work

        def handle(delivered: Any, *connection: Any) -> Any:  # noqa: ANN401
            return self._process(delivered).around(lambda: handler(delivered, *connection))

        return handle

    def _process(self, delivered: Any) -> Any:  # noqa: ANN401
        """Begin the span of a handler. That of one message continues its trace, where
        the handler runs in no span.
        """
        if not isinstance(delivered, ReceivedMessage):
            return self._of_list("process", PROCESS, delivered)
        return self._telemetry.start(
            "process",
            PROCESS,
            delivered.topic,
            parent=self._telemetry.parent(delivered.headers),
            txmq__message__attempt=delivered.attempt,
            **self._telemetry.of_message(delivered, self._group),
        )
