"""Bodies that a topic's JSON Schema describes, as the broker and its tools check them.

What reads and writes bodies by a model checks them itself, and more strictly. This is
for those who have the schema only: edits of dead letters, dry runs of replay plans.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from jsonschema.protocols import Validator

MAX_SCHEMA = 64 << 10  # bytes of the text
MAX_DEPTH = 64
MAX_MISTAKE = 1_000  # characters
MSGPACK = "application/msgpack"
CONTENT_TYPE = "content-type"  # the header that names the format; without it a body is JSON
TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
# Keywords by what their value is.
SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
MAPPINGS = ("properties", "$defs", "definitions", "patternProperties")
NUMBERS = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
)
TEXTS = ("$ref", "format", "pattern")


def checked_schema(text: str) -> str:
    """Return a JSON Schema in its short form. Raises ValueError for what is none.

    Only the form of the usual keywords is checked, because this may run in a broker: it
    takes some milliseconds, the meta-schema takes a hundred times as long.
    """
    if len(text.encode(errors="replace")) > MAX_SCHEMA:
        raise ValueError(f"a schema may have {MAX_SCHEMA} bytes")
    try:
        tree = read_json(text)
        short = json.dumps(tree, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        short.encode()  # lone surrogates cannot be stored
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the schema is no JSON: {str(error)[:MAX_MISTAKE]}") from None
    if not isinstance(tree, dict):
        raise ValueError("a schema is an object")  # noqa: TRY004  # of the text, not of a caller
    for problem in _problems(tree, "$", 0):
        raise ValueError(problem)
    return short


def read_json(text: str | bytes) -> Any:  # noqa: ANN401  # whatever it says
    """Return the value of a JSON text. Raises ValueError.

    It is strict, as most readers are: Python's own takes NaN, infinity and UTF-16.
    """
    text = text if isinstance(text, str) else text.decode()
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _no_number(name: str) -> object:
    raise ValueError(f"{name} is no number of JSON")


def title_of(schema: str) -> str:
    """Return the title of a schema, the name of its model."""
    return str(json.loads(schema).get("title", ""))


def mistake_in(schema: str, body: bytes, content_type: str = "") -> str:
    """Return the first mistake of a body by its place; "" = it fits.

    `content_type` is the message's header of that name. References out of the schema
    are not followed, and patterns are not checked: a regular expression can take for
    ever. Never raises; a schema that cannot be used is a mistake, too.
    """
    value, mistake = _read(body, content_type)
    if mistake:
        return mistake
    try:
        validator = _validator(schema)
        found = next(validator.iter_errors(value), None)
    except Exception as error:  # noqa: BLE001  # a library's, about a schema of any kind
        return f"the schema cannot be used: {type(error).__name__}: {error}"[:MAX_MISTAKE]
    return "" if found is None else f"{found.json_path}: {found.message}"[:MAX_MISTAKE]


def format_lost(before: bytes, after: bytes, content_type: str = "") -> str:
    """Return why a body cannot be read, where the one before it was an object or an
    array; else "". A bare number or text is often no JSON on purpose.
    """
    value, _mistake = _read(before, content_type)
    return _read(after, content_type)[1] if isinstance(value, dict | list) else ""


def _read(body: bytes, content_type: str) -> tuple[Any, str]:
    """Return the value of a body, or None and why it has none."""
    try:
        return _decoded(body, content_type), ""
    except (ValueError, RecursionError) as error:
        return None, f"the body is no {_format(content_type)}: {error}"[:MAX_MISTAKE]


def _format(content_type: str) -> str:
    return "MessagePack" if content_type == MSGPACK else "JSON"


def _decoded(body: bytes, content_type: str) -> Any:  # noqa: ANN401  # whatever it says
    if content_type != MSGPACK:
        return read_json(body)
    import msgpack  # noqa: PLC0415  # for bodies of this kind

    return msgpack.unpackb(body)


@lru_cache(maxsize=64)
def _validator(schema: str) -> Validator:
    # for those who check bodies: it takes a tenth of a second
    from jsonschema import Draft202012Validator, validators  # noqa: PLC0415
    from referencing import Registry  # noqa: PLC0415

    left_out = dict.fromkeys(("pattern", "patternProperties"), _accept)
    base = Draft202012Validator.VALIDATORS["additionalProperties"]

    def others(validator: Any, rule: Any, value: Any, node: Mapping[str, Any]) -> Any:  # noqa: ANN401  # as the library has it
        return () if "patternProperties" in node else base(validator, rule, value, node)

    rules: Any = left_out | {"additionalProperties": others}
    kind: Any = validators.extend(Draft202012Validator, rules)  # type: ignore[no-untyped-call]  # as it is
    # an empty registry: the library's own would fetch what a reference names
    validator: Validator = kind(json.loads(schema), registry=Registry())
    return validator


def _accept(*_arguments: object) -> tuple[()]:
    return ()


def _problems(node: object, path: str, depth: int) -> Iterator[str]:
    """Yield what is wrong in the form of a schema."""
    if depth > MAX_DEPTH:
        yield f"{path[:MAX_MISTAKE]}: nested more than {MAX_DEPTH} deep"
    elif isinstance(node, dict):
        yield from _wrong_values(node, path)
        for name, part in _parts(node):
            yield from _problems(part, f"{path}.{name}", depth + 1)
    elif not isinstance(node, bool):
        yield f"{path}: a schema is an object, true or false"


def _parts(node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas in a schema, with their names."""
    yield from ((name, node[name]) for name in SCHEMAS if name in node)
    for name in LISTS:
        if isinstance(node.get(name), list):
            yield from ((f"{name}[{place}]", part) for place, part in enumerate(node[name]))
    for name in MAPPINGS:
        if isinstance(node.get(name), dict):
            yield from ((f"{name}.{key}", part) for key, part in node[name].items())


def _wrong_values(node: Mapping[str, Any], path: str) -> Iterator[str]:
    kinds = node.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if not isinstance(kind, str) or kind not in TYPES:
            yield f"{path}.type: {json.dumps(kind)[:80]} is none of {', '.join(sorted(TYPES))}"
    required = node.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        yield f"{path}.required: names in a list are expected"
    for names, kind, told in (
        ((*LISTS, "enum"), list, "a list"),
        (MAPPINGS, dict, "an object"),
        (TEXTS, str, "a text"),
    ):
        for name in names:
            if name in node and not isinstance(node[name], kind):
                yield f"{path}.{name}: {told} is expected"
    for name in NUMBERS:
        if name in node and type(node[name]) not in (int, float):
            yield f"{path}.{name}: a number is expected"
