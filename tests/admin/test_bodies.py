"""Bodies as people read them."""

from __future__ import annotations

import json

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txmq.admin.console.bodies import MAX_DECODED, MAX_SHOWN, decode

SCHEMA = json.dumps({"title": "Order", "type": "object", "required": ["id"]})
EVENT = b'{"specversion": "1.0", "type": "paid", "id": "7", "data": {"sum": 1.10}}'


@pytest.mark.parametrize(
    ("body", "content_type", "kind", "parts"),
    [
        (b"", "", "empty", [""]),
        (b'{"b": 12345678901234567890123, "a": 1.10, "b": 1e400}', "", "json",
         ['"b": 12345678901234567890123,\n  "a": 1.10,\n  "b": 1e400']),
        (b"[]", "", "json", ["[]"]),
        ('{"n": "ü<b>"}'.encode(), "application/json", "json", ['"ü<b>"']),
        (b"{oops", "application/json", "text", ["{oops"]),
        (b"plain words", "", "text", ["plain words"]),
        (b"NaN", "", "json", ["NaN"]),
        (b"\x00\x01binary", "", "hex", ["00 01 62", "..binary"]),
        (b"\xff\xfe", "application/json", "hex", ["ff fe"]),
        (msgpack.packb({"z": 2**64 - 1, "a": [b"\x01", None]}), "", "msgpack",
         ['"z": 18446744073709551615', "bytes 01", "null"]),
        (msgpack.packb("word"), "application/msgpack", "msgpack", ['"word"']),
        (b"\x81", "application/msgpack", "hex", ["81"]),
        (b"\x81 is text in latin", "", "hex", ["is text"]),
        (EVENT, "application/cloudevents+json; charset=utf-8", "cloudevent", ['"sum": 1.10']),
        (b"[" * 100_000, "", "text", ["[["]),
        (b"[" * 60 + b"0," * 60_000 + b"0" + b"]" * 60, "", "json", ["0,"]),
        (b"9" * 10_000, "", "json", ["99"]),
    ],
)  # fmt: skip
def test_a_body_is_shown_as_what_it_is(
    body: bytes, content_type: str, kind: str, parts: list[str]
) -> None:
    found = decode(body, content_type)
    assert found.kind == kind
    assert len(found.text) <= MAX_SHOWN
    for part in parts:
        assert part in found.text


def test_a_cloud_event_has_its_attributes_beside_its_data() -> None:
    found = decode(EVENT, "application/cloudevents+json")
    assert dict(found.attributes) == {"specversion": "1.0", "type": "paid", "id": "7"}
    binary = decode(b'{"sum": 1}', "application/json", "", {"ce_specversion": "1.0", "ce_id": "7"})
    assert binary.kind == "cloudevent"
    assert ("id", "7") in binary.attributes


def test_the_schema_of_the_topic_says_whether_a_body_fits() -> None:
    assert decode(b'{"id": 1}', "", SCHEMA).note == "The body fits the topic's schema Order."
    assert "id" in decode(b"{}", "", SCHEMA).note
    assert "too large" in decode(b"[" + b"1," * 40_000 + b"1]", "", SCHEMA).note


def test_of_a_large_body_the_beginning_is_shown() -> None:
    for body in (b"[" + b"1," * MAX_DECODED + b"1]", "ü".encode() * MAX_DECODED):
        found = decode(body)
        assert (found.kind, found.cut) == ("text", True)


TYPES = ("", "application/json", "application/msgpack", "application/cloudevents+json", "x/y")


@given(st.binary(max_size=64), st.sampled_from(TYPES))
def test_no_body_raises(body: bytes, content_type: str) -> None:
    assert decode(body, content_type, SCHEMA).kind
