"""Single cells of the columns: headers, and what a row may hold."""

from __future__ import annotations

from collections.abc import Mapping

import msgpack

from txmq.errors import LocalProtocolError, MessageTooLarge, RemoteProtocolError
from txmq.model import limits
from txmq.model.message import NO_HEADERS

BODY_HINT = "encode text with .encode(), values with json or msgpack"
SMALLER = "split it, or put the data elsewhere and send its address"


def too_large(what: str, size: int, limit: int) -> MessageTooLarge:
    """The error for a `what` of `size` bytes."""
    message = f"a {what} of {size} bytes; the limit is {limit}"
    return MessageTooLarge(message, hint=SMALLER, detail={"size": size, "limit": limit})


def text_cell(text: str, what: str, limit: int) -> bytes:
    """The cell of a key or tag: its UTF-8 bytes. LocalProtocolError where it is no
    text, or too long.
    """
    try:
        cell = text.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise LocalProtocolError(
            f"{text!r:.80} cannot be a {what}", hint="text that UTF-8 can hold is needed"
        ) from error
    if len(cell) > limit:
        raise LocalProtocolError(f"a {what} of {len(cell)} bytes", hint=f"the limit is {limit}")
    return cell


def body_cell(body: bytes) -> bytes:
    """The cell of a body. LocalProtocolError where it is no bytes, MessageTooLarge
    beyond the limit.
    """
    if not isinstance(body, bytes):
        if not isinstance(body, bytearray | memoryview):
            raise LocalProtocolError(f"a body is bytes, not {type(body).__name__}", hint=BODY_HINT)
        body = bytes(body)
    if len(body) > limits.MESSAGE:
        raise too_large("message", len(body), limits.MESSAGE)
    return body


def header_cell(headers: Mapping[str, str] | None) -> bytes:
    """The cell of a message's headers. LocalProtocolError where they are not text to
    text, or too many.
    """
    if not headers:
        return b""
    strings = isinstance(headers, Mapping) and all(
        type(text) is str for pair in headers.items() for text in pair
    )
    if not strings or len(headers) > limits.HEADER_PAIRS:
        hint = f"a dict of at most {limits.HEADER_PAIRS} texts to texts is needed"
        raise LocalProtocolError(f"{headers!r:.80} cannot be headers", hint=hint)
    try:
        cell = bytes(msgpack.packb(dict(headers)))
    except UnicodeEncodeError as error:
        raise LocalProtocolError("headers must be text that UTF-8 can hold") from error
    if len(cell) > limits.HEADERS:
        raise LocalProtocolError(
            f"headers of {len(cell)} bytes", hint=f"the limit is {limits.HEADERS}"
        )
    return cell


def headers_of(cell: bytes) -> Mapping[str, str]:
    """The headers in a cell. RemoteProtocolError for any that `header_cell` could not
    have made.
    """
    if not cell:
        return NO_HEADERS
    try:
        headers = msgpack.unpackb(
            cell,
            object_pairs_hook=_distinct,
            max_map_len=limits.HEADER_PAIRS,
            max_array_len=0,
            max_bin_len=0,
            max_ext_len=0,
        )
    except ValueError as error:
        raise RemoteProtocolError(f"damaged headers: {error}") from error
    if type(headers) is not dict or not all(
        type(text) is str for pair in headers.items() for text in pair
    ):
        raise RemoteProtocolError("headers that are not a map of text to text")
    return headers


def _distinct(pairs: list[tuple[object, object]]) -> dict[object, object]:
    distinct = dict(pairs)
    if len(distinct) != len(pairs):
        raise ValueError("a name stands there twice")
    return distinct
