"""Strict JSON: accepted values, and texts that parsers read differently."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from pydantic import Field

from tests import strategies as our
from txmq.errors import LocalProtocolError, RemoteProtocolError
from txmq.wire.json import WireModel, dump, parse, parse_as


@given(our.json_values)
def test_values_are_read_back(value: object) -> None:
    assert parse(dump(value)) == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"{} {}", "JSON"),
        (b"'a'", "JSON"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b'"\xff"', "JSON"),
        (b"NaN", "NaN is not a number"),
        (b'{"a": Infinity}', "Infinity is not a number"),
        (b"-Infinity", "not a number"),
        (b"1e999", "out of range"),
        (b"-1e999", "out of range"),
        (b"18446744073709551616", "out of range"),
        (b"-9223372036854775809", "out of range"),
        (b"9" * 5_000, "5000 digits"),
        (b'{"a": 1, "a": 1}', "twice"),
        (b'[{"b": {"a": 1, "\\u0061": 2}}]', "twice"),
        (b'"\\ud800"', "surrogates"),
        (b'{"\\udfff": 1}', "surrogates"),
        (b"[" * 100_000, "JSON"),
        (b"[" * 100_000 + b"]" * 100_000, "JSON"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "JSON"),
        (b"[" * 33 + b"]" * 33, "deeper than 32"),
        (b'{"a":[' * 17 + b"1" + b"]}" * 17, "deeper than 32"),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_ambiguous_json_is_refused(text: bytes, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        parse(text)


def test_everything_at_its_limit_is_read() -> None:
    assert parse(b"[" * 32 + b"]" * 32) == json.loads("[" * 32 + "]" * 32)
    assert parse(b"[18446744073709551615, -9223372036854775808]") == [(1 << 64) - 1, -(1 << 63)]
    assert parse(b'"\\ud83d\\ude00"') == "😀"
    assert parse(b"[" + b"[[1]]," * 1_000 + b"2]") == [[[1]]] * 1_000 + [2]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, b"raw", object(), "\ud800"])
def test_values_without_json_are_refused(value: object) -> None:
    with pytest.raises(LocalProtocolError, match="JSON"):
        dump(value)


def test_a_text_that_is_none_is_named_with_a_hint() -> None:
    with pytest.raises(LocalProtocolError, match=r"'\\udcff'") as raised:
        dump({"reason": "lost on 3 May\udcff"})
    assert raised.value.hint == "use text that UTF-8 can encode"


class OrderModel(WireModel):
    """A model to parse."""

    number: int = Field(ge=1)
    places: tuple[str, int] = ("x", 1)


def test_a_model_is_read_strictly() -> None:
    assert parse_as(OrderModel, b'{"number": 3, "places": ["y", 2]}') == OrderModel(
        number=3, places=("y", 2)
    )


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"number": "3"}', "number"),
        ('{"number": true}', "number"),
        ('{"number": 3.0}', "number"),
        ('{"number": 0}', "number"),
        ("{}", "number"),
        ('{"number": 1, "more": 2}', "more"),
        ('{"number": 1, "places": ["a"]}', "places"),
        ("[]", "the whole"),
        ("null", "the whole"),
        ('{"number": 1, "number": 1}', "twice"),
    ],
)
def test_a_wrong_field_is_named(text: str, where: str) -> None:
    with pytest.raises(RemoteProtocolError, match=where):
        parse_as(OrderModel, text.encode())


def test_an_error_does_not_repeat_the_payload() -> None:
    fields: dict[str, Any] = {"number": "secret"}
    with pytest.raises(RemoteProtocolError) as caught:
        parse_as(OrderModel, dump(fields))
    assert "secret" not in str(caught.value)
