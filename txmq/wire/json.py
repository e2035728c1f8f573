"""JSON from strangers: what the standard parser lets pass and no two readers agree on
is refused.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Iterable
from math import isfinite
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from txmq.errors import LocalProtocolError, RemoteProtocolError
from txmq.errors.validation import first_mistake
from txmq.model import limits

INTEGERS = range(-(1 << 63), 1 << 64)
LONGEST_INTEGER = 20  # digits and sign


class WireModel(BaseModel):
    """What all models of the wire are: unknown fields are refused, because to ignore
    one may be to ignore an order.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


M = TypeVar("M", bound=BaseModel)


def parse(payload: bytes) -> JsonValue:
    """The value of a JSON text.

    Raises RemoteProtocolError for what is no JSON, and for names that stand twice,
    numbers out of range, NaN and infinity, lone surrogates, and nesting deeper than
    `limits.JSON_DEPTH`.
    """
    try:
        value: JsonValue = _DECODER.decode(_text(payload))
        if b"\\u" in payload:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"no acceptable JSON: {error}") from error
    if payload.count(b"[") + payload.count(b"{") > limits.JSON_DEPTH and _deeper(
        value, limits.JSON_DEPTH
    ):
        raise RemoteProtocolError(f"no acceptable JSON: nested deeper than {limits.JSON_DEPTH}")
    return value


def parse_as(model: type[M], payload: bytes) -> M:
    """The model that a JSON text describes. Raises RemoteProtocolError, which names the
    first field that is wrong.
    """
    parse(payload)
    try:
        return model.model_validate_json(payload)
    except ValidationError as error:
        where, why = first_mistake(error, unit="field")
        raise RemoteProtocolError(
            f"{model.__name__}: {'.'.join(where) or 'the whole'}: {why}"
        ) from error


def dump(value: object) -> bytes:
    """The JSON text of a value. LocalProtocolError where it has none."""
    try:
        return _ENCODER.encode(value).encode()
    except (TypeError, ValueError) as error:
        raise LocalProtocolError(f"not a value for JSON: {error}") from error


def _text(payload: bytes) -> str:
    if payload.startswith(BOM_UTF8):
        raise ValueError("it begins with a BOM")
    return payload.decode()


def _distinct(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    distinct = dict(pairs)
    if len(distinct) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return distinct


def _integer(digits: str) -> int:
    if len(digits) <= LONGEST_INTEGER and (number := int(digits)) in INTEGERS:
        return number
    raise ValueError(f"an integer of {len(digits)} digits is out of range")


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError("a number is out of range")
    return number


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number")


# Made once: to make one takes longer than most texts of the wire.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_distinct, parse_int=_integer, parse_float=_finite, parse_constant=_refuse
)
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _deeper(value: JsonValue, most: int) -> bool:
    """Whether values nest deeper than that; level by level, because a recursion would
    have the very problem.
    """
    level: list[JsonValue] = [value]
    for _ in range(most):
        level = [inner for item in level for inner in _inside(item)]
        if not level:
            return False
    return any(isinstance(item, dict | list) for item in level)


def _inside(value: JsonValue) -> Iterable[JsonValue]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
