"""Changes of a JSON Schema: those that break the readers of what is written.

Whatever a writer writes has to fit the schema of its reader. `backward`: the new schema
reads what the old one wrote. `forward`: the old schema reads what the new one writes.
Only a subset of JSON Schema is judged, which is what pydantic writes for models: see
`JUDGED`. Anything else raises CannotJudge, instead of a guess.

A writer writes the properties that its schema names, and others only where
`additionalProperties` says so. So an optional property may be added, although by JSON
Schema alone an old body could have had anything under its name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias

Compatibility: TypeAlias = Literal["backward", "forward", "none"]
Node: TypeAlias = Mapping[str, Any]

MAX_STEPS = 5_000  # schemas that are looked at: some ten milliseconds
MAX_BREAKS = 20
MAX_TEXT = 80  # characters of a value that an error repeats
ANNOTATIONS = frozenset(
    (
        *("$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated"),
        *("description", "discriminator", "example", "examples", "readOnly", "title"),
        "writeOnly",
    )
)
CHOICES = ("anyOf", "oneOf")
# Keywords with a limit; those that admit more where it is larger, and the others.
LARGER = ("maxLength", "maximum", "exclusiveMaximum", "maxItems", "maxProperties")
COUNTS = ("minLength", "minItems", "minProperties")  # 0 is no limit
SMALLER = (*COUNTS, "minimum", "exclusiveMinimum")
EXACT = ("format", "pattern", "multipleOf", "uniqueItems")
OF_TYPE = {
    "array": {"items", "prefixItems", "maxItems", "minItems", "uniqueItems"},
    "object": {
        *("properties", "required", "additionalProperties", "maxProperties", "minProperties"),
    },
    "string": {"maxLength", "minLength", "format", "pattern"},
    "number": {"maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum", "multipleOf"},
}
OF_TYPE["integer"] = OF_TYPE["number"]
OF_ANY_TYPE = {"type", "enum", "const"}
JUDGED = frozenset(
    OF_ANY_TYPE.union(*OF_TYPE.values(), CHOICES, ("$ref", "allOf", "discriminator"))
)
TYPE_NAMES = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


class CannotJudge(Exception):
    """A schema uses what is outside of the judged subset, at `path`."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}")


def breaks(old: str, new: str, rule: Compatibility) -> list[str]:
    """Return what a change of the schema breaks under a rule, at most `MAX_BREAKS`
    lines. Raises CannotJudge.
    """
    if rule == "none":
        return []
    before, after = json.loads(old), json.loads(new)
    judge = _Judge(before, after) if rule == "backward" else _Judge(after, before)
    try:
        return judge.breaks()
    except RecursionError:
        raise CannotJudge("$", "the schema is nested too deeply") from None


class _Judge:
    """The comparison of a writer's schema with that of its reader."""

    def __init__(self, writer: object, reader: object) -> None:
        self._writer, self._reader = writer, reader
        self._steps = 0
        # Pairs of schemas by identity, all parts of the two: compared, or on the way,
        # as a schema that contains itself.
        self._compared: set[tuple[int, int]] = set()

    def breaks(self) -> list[str]:
        """Return where the reader meets what does not fit."""
        found = []
        for line in self._fit(self._writer, self._reader, "$"):
            found.append(line)
            if len(found) == MAX_BREAKS:
                break
        return found

    def _fit(self, writer: object, reader: object, path: str) -> Iterator[str]:
        pair = (id(writer), id(reader))
        if pair in self._compared:
            return
        self._compared.add(pair)
        choices = list(self._alternatives(reader, self._reader, path, reading=True))
        for written in self._alternatives(writer, self._writer, path):
            yield from self._fit_choices(written, choices, path)

    def _alternatives(
        self, node: object, root: object, path: str, *, reading: bool = False
    ) -> Iterator[Node]:
        """Yield the schemas without alternatives that a schema consists of.

        That of everything is {}. A writer's values are alternatives, too: each is a
        const.
        """
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise CannotJudge(path, "the schemas are too large to be compared")
        found = _resolve(node, root, path)
        if found is None:
            return
        name = next((name for name in CHOICES if name in found), None)
        kinds = found.get("type")
        if name is not None:
            if others := found.keys() - {name, "discriminator"}:
                raise CannotJudge(path, f"{min(others)!r} beside {name!r}")
            if reading and name == "oneOf" and "discriminator" not in found:
                raise CannotJudge(path, "'oneOf' without a discriminator")
            for choice in found[name]:
                yield from self._alternatives(choice, root, path, reading=reading)
        elif not reading and (values := _values(found)) is not None:
            yield from ({"const": value} for value in values)
        elif isinstance(kinds, list):
            yield from (_of_type(found, kind) for kind in kinds)
        else:
            yield found

    def _fit_choices(self, written: Node, choices: list[Node], path: str) -> Iterator[str]:
        """Compare what is written with the alternatives of the reader."""
        possible = [choice for choice in choices if _same_type(written, choice)]
        if len(possible) == 1:
            yield from self._fit_one(written, possible[0], path)
            return
        if not possible:
            told = " or ".join(dict.fromkeys(map(_name, choices))) or "nothing"
            yield f"{path}: {told} is accepted, not {_name(written)}"
            return
        attempts = []
        for choice in possible:
            compared = set(self._compared)
            attempts.append(list(self._fit_one(written, choice, path)))
            if not attempts[-1]:
                return
            self._compared = compared
        yield from min(attempts, key=len)

    def _fit_one(self, written: Node, wanted: Node, path: str) -> Iterator[str]:
        """Compare schemas without alternatives."""
        if "const" in written:
            if not _takes(wanted, written["const"], path):
                yield f"{path}: {_json(written['const'])} is not accepted"
            return
        if _values(wanted) is not None:
            yield f"{path}: only {_name(wanted)} is accepted, not any {_name(written)}"
            return
        yield from _fit_limits(written, wanted, path)
        if written.get("type") in {None, "object"}:
            yield from self._fit_objects(written, wanted, path)
        if written.get("type") in {None, "array"}:
            yield from self._fit_arrays(written, wanted, path)

    def _fit_objects(self, written: Node, wanted: Node, path: str) -> Iterator[str]:
        given, named = written.get("properties", {}), wanted.get("properties", {})
        # An object whose properties are left open may have any.
        others = written.get("additionalProperties", "properties" not in written)
        rest = wanted.get("additionalProperties", True)
        for name in wanted.get("required", ()):
            if name not in written.get("required", ()):
                yield f"{path}.{name}: is required, and may be missing"
        for name, schema in given.items():
            if name not in named and rest is False:
                yield f"{path}.{name}: is not accepted"
            else:
                yield from self._fit(schema, named.get(name, rest), f"{path}.{name}")
        if others is False:
            return
        for name, schema in named.items():
            if name not in given:
                yield from self._fit(others, schema, f"{path}.{name}")
        yield from self._fit(others, rest, f"{path}.*")

    def _fit_arrays(self, written: Node, wanted: Node, path: str) -> Iterator[str]:
        own, asked = written.get("prefixItems", []), wanted.get("prefixItems", [])
        rest, accepted = written.get("items", True), wanted.get("items", True)
        most = written.get("maxItems")
        places = max(len(own), len(asked))
        for place in range(places if most is None else int(min(places, most))):
            one = own[place] if place < len(own) else rest
            other = asked[place] if place < len(asked) else accepted
            yield from self._fit(one, other, f"{path}[{place}]")
        if most is None or most > places:
            yield from self._fit(rest, accepted, f"{path}[]")


def _resolve(node: object, root: object, path: str) -> Node | None:
    """Return a schema behind its references, without annotations; None = nothing
    fits.
    """
    for _reference in range(MAX_BREAKS):
        if isinstance(node, bool):
            return {} if node else None
        if not isinstance(node, dict):
            raise CannotJudge(path, f"{_json(node)} is no schema")
        plain = {name: value for name, value in node.items() if name not in ANNOTATIONS}
        if strange := plain.keys() - JUDGED:
            raise CannotJudge(path, f"keyword {min(strange)!r}")
        if "$ref" in plain:
            node = _referred(root, plain["$ref"], path)
        elif len(plain.get("allOf", ())) == 1:
            [node] = plain["allOf"]
        elif "allOf" in plain:
            raise CannotJudge(path, "'allOf' of several schemas")
        else:
            return plain | {name: node[name] for name in ("discriminator",) if name in node}
        if others := plain.keys() - {"$ref", "allOf"}:
            raise CannotJudge(path, f"{min(others)!r} beside a reference")
    raise CannotJudge(path, "a chain of references")


def _referred(root: object, reference: str, path: str) -> object:
    """Return the part of a schema that a reference names."""
    if reference != "#" and not reference.startswith("#/"):
        raise CannotJudge(path, f"the reference {reference[:MAX_TEXT]!r} out of the schema")
    node: Any = root
    for name in reference.split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(node, dict) or key not in node:
            raise CannotJudge(path, f"the reference {reference[:MAX_TEXT]!r} to nothing")
        node = node[key]
    return node


def _fit_limits(written: Node, wanted: Node, path: str) -> Iterator[str]:
    for name in (*LARGER, *SMALLER):
        limit, own = wanted.get(name), written.get(name)
        if limit is None or (limit == 0 and name in COUNTS):
            continue
        if own is None or (own > limit if name in LARGER else own < limit):
            yield f"{path}: {name} is {limit}, not {'free' if own is None else own}"
    for name in EXACT:
        asked, own = wanted.get(name), written.get(name)
        if asked in (None, False) or asked == own:
            continue
        if own is not None and name != "format":
            raise CannotJudge(path, f"two different values of {name!r}")
        yield f"{path}: {name} is {_json(asked)}, not {'free' if own is None else _json(own)}"


def _takes(wanted: Node, value: object, path: str) -> bool:
    """Return whether a single value of the right type is accepted."""
    if (accepted := _values(wanted)) is not None:
        return _json(value) in map(_json, accepted)
    if limits := wanted.keys() & OF_TYPE.get(_type_of(value), set()):
        raise CannotJudge(path, f"{_json(value)} under {min(limits)!r}")
    return True


def _values(node: Node) -> list[Any] | None:
    """Return the only values that fit; None where others may."""
    return [node["const"]] if "const" in node else node.get("enum")


def _of_type(node: Node, kind: str) -> Node:
    """Return the part of a schema that concerns one of its types."""
    names = OF_ANY_TYPE | OF_TYPE.get(kind, set())
    return {name: value for name, value in node.items() if name in names} | {"type": kind}


def _same_type(written: Node, wanted: Node) -> bool:
    kind = _type_of(written["const"]) if "const" in written else written.get("type")
    accepted = {wanted["type"]} if "type" in wanted else set(map(_type_of, _values(wanted) or ()))
    return not accepted or kind in accepted or (kind == "integer" and "number" in accepted)


def _type_of(value: object) -> str:
    if isinstance(value, float) and value.is_integer():
        return "integer"
    return TYPE_NAMES[type(value)]


def _name(node: Node) -> str:
    if "const" in node:
        return _json(node["const"])
    return _json(node["enum"]) if "enum" in node else str(node.get("type", "anything"))


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True)[:MAX_TEXT]
