"""Bodies as people read them: JSON, MessagePack, CloudEvents, text, or bytes.

Numbers are shown as they were written, and names in their order, repeated ones as well.
What is shown is bounded, whatever a body is; nothing here raises.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import msgpack

from txmq.model.schemas.bodies import CONTENT_TYPE, MAX_DEPTH, mistake_in, title_of

MAX_DECODED = 256 << 10  # bytes of a body; of a larger one the beginning is shown
MAX_CHECKED = 32 << 10  # of a body that is compared with a schema
MAX_SHOWN = 256 << 10  # characters
MAX_HEX = 4 << 10  # bytes
MAX_ATTRIBUTES = 64
MAX_VALUE = 1_024  # characters of an attribute
CLOUD_EVENT = "application/cloudevents"
CE_PREFIXES = ("ce_", "ce-", "cloudEvents_", "cloudEvents:")
CONTAINERS = (*range(0x80, 0xA0), *range(0xDC, 0xE0))  # first bytes of maps and arrays
TEXT_CONTROLS = {*range(0x20)} - {0x09, 0x0A, 0x0D}


class Decoded(NamedTuple):
    """A body in words.

    `kind` is json, msgpack, cloudevent, text, hex or empty; `cut`: there is more of it.
    `attributes` are those of a CloudEvent. `note` says what is wrong, or which schema
    the body fits.
    """

    kind: str
    text: str
    note: str = ""
    cut: bool = False
    attributes: tuple[tuple[str, str], ...] = ()


class _Number(str):
    """A number as it was written."""

    __slots__ = ()


class _Pairs(list[tuple[Any, Any]]):
    """An object: its names in their order, repeated ones as well."""

    __slots__ = ()


def decode(
    body: bytes,
    content_type: str = "",
    schema: str = "",
    headers: Mapping[str, str] | None = None,
) -> Decoded:
    """Return a body as people read it. `schema` is that of its topic."""
    if not body:
        return Decoded("empty", "")
    try:
        found = _decoded(body, content_type.partition(";")[0].strip().lower(), headers or {})
        note = found.note or _schema_note(schema, body, content_type)
        return found._replace(note=note)
    except Exception as error:  # noqa: BLE001  # whatever a body makes of a library
        return _hex(body, f"The body cannot be decoded: {type(error).__name__}")


def decode_message(row: Mapping[str, Any], schema: str = "") -> Decoded | None:
    """Return the body of a message as a call gives it; None = the call gives none,
    because it is hidden or damaged.
    """
    if row.get("body") is None:
        return None
    headers = row.get("headers") or {}
    return decode(b64decode(row["body"]), headers.get(CONTENT_TYPE, ""), schema, headers)


def _decoded(body: bytes, kind: str, headers: Mapping[str, str]) -> Decoded:
    if len(body) > MAX_DECODED:
        size = f"Only the beginning of {len(body):,} bytes is shown."
        return (_as_text(body[:MAX_HEX], size) or _hex(body, size))._replace(cut=True)
    attributes = _binary_event(headers)
    if kind.startswith(CLOUD_EVENT) or attributes:
        return _event(body, kind, attributes)
    if kind.endswith("msgpack"):
        return _as_msgpack(body) or _hex(
            body, "The body is no MessagePack, though its header says so."
        )
    packed = _as_msgpack(body) if body[0] in CONTAINERS and not kind.endswith("json") else None
    wrong = "The body is no JSON, though its header says so." if kind.endswith("json") else ""
    return _as_json(body) or packed or _as_text(body, wrong) or _hex(body, wrong)


def _binary_event(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the attributes of a CloudEvent that are headers; none = it is not one."""
    found = {
        name.removeprefix(prefix): value
        for prefix in CE_PREFIXES
        for name, value in headers.items()
        if name.startswith(prefix)
    }
    return found if "specversion" in found else {}


def _event(body: bytes, kind: str, attributes: dict[str, str]) -> Decoded:
    if attributes:
        shown = _decoded(body, "", {})
        return shown._replace(kind="cloudevent", attributes=_attributes(attributes.items()))
    tree = _parse_json(body)
    if not isinstance(tree, _Pairs):
        wrong = f"The body is no CloudEvent, though its header says {kind}."
        return (_as_json(body) or _as_text(body, "") or _hex(body, ""))._replace(note=wrong)
    fields = [(name, _line(value)) for name, value in tree if name not in ("data", "data_base64")]
    data = [value for name, value in tree if name in ("data", "data_base64")]
    text, cut = _joined(_pretty(data[0], "") if data else iter(("",)))
    return Decoded("cloudevent", text, "", cut, _attributes(fields))


def _attributes(fields: Any) -> tuple[tuple[str, str], ...]:  # noqa: ANN401  # pairs of texts
    some = islice(fields, MAX_ATTRIBUTES)
    return tuple((str(name)[:MAX_VALUE], str(value)[:MAX_VALUE]) for name, value in some)


def _line(value: object) -> str:
    return value if type(value) is str else _joined(_pretty(value, ""))[0]


def _parse_json(body: bytes) -> object:
    """Return the value of a JSON text, or raise ValueError or RecursionError."""
    return json.loads(
        body.decode(),
        parse_int=_Number,
        parse_float=_Number,
        parse_constant=_Number,
        object_pairs_hook=_Pairs,
    )


def _as_json(body: bytes) -> Decoded | None:
    try:
        text, cut = _joined(_pretty(_parse_json(body), ""))
    except (ValueError, RecursionError):
        return None
    return Decoded("json", text, "", cut)


def _as_msgpack(body: bytes) -> Decoded | None:
    try:
        tree = msgpack.unpackb(body, strict_map_key=False, object_pairs_hook=_Pairs, timestamp=3)
        text, cut = _joined(_pretty(tree, ""))
    except (ValueError, RecursionError, msgpack.UnpackException, OverflowError):
        return None
    return Decoded("msgpack", text, "", cut)


def _as_text(body: bytes, note: str) -> Decoded | None:
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        if error.start < len(body) - 3 or len(body) < MAX_HEX:  # more than a cut character
            return None
        text = body[: error.start].decode()
    if any(byte in TEXT_CONTROLS for byte in body[:MAX_HEX]):
        return None
    return Decoded("text", text[:MAX_SHOWN], note, len(text) > MAX_SHOWN)


def _hex(body: bytes, note: str) -> Decoded:
    lines = []
    for at in range(0, min(len(body), MAX_HEX), 16):
        row = body[at : at + 16]
        shown = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in row)
        lines.append(f"{at:08x}  {row.hex(' '):<47}  {shown}")
    return Decoded("hex", "\n".join(lines), note, len(body) > MAX_HEX)


def _joined(pieces: Iterator[str]) -> tuple[str, bool]:
    """Return pieces as one text, and whether there are more."""
    taken: list[str] = []
    size = 0
    for piece in pieces:
        taken.append(piece)
        size += len(piece)
        if size > MAX_SHOWN:
            return "".join(taken)[:MAX_SHOWN], True
    return "".join(taken), False


def _pretty(value: object, indent: str) -> Iterator[str]:
    """Yield the pieces of a value. Raises RecursionError where it is too deep."""
    if len(indent) > 2 * MAX_DEPTH:
        raise RecursionError
    inner = indent + "  "
    match value:
        case _Pairs():
            yield "{"
            for number, (name, item) in enumerate(value):
                yield f"{',' if number else ''}\n{inner}{_scalar(name)}: "
                yield from _pretty(item, inner)
            yield f"\n{indent}}}" if value else "}"
        case list():
            yield "["
            for number, item in enumerate(value):
                yield f"{',' if number else ''}\n{inner}"
                yield from _pretty(item, inner)
            yield f"\n{indent}]" if value else "]"
        case _:
            yield _scalar(value)


def _scalar(value: object) -> str:
    match value:
        case _Number():
            return str(value)
        case str():
            return json.dumps(value, ensure_ascii=False)
        case bool() | None:
            return json.dumps(value)
        case bytes():
            return f"bytes {value.hex()}"
        case msgpack.ExtType():
            return f"extension {value.code} {value.data.hex()}"
    return str(value)


def _schema_note(schema: str, body: bytes, content_type: str) -> str:
    if not schema:
        return ""
    if len(body) > MAX_CHECKED:
        return "The body is too large to be compared with the topic's schema here."
    mistake = mistake_in(schema, body, content_type)
    if mistake:
        return f"The body does not fit the topic's schema: {mistake}"
    title = title_of(schema)
    return f"The body fits the topic's schema{f' {title}' if title else ''}."
