"""Values that handlers of HTTP requests get and give: forms, replies, event streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from txmq.wire.json import dump

Query = Mapping[bytes, Sequence[bytes]]


class HttpReply(NamedTuple):
    """Status, body and content type of a reply. `headers` are added to those that all
    replies have, or replace them.
    """

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = {}


class HttpForm(NamedTuple):
    """A form that a browser has sent.

    `cookie` returns a cookie by its name. With `part`, a script of the console shows
    the reply within its page.
    """

    path: str
    body: bytes
    cookie: Callable[[str], str]
    part: bool


class Sink(Protocol):
    """The open end of an event stream."""

    @property
    def is_full(self) -> bool: ...
    def write(self, data: bytes) -> object: ...
    def end(self) -> None: ...


class Source(Protocol):
    """Source of an event stream. `closed` is called once, whichever side ends it."""

    def opened(self, sink: Sink) -> None: ...
    def closed(self) -> None: ...


class HttpStream(NamedTuple):
    """A reply that goes on until one side ends it. `make` gets the client's host, as
    `network_of` has it; None = there is no place for another one.
    """

    content_type: str
    make: Callable[[str], Source | None]


Respond = Callable[[HttpReply | HttpStream], None]
# path, query, and the rights of the user, None where the broker has no users
Handle = Callable[[str, Query, Respond, Any], None]
Act = Callable[[HttpForm, Respond, Any], None]  # a form, and such rights


def json_reply(value: object, status: int = 200) -> HttpReply:
    """Return a reply with JSON."""
    return HttpReply(status, dump(value), "application/json")


def error_reply(
    status: int, error: str, message: str, hint: str = "", headers: Mapping[str, str] | None = None
) -> HttpReply:
    """Return an error, with the fields of an error of the command line."""
    reply = json_reply({"error": error, "message": message, "hint": hint}, status)
    return reply._replace(headers=headers or {})
