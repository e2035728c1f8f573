"""Causes of messages: what a handler sends says in its headers what it follows from.

`causation` is the id of the message whose handler has sent it. `correlation` is the
same in all that follows from one first message: the first one's id, or what its sender
has given it. Headers that the sender gives stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from txmq.model.message import Message

CAUSATION, CORRELATION = "causation", "correlation"
MAX_INHERITED = 256  # characters: it must fit beside the headers of any message


class Delivered(Protocol):
    """A delivered message, as far as what follows from it has to know it."""

    @property
    def message_id(self) -> str: ...
    @property
    def headers(self) -> Mapping[str, str]: ...


current_cause: ContextVar[Delivered | None] = ContextVar("txmq_cause", default=None)


@contextmanager
def caused_by(message: Delivered) -> Iterator[None]:
    """Send what the block sends as an effect of a delivered message.

    Handlers of one message are called in such a block. It is for programs that receive
    messages themselves, and for handlers of lists. A thread has blocks of its own.
    """
    token = current_cause.set(message)
    try:
        yield
    finally:
        current_cause.reset(token)


def with_cause(message: Message) -> Message:
    """Return a message to send with the headers of the message in hand, if there is
    one. Hot paths save the call where `current_cause` has none, as mostly.
    """
    cause = current_cause.get()
    if cause is None:
        return message
    given = message.headers or {}
    if not isinstance(given, Mapping):
        return message  # which is refused
    correlation = correlation_of(cause.message_id, cause.headers)
    headers = {CAUSATION: cause.message_id, CORRELATION: correlation, **given}
    return message._replace(headers=headers)


def correlation_of(message_id: str, headers: Mapping[str, str]) -> str:
    """Return what a message and all that follows from it have in common."""
    inherited = headers.get(CORRELATION)
    return inherited if inherited and len(inherited) <= MAX_INHERITED else message_id
