"""Mistakes in a settings file, in the words of TOML and with the value."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from txmq.errors.validation import Mistake, did_you_mean, mistake_of, most_telling

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

SHOULD = "Input should be "  # as pydantic begins
SHOWN = 60  # characters of a value
# sections whose values may be DSNs or URLs, with a password, in whatever setting
SECRET = frozenset({"resolver", "xa", "relay"})
KINDS = {
    "string_type": "must be text in quotes",
    "path_type": "must be text in quotes",
    "float_type": "must be a number, without quotes",
    "int_type": "must be a whole number, without quotes",
    "int_from_float": "must be a whole number",
    "bool_type": "must be true or false, without quotes",
    "tuple_type": "must be a list, in brackets",
    "model_type": "must be a section",
    "string_pattern_mismatch": "must begin with txmq:// or txmqs://",
}
FLUSH = 'must be "sync" or { every_ms = 10 }'


def first_setting(error: ValidationError, model: type[BaseModel]) -> Mistake:
    """Return the first mistake in the settings of a file that `model` describes."""
    found = error.errors(include_url=False)
    first = most_telling(found)
    # blank parts are tags of types
    path = [part for part in first["loc"] if not isinstance(part, str) or part.strip()]
    where = tuple(map(str, path)) or ("cluster",)  # the one section that others must fit
    if first["type"] == "extra_forbidden":
        return Mistake(where, f"there is no such setting{_suggestion(model, path)}")
    if first["type"] == "tuple_type" and isinstance(first["input"], dict):
        name = ".".join(where)
        return Mistake(where, f"there can be several: begin each with [[{name}]], not [{name}]")
    words = _words(first["type"], first["msg"], where)
    if words is None:
        return mistake_of(first, unit="setting")._replace(where=where)
    if where[0] in SECRET:
        return Mistake(where, words)
    return Mistake(where, f"{words}, not {_as_toml(first['input'])}")


def _words(kind: str, message: str, where: Sequence[str]) -> str | None:
    """Return what a value must be; None = the mistake says all."""
    if where[-1] == "flush":
        return FLUSH
    if kind in KINDS:
        return KINDS[kind]
    if message.startswith(SHOULD):
        return f"must be {message.removeprefix(SHOULD)}"
    return None


def _as_toml(value: object) -> str:
    if isinstance(value, dict):
        return "a section"
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _suggestion(model: type[BaseModel], path: Sequence[int | str]) -> str:
    """Return what may have been meant by a setting that does not exist."""
    places = list(_settings(model.model_json_schema()))
    *section, name = [str(part) for part in path if isinstance(part, str)]
    beside = [place[-1] for place in places if place[:-1] == tuple(section)]
    if meant := did_you_mean(name, beside):
        return meant
    elsewhere = [place for place in places if place[-1] == name]
    return f": it belongs to [{'.'.join(elsewhere[0][:-1])}]" if elsewhere else ""


def _settings(schema: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all settings and sections in a schema."""
    kinds = schema.get("$defs", {})

    def walk(node: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        while "$ref" in node:
            node = kinds[node["$ref"].rpartition("/")[2]]
        for name, inner in node.get("properties", {}).items():
            yield (*path, name)
            yield from walk(inner, (*path, name))
        of_list = [node["items"]] if "items" in node else []
        for inner in (*node.get("anyOf", ()), *node.get("oneOf", ()), *of_list):
            yield from walk(inner, path)

    return walk(schema, ())
