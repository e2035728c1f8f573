"""The rules for running handlers, for all faces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from inspect import (
    isasyncgen,
    isasyncgenfunction,
    isawaitable,
    iscoroutine,
    iscoroutinefunction,
    isgenerator,
    isgeneratorfunction,
    signature,
)
from typing import NamedTuple, TypeVar

from txmq.client.log import get_logger
from txmq.client.protocol.consumer.fetched import DeliveredMessage
from txmq.errors import LocalProtocolError
from txmq.model.durations import Duration, seconds_of
from txmq.model.message import ReceivedMessage
from txmq.model.tracebacks import text_of

_PLAIN = (
    "give a function that returns when its work is done; coroutines are for txmq.aio.connect,"
    " and for txmq.twisted.connect without an inbox"
)
log = get_logger()

# A handler of lists may call its messages by either name.
D = TypeVar("D", DeliveredMessage, ReceivedMessage)


class HandlerOptions(NamedTuple):
    """The way handlers run: the `workers` (threads, or coroutines on a loop), the
    messages for one call, the seconds to wait for so many, and the seconds without a
    message after which to end.
    """

    workers: int
    batch: int | None
    batch_wait: float
    idle_exit: float | None


def handler_options(
    workers: int, batch: int | None, batch_wait: Duration, idle_exit: Duration | None
) -> HandlerOptions:
    """Return the options that these arguments make. Raises LocalProtocolError."""
    for name, number in (("workers", workers), ("batch", batch)):
        if number is not None and number < 1:
            raise LocalProtocolError(f"{name} is {number}", hint="use at least 1")
    seconds = seconds_of(batch_wait, "batch_wait")
    if seconds and batch is None:
        raise LocalProtocolError(
            f"batch_wait is {batch_wait}, without a batch",
            hint="give the seconds to wait for a full batch: batch=50, batch_wait=0.1",
        )
    return HandlerOptions(workers, batch, seconds, seconds_of(idle_exit, "idle_exit"))


def require_handler(handler: object, inbox: object = None, *, coroutines: bool = False) -> None:
    """Require a function of a message, and of a connection where there is an `inbox`,
    whose work is done when it returns, or where `coroutines` are allowed, when the
    coroutine ends that it returns. The inbox has to be a function, too.

    Raises LocalProtocolError. What only its result shows, `require_finished` finds.
    """
    if not (inbox is None or callable(inbox)):
        raise LocalProtocolError(
            f"the inbox is of type {type(inbox).__name__}",
            hint="give a function that connects: inbox=lambda: psycopg2.connect(DSN)",
        )
    if not callable(handler):
        raise LocalProtocolError(
            f"the handler is of type {type(handler).__name__}", hint="give a function of a message"
        )
    if _is_kind(handler, isgeneratorfunction) or _is_kind(handler, isasyncgenfunction):
        raise LocalProtocolError(
            f"the handler {_name(handler)} is a generator: a call runs nothing of it",
            hint="remove its yield, or give a function that works through it",
        )
    if not coroutines and _is_kind(handler, iscoroutinefunction):
        raise LocalProtocolError(
            f"the handler {_name(handler)} is a coroutine: a call runs nothing of it", hint=_PLAIN
        )
    _require_arguments(handler, 1 if inbox is None else 2)


def _require_arguments(handler: Callable[..., object], count: int) -> None:
    """Require that a handler can be called with so many arguments, if that is known."""
    try:
        expected = signature(handler)
    except (TypeError, ValueError):  # of a callable in C
        return
    try:
        expected.bind(*range(count))
    except TypeError as error:
        given = "the message" if count == 1 else "the message and the inbox's connection"
        raise LocalProtocolError(
            f"the handler {_name(handler)}{expected} cannot be called: {error}",
            hint=f"it is called with {given}",
        ) from None


def require_finished(answer: object) -> None:
    """Require of a handler's result that no work is left in it: no coroutine,
    generator, lazy `map` or `filter`, future or Deferred.

    Raises LocalProtocolError, the failure of the messages. A coroutine or generator is
    closed, and never runs.
    """
    if iscoroutine(answer) or isgenerator(answer):
        answer.close()
    elif not (
        isinstance(answer, Future | map | filter) or isawaitable(answer) or isasyncgen(answer)
    ):
        return
    raise LocalProtocolError(
        f"the handler returned a {type(answer).__name__}, whose work may not be done", hint=_PLAIN
    )


def _is_kind(handler: Callable[..., object], is_kind: Callable[[object], bool]) -> bool:
    """Return whether a call of `handler` calls a function of that kind."""
    while isinstance(handler, partial):
        handler = handler.func
    return is_kind(handler) or is_kind(getattr(type(handler), "__call__", None))  # noqa: B004


def _name(handler: object) -> str:
    return str(getattr(handler, "__name__", type(handler).__name__))


def failed_messages(
    messages: Sequence[DeliveredMessage], error: BaseException
) -> list[DeliveredMessage]:
    """Return the messages to nack after the handler has raised, and log each.

    They keep their order: later ones of a key are parked behind the first. Messages
    that the handler has nacked itself are left out.
    """
    failed = [message for message in messages if message.in_hand]
    for message in failed:
        place = f"{message.topic}/{message.partition}/{message.offset}"
        log.warning(
            "message.failed",
            place=place,
            attempt=message.attempt,
            error=text_of(error, repr)[:200],
            exc_info=error,
        )
    return failed
