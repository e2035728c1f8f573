"""Strict JSON: accepted values, and texts that parsers read differently."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from tests import strategies as our
from txmq.errors import LocalProtocolError, RemoteProtocolError
from txmq.wire import json as wire_json
from txmq.wire.json import WireModel, dump, parse, parse_as

PIECES = (
    b"",
    b'"',
    b'":',
    b'" ',
    b"\\",
    b"\\u",
    b"{",
    b"}",
    b"[",
    b",",
    b"-",
    b"0",
    b"9" * 19,
    b"e9",
)


@given(our.json_values)
def test_values_are_read_back(value: object) -> None:
    assert parse(dump(value)) == value


def _outcome(read: Callable[[bytes], object], text: bytes) -> str:
    """Return what a parser makes of a text; -0.0 and 0 are different."""
    try:
        return repr(read(text))
    except RemoteProtocolError as error:
        return str(error)


@given(our.json_values, st.sampled_from([{}, {"indent": 1}, {"ensure_ascii": False}]), st.data())
def test_the_fast_way_reads_what_the_strict_one_reads(
    value: object, written: dict[str, Any], data: st.DataObject
) -> None:
    text = bytearray(json.dumps(value, **written).encode())
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 2))] = data.draw(st.sampled_from(PIECES))
        text = text or bytearray(b"1")
    assert _outcome(parse, bytes(text)) == _outcome(wire_json._parse_strictly, bytes(text))


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":1,"a":2}',
        b'{"a":1,"a" :2}',
        b'{"a":1,"\\u0061":2}',
        b'{"a":1,"a":"\\":"}',
        b'[{"a":1,"a":"\\":"},{"b":"\\":"}]',
        b'{"a\\"":1,"a\\"":2}',
        b'{"a\\\\":1}',
        b'{"a":"\\":"}',
        b"-0",
        b"-0.0",
        b"1e400",
        b"-1e-400",
        b"123456789012345678901234567890e-20",
        b"18446744073709551616",
        b"[NaN]",
    ],
)
def test_doubtful_texts_are_read_strictly(text: bytes) -> None:
    assert _outcome(parse, text) == _outcome(wire_json._parse_strictly, text)


@pytest.mark.parametrize("look", [wire_json._names_in, wire_json._is_plain])
def test_a_look_at_many_objects_does_not_have_python_collect_garbage(
    look: Callable[[Any], object],
) -> None:
    """It took three times as long for 16 MiB of empty objects."""
    value: list[dict[str, int]] = [{} for _ in range(100_000)]
    collected: list[str] = []

    def count(phase: str, _info: dict[str, int]) -> None:
        collected.append(phase)

    gc.collect()  # what was made before does not count
    gc.callbacks.append(count)
    try:
        assert look(value) is not None
    finally:
        gc.callbacks.remove(count)
    assert collected == []


class Place(NamedTuple):
    """A tuple of a type of its own."""

    topic: str
    offset: int


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": (1, [None, True]), "é": "\x00\u2028"}, '{"a":[1,[null,true]],"é":"\\u0000\u2028"}'),
        (Place("t", 3), '["t",3]'),
        (HTTPStatus.OK, "200"),
        ({1: "x"}, '{"1":"x"}'),
        ("NaN", '"NaN"'),
        (1 << 70, str(1 << 70)),
    ],
)
def test_values_are_written_compactly(value: object, text: str) -> None:
    assert dump(value) == text.encode()


def test_a_value_that_contains_itself_is_refused() -> None:
    ring: list[object] = []
    ring.append(ring)
    with pytest.raises(LocalProtocolError, match="JSON"):
        dump(ring)


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
