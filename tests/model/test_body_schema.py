"""Bodies against the JSON Schema of their topic, as the broker sees them."""

from __future__ import annotations

import json

import msgpack
import pytest
from pydantic import BaseModel

from txmq.model.schemas.bodies import (
    MAX_SCHEMA,
    MSGPACK,
    checked_schema,
    format_lost,
    mistake_in,
)


class Line(BaseModel):
    """A part of a body."""

    sku: str


class Order(BaseModel):
    """A body."""

    id: int
    lines: list[Line]


SCHEMA = json.dumps(Order.model_json_schema())


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"id": 1, "lines": []}', ""),
        (b'{"id": "x", "lines": []}', "$.id: 'x' is not of type 'integer'"),
        (b'{"id": 1, "lines": [{}]}', "$.lines[0]: 'sku' is a required property"),
        (b"hello", "the body is no JSON"),
        (b"\xff", "the body is no JSON"),
        (b"[" * 100_000, "the body is no JSON"),
        (b'{"id": NaN, "lines": []}', "the body is no JSON: NaN is no number of JSON"),
        (b'{"id": -Infinity, "lines": []}', "the body is no JSON: -Infinity is no number"),
        ('{"id": 1, "lines": []}'.encode("utf-16"), "the body is no JSON"),
    ],
)
def test_a_mistake_is_named_by_its_place(body: bytes, told: str) -> None:
    found = mistake_in(SCHEMA, body)
    assert found.startswith(told) if told else found == ""


def test_a_body_that_only_python_reads_has_lost_its_format() -> None:
    assert format_lost(b'{"a": 1}', b'{"a": NaN}').startswith("the body is no JSON: NaN")
    assert format_lost(b'{"a": NaN}', b'{"a": Infinity}') == ""  # as it was before


def test_a_body_in_messagepack_is_read_as_its_header_says() -> None:
    body = msgpack.packb({"id": 1, "lines": []})
    assert mistake_in(SCHEMA, body, MSGPACK) == ""
    assert mistake_in(SCHEMA, b"\xc1", MSGPACK).startswith("the body is no MessagePack")
    assert mistake_in(SCHEMA, body).startswith("the body is no JSON")


def test_a_hostile_schema_fetches_nothing_and_ends() -> None:
    assert "Unresolvable" in mistake_in('{"$ref": "http://127.0.0.1:1/x"}', b"1")
    assert "RecursionError" in mistake_in('{"$ref": "#"}', b"1")
    slow = '{"pattern": "(a+)+$", "patternProperties": {"(a+)+$": {}}, "additionalProperties": {}}'
    assert mistake_in(slow, json.dumps("a" * 64 + "b").encode()) == ""
    assert mistake_in(slow, json.dumps({"a" * 64 + "b": 1}).encode()) == ""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "a schema is an object"),
        ("{", "is no JSON"),
        ('{"default": NaN}', "NaN is no number"),
        ('{"minimum": 1e999}', "is no JSON"),
        ('{"title": "\\ud800"}', "is no JSON"),
        ('{"type": "text"}', r'\$.type: "text" is none of'),
        ('{"properties": {"a": 5}}', r"\$.properties.a: a schema is an object"),
        ('{"items": {"required": "a"}}', r"\$.items.required: names"),
        ('{"anyOf": {}}', r"\$.anyOf: a list"),
        ('{"not":' * 70 + "{}" + "}" * 70, "nested more than 64 deep"),
        (json.dumps({"title": "x" * MAX_SCHEMA}), "may have 65536 bytes"),
    ],
)
def test_what_is_no_schema_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        checked_schema(text)
