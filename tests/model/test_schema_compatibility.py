"""Changes of JSON Schemas, as pydantic writes them for models."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from datetime import datetime
from itertools import pairwise, product
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, create_model

from txmq.model.schemas.bodies import checked_schema
from txmq.model.schemas.compatibility import JUDGED, CannotJudge, breaks


class Cat(BaseModel):
    """One of two kinds."""

    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    """The other kind."""

    kind: Literal["dog"]
    name: str


class LoudDog(Dog):
    """A kind with a further field."""

    volume: int


class Tree(BaseModel):
    """A model that contains itself."""

    value: int
    children: list[Tree] = []


class WiderTree(BaseModel):
    """A model that contains itself, and takes more."""

    value: int | str
    children: list[WiderTree] = []


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]
Any_ = Any
# old type, new type (None = no such field), what breaks backward and forward
ROWS: list[tuple[Any, Any, str, str]] = [
    (int, int, "", ""),
    (int, float, "", "$.x: integer is accepted, not number"),
    (int, int | str, "", "$.x: integer is accepted, not string"),
    (int, int | None, "", "$.x: integer is accepted, not null"),
    (int, Any_, "", "$.x: integer is accepted, not anything"),
    (None, (int, 1), "", ""),
    (None, int, "$.x: is required, and may be missing", ""),
    ((int, 1), int, "$.x: is required, and may be missing", ""),
    (Literal["a"], Literal["a", "b"], "", '$.x: "b" is not accepted'),
    (Literal["a"], str, "", '$.x: only "a" is accepted, not any string'),
    (Literal[1], Literal[True], "$.x: true is accepted, not 1", "$.x: 1 is accepted, not true"),
    (str, datetime, '$.x: format is "date-time", not free', ""),
    (list[int], list[float], "", "$.x[]: integer is accepted, not number"),
    (tuple[int, str], tuple[int, int], "$.x[1]: integer is accepted, not string",
     "$.x[1]: string is accepted, not integer"),
    (dict[str, int], dict[str, float], "", "$.x.*: integer is accepted, not number"),
    (Cat, Pet, "", "$.x.lives: is required, and may be missing"),
    (Annotated[Dog, Field()], LoudDog, "$.x.volume: is required, and may be missing", ""),
    (Annotated[int, Field(ge=0)], Annotated[int, Field(ge=5)], "$.x: minimum is 5, not 0", ""),
    (str, Annotated[str, Field(max_length=9)], "$.x: maxLength is 9, not free", ""),
    (Tree, WiderTree, "", "$.x.value: integer is accepted, not string"),
]  # fmt: skip


def schema(kind: Any, **options: Any) -> str:
    fields: dict[str, Any] = {} if kind is None else {"x": kind}
    config = ConfigDict(**options)  # type: ignore[typeddict-item]  # options of a test
    return json.dumps(create_model("M", __config__=config, **fields).model_json_schema())


@pytest.mark.parametrize(("old", "new", "backward", "forward"), ROWS)
def test_a_change_breaks_what_its_row_says(old: Any, new: Any, backward: str, forward: str) -> None:
    before, after = schema(old), schema(new)
    for rule, told in (("backward", backward), ("forward", forward)):
        found = "; ".join(breaks(before, after, rule))  # type: ignore[arg-type]  # rules
        assert found.startswith(told) if told else not found, (rule, found)
    assert breaks(before, after, "none") == []


def test_a_model_that_forbids_others_does_not_read_a_new_field() -> None:
    old, new = (
        schema(int, extra="forbid"),
        json.dumps(create_model("M", x=int, y=(int, 1)).model_json_schema()),
    )
    assert breaks(old, new, "backward") == []
    assert breaks(old, new, "forward") == ["$.y: is not accepted"]


@pytest.mark.parametrize(
    ("node", "why"),
    [
        ({"not": {"type": "string"}}, "keyword 'not'"),
        ({"$ref": "http://elsewhere/x"}, "out of the schema"),
        ({"$ref": "#/$defs/none"}, "to nothing"),
        ({"$ref": "#"}, "a chain of references"),
        ({"oneOf": [{"type": "string"}, {"maxLength": 3}]}, "without a discriminator"),
        ({"type": "object", "anyOf": [{}]}, "beside 'anyOf'"),
    ],
)
def test_what_cannot_be_judged_is_said(node: dict[str, Any], why: str) -> None:
    with pytest.raises(CannotJudge, match=why):
        breaks(json.dumps({"type": "string"}), json.dumps(node), "backward")


def test_a_schema_that_multiplies_is_not_followed() -> None:
    names = [f"A{number}" for number in range(40)]
    twice = {
        name: {"anyOf": [{"$ref": f"#/$defs/{following}"}] * 2}
        for name, following in pairwise(names)
    }
    text = json.dumps({"$defs": twice | {names[-1]: {"type": "string"}}, "$ref": "#/$defs/A0"})
    with pytest.raises(CannotJudge, match="too large"):
        breaks(text, text, "backward")


def test_any_schema_that_is_stored_is_judged_or_refused() -> None:
    seeds = random.Random(7)
    parts = [{"properties": {"a": _any_schema(seeds, 3)}} for _ in range(60)]
    stored = [checked_schema(json.dumps(part)) for part in parts]
    for old, new in product(stored, repeat=2):
        with suppress(CannotJudge):
            assert isinstance(breaks(old, new, "backward"), list)


def _any_schema(seeds: random.Random, depth: int) -> Any:
    """Return a schema of a valid form, and no sense."""
    if not depth or seeds.random() < 0.2:
        return seeds.choice([True, False, {}, {"type": "string"}, {"$ref": "#"}, {"const": 1.0}])
    schema: dict[str, Any] = {}
    for name in seeds.sample(sorted(JUDGED | {"not", "x"}), 4):
        parts = [_any_schema(seeds, depth - 1) for _ in range(2)]
        number = seeds.choice([-1, 0, 2, 2.5])
        schema[name] = {
            "type": seeds.choice(["object", "array", ["null", "integer"], []]),
            "enum": [1, None, "a"],
            "required": ["a"],
            "properties": dict(zip("ab", parts, strict=True)),
            **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), parts),
            **dict.fromkeys(("items", "additionalProperties", "not"), parts[0]),
            **dict.fromkeys(("format", "pattern"), "date"),
            "$ref": seeds.choice(["#", "#/properties/a", "#/items", "x"]),
            "uniqueItems": True,
            "discriminator": {},
        }.get(name, number)
    return schema
