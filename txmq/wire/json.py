"""Strict JSON for values from peers.

The standard parser accepts texts that parsers read differently; these are refused. Its
hooks for objects and numbers are most of the time. So pydantic's parser and writer are
tried first, and a look at the value tells whether the strict ones would say the same.
Where they might not, these decide, and word the error.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Iterable
from math import isfinite
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError
from pydantic_core import from_json, to_json

from txmq.errors import LocalProtocolError, RemoteProtocolError
from txmq.errors.validation import first_mistake
from txmq.model import limits

LOWEST: Final = -(1 << 63)
HIGHEST: Final = (1 << 64) - 1
LONGEST_INTEGER = 20  # digits and sign
NAMES: Final = frozenset((str,))
SCALARS: Final = frozenset((str, int, float, bool, type(None)))


class WireModel(BaseModel):
    """Base of all models of the wire.

    Unknown fields are refused, because an ignored field may change the meaning of a
    request.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


M = TypeVar("M", bound=BaseModel)


def parse(payload: bytes) -> JsonValue:
    """Return the value of a JSON text.

    Raises RemoteProtocolError for text that is not JSON, for repeated names, numbers
    out of range, NaN and infinity, lone surrogates, and nesting deeper than
    `limits.JSON_DEPTH`.
    """
    # A name is followed by a colon at once, or the strict parser counts it.
    if not any(spaced in payload for spaced in _SPACED):
        try:
            value: JsonValue = from_json(payload, allow_inf_nan=False, cache_strings="keys")
        except ValueError:
            return _parse_strictly(payload)
        # Of a name that occurs twice in one object, the value has one.
        if _names_in(value) == payload.count(b'":'):
            return value
        del value  # before the strict parser makes another one
    return _parse_strictly(payload)


def _names_in(value: JsonValue) -> int | None:
    """Return the number of names in the objects of a value; None where a number may be
    out of range, or the value nests deeper than `limits.JSON_DEPTH`.
    """
    names = 0
    level: list[Any] = [(value,)]
    for _ in range(limits.JSON_DEPTH + 1):
        # Of what there is already: a new object for each dictionary, as of its values,
        # lets Python look through all others again and again, to collect some.
        inner: list[Any] = []
        for outer in level:
            for one in outer.values() if type(outer) is dict else outer:
                kind = type(one)
                if kind is str:
                    continue
                if kind is int or kind is float:
                    if not LOWEST <= one <= HIGHEST:
                        return None
                elif kind is dict:
                    names += len(one)
                    inner.append(one)
                elif kind is list:
                    inner.append(one)
        if not inner:
            return names
        level = inner
    return None


def _parse_strictly(payload: bytes) -> JsonValue:
    try:
        value: JsonValue = _DECODER.decode(_text(payload))
        if b"\\u" in payload:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"invalid JSON: {error}") from error
    if payload.count(b"[") + payload.count(b"{") > limits.JSON_DEPTH and _is_deeper(
        value, limits.JSON_DEPTH
    ):
        raise RemoteProtocolError(f"invalid JSON: nested deeper than {limits.JSON_DEPTH}")
    return value


def parse_result(payload: bytes) -> dict[str, Any]:
    """Return the object in the reply to a control call. Raises RemoteProtocolError."""
    value = parse(payload)
    if not isinstance(value, dict):
        raise RemoteProtocolError("a control call did not return an object")
    return value


def parse_as(model: type[M], payload: bytes) -> M:
    """Return the model in a JSON text.

    Raises RemoteProtocolError, which names the first invalid field.
    """
    parse(payload)
    try:
        return model.model_validate_json(payload)
    except ValidationError as error:
        where, reason = first_mistake(error, unit="field")
        raise RemoteProtocolError(
            f"{model.__name__}: {'.'.join(where) or 'the whole'}: {reason}"
        ) from error


def dump(value: object) -> bytes:
    """Return the JSON text of a value. Raises LocalProtocolError where it has none."""
    if _is_plain(value):
        try:
            text = to_json(value)
        except ValueError:
            return _dump_strictly(value)
        if not (b"NaN" in text or b"Infinity" in text):
            return text
    return _dump_strictly(value)


def _is_plain(value: object) -> bool:
    """Return True if a value is made of the types of JSON and tuples, and of no subtype
    of these. What nests deeper than `limits.JSON_DEPTH` may contain itself.
    """
    level: list[Any] = [(value,)]
    for _ in range(limits.JSON_DEPTH + 1):
        inner: list[Any] = []  # as in `_names_in`
        for outer in level:
            for one in outer.values() if type(outer) is dict else outer:
                kind = type(one)
                if kind in SCALARS:
                    continue
                if (kind is dict and {*map(type, one)} <= NAMES) or kind is list or kind is tuple:
                    inner.append(one)
                else:
                    return False
        if not inner:
            return True
        level = inner
    return False


def _dump_strictly(value: object) -> bytes:
    try:
        return _ENCODER.encode(value).encode()
    except UnicodeEncodeError as error:
        wrong = ascii(error.object[error.start : error.end])
        raise LocalProtocolError(
            f"a text with {wrong} cannot be written as JSON", hint="use text that UTF-8 can encode"
        ) from error
    except (TypeError, ValueError) as error:
        raise LocalProtocolError(f"a value cannot be written as JSON: {error}") from error


def _text(payload: bytes) -> str:
    if payload.startswith(BOM_UTF8):
        raise ValueError("it begins with a byte order mark")
    return payload.decode()


def _distinct(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    distinct = dict(pairs)
    if len(distinct) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return distinct


def _integer(digits: str) -> int:
    if len(digits) <= LONGEST_INTEGER and LOWEST <= (number := int(digits)) <= HIGHEST:
        return number
    raise ValueError(f"an integer of {len(digits)} digits is out of range")


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError("a number is out of range")
    return number


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


_SPACED: Final = (b'" ', b'"\t', b'"\n', b'"\r')
# Created once: creation takes longer than most texts of the wire.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_distinct, parse_int=_integer, parse_float=_finite, parse_constant=_refuse
)
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _is_deeper(value: JsonValue, depth: int) -> bool:
    """Return whether a value nests deeper than `depth` levels.

    It works level by level, because a recursion would overflow on such a value.
    """
    level: list[JsonValue] = [value]
    for _ in range(depth):
        level = [inner for item in level for inner in _inside(item)]
        if not level:
            return False
    return any(isinstance(item, dict | list) for item in level)


def _inside(value: JsonValue) -> Iterable[JsonValue]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
