"""Encoding and limits of single cells: key, tag, body and headers of one row."""

from __future__ import annotations

from collections.abc import Mapping

import msgpack

from txmq.errors import LocalProtocolError, MessageTooLarge, RemoteProtocolError
from txmq.model import limits
from txmq.model.message import NO_HEADERS
from txmq.model.origin import ADDED

BODY_HINT = "encode text with .encode(), values with json or msgpack"
SMALLER = "send smaller ones, or store the data elsewhere and send its address"


def too_large(kind: str, size: int, limit: int) -> MessageTooLarge:
    """Return the error for a `kind` ("message") of `size` bytes."""
    message = f"a {kind} of {size} bytes exceeds the limit of {limit}"
    return MessageTooLarge(message, hint=SMALLER, detail={"size": size, "limit": limit})


def text_too_long(kind: str, size: int, limit: int) -> LocalProtocolError:
    """Return the error for a key or tag of `size` bytes."""
    return LocalProtocolError(f"a {kind} of {size} bytes exceeds the limit of {limit}")


def text_cell(text: str, kind: str, limit: int) -> bytes:
    """Return the UTF-8 bytes of a key or tag.

    Raises LocalProtocolError where it is not a string, or too long.
    """
    try:
        cell = text.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise LocalProtocolError(
            f"invalid {kind} {text!r:.80}", hint="use text that UTF-8 can encode"
        ) from error
    if len(cell) > limit:
        raise text_too_long(kind, len(cell), limit)
    return cell


def body_cell(body: bytes) -> bytes:
    """Return a body as bytes.

    Raises LocalProtocolError where it is not bytes, MessageTooLarge beyond the limit.
    """
    if not isinstance(body, bytes):
        if not isinstance(body, bytearray | memoryview):
            raise LocalProtocolError(
                f"a body must be bytes, not {type(body).__name__}", hint=BODY_HINT
            )
        body = bytes(body)
    if len(body) > limits.MESSAGE:
        raise too_large("message", len(body), limits.MESSAGE)
    return body


def header_cell(headers: Mapping[str, str] | None) -> bytes:
    """Return the encoded headers of one message.

    Raises LocalProtocolError where they do not map strings to strings, or are too many
    or too long without those that txmq adds.
    """
    if not headers:
        return b""
    strings = isinstance(headers, Mapping) and all(
        type(text) is str for pair in headers.items() for text in pair
    )
    if not strings or _count_of_user(headers) > limits.HEADER_PAIRS:
        hint = f"use a dict of str to str with at most {limits.HEADER_PAIRS} entries"
        raise LocalProtocolError(f"invalid headers {headers!r:.80}", hint=hint)
    try:
        cell = bytes(msgpack.packb(dict(headers)))
    except UnicodeEncodeError as error:
        raise LocalProtocolError("headers must be text that UTF-8 can encode") from error
    if len(cell) > limits.HEADERS:
        _require_size(headers, len(cell))
    return cell


def _count_of_user(headers: Mapping[str, str]) -> int:
    count = len(headers)
    return count if count <= limits.HEADER_PAIRS else len(headers.keys() - ADDED)


def _require_size(headers: Mapping[str, str], size: int) -> None:
    """Require headers of so many bytes to be small enough without those of txmq."""
    own = {name: text for name, text in headers.items() if name not in ADDED}
    size_of_own = len(msgpack.packb(own))
    if size_of_own > limits.HEADERS or size > limits.ALL_HEADERS:
        raise LocalProtocolError(
            f"headers of {size_of_own} bytes exceed the limit of {limits.HEADERS}"
        )


def headers_of(cell: bytes) -> Mapping[str, str]:
    """Return the headers in a cell.

    Raises RemoteProtocolError for a cell that `header_cell` cannot have made.
    """
    if not cell:
        return NO_HEADERS
    try:
        headers = msgpack.unpackb(
            cell,
            object_pairs_hook=_distinct,
            max_map_len=limits.ALL_HEADER_PAIRS,
            max_array_len=0,
            max_bin_len=0,
            max_ext_len=0,
        )
    except ValueError as error:
        raise RemoteProtocolError(f"damaged headers: {error}") from error
    if type(headers) is not dict or not _are_texts(headers):
        raise RemoteProtocolError("the headers are not a map of text to text")
    return headers


def _are_texts(headers: dict[object, object]) -> bool:
    # a loop, because a generator costs as much as the rest of `headers_of`
    for name, text in headers.items():
        if type(name) is not str or type(text) is not str:
            return False
    return True


def _distinct(pairs: list[tuple[object, object]]) -> dict[object, object]:
    distinct = dict(pairs)
    if len(distinct) != len(pairs):
        raise ValueError("a header name occurs twice")
    return distinct
