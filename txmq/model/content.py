r"""Contents that messages are searched for: in their bodies, and in their headers.

A criterion of bodies is a text that a body has somewhere, or a path into a JSON body
and the value there:

    o-17
    $.customer.id=17

Paths are singular queries of JSONPath (RFC 9535): names and indexes. A value is equal
to a JSON text, and to a number, true, false or null that is written so. A text that
begins with $ is written with a backslash before it, as is one that begins so itself:

    \$17.50
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from txmq.errors import InvalidPath, LocalProtocolError
from txmq.model.causation import CORRELATION

MAX_CRITERION = 1_024  # characters
MAX_JSON = 1 << 20  # bytes: parsing a larger body takes too long
_SEGMENT = re.compile(
    r"\.([^\s.\[\]=\"'$*@?,:()]+)"
    r"|\[(-?(?:0|[1-9][0-9]{0,8}))\]"
    r"""|\[(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)')\]"""
)
_ESCAPED = re.compile(r"\\+\$")
_MISSING = object()

Path = tuple[str | int, ...]
Header = tuple[str, str | None]  # name, and value; None = any


def parse_path(text: str) -> tuple[Path, str]:
    """Return the path and the value of a criterion such as `$.a[0]=x`.

    Raises InvalidPath.
    """
    path: list[str | int] = []
    at = 1
    while (found := _SEGMENT.match(text, at)) is not None:
        name, index, *quoted = found.groups()
        if index is not None:
            path.append(int(index))
        else:
            path.append(name or re.sub(r"\\(.)", r"\1", next(filter(None, quoted), "")))
        at = found.end()
    if at == len(text):
        raise InvalidPath("it has no value", text, at)
    if text[at] != "=":
        raise InvalidPath("neither a name, an index nor a value", text, at)
    return tuple(path), text[at + 1 :]


def body_criterion(text: str) -> Callable[[bytes], bool]:
    """Return a function that judges bodies. Raises LocalProtocolError."""
    if not 0 < len(text) <= MAX_CRITERION:
        hint = f"use 1 to {MAX_CRITERION} characters"
        raise LocalProtocolError(f"a criterion of {len(text)} characters", hint=hint)
    if not text.startswith("$"):
        wanted = text[_ESCAPED.match(text) is not None :].encode(errors="replace")
        return lambda body: wanted in body
    path, value = parse_path(text)
    scalar = _scalar(value)
    return lambda body: _is(_at(body, path), value, scalar)


class Content(NamedTuple):
    """The content that a sought message has, besides its key and id. `of_correlations`:
    it is one of these, or follows from them.
    """

    body: Callable[[bytes], bool] | None = None
    header: Header | None = None
    of_correlations: frozenset[str] = frozenset()

    def is_in(self, headers: Mapping[str, str], body: Callable[[], bytes]) -> bool:
        """Return whether a message has it all. The body is asked for where it is
        needed.
        """
        return (
            (self.header is None or has_header(headers, self.header))
            and (not self.of_correlations or headers.get(CORRELATION) in self.of_correlations)
            and (self.body is None or self.body(body()))
        )


def content_of(
    body: str | None, header: Header | None, correlations: tuple[str, ...] = ()
) -> Content | None:
    """Return the content that criteria ask for; None = any. Raises as
    `body_criterion`.
    """
    if body is None and header is None and not correlations:
        return None
    judge = None if body is None else body_criterion(body)
    return Content(judge, header, frozenset(correlations))


def parse_header(text: str) -> Header:
    """Return a header that is written as NAME or NAME=VALUE. Raises
    LocalProtocolError.
    """
    name, equals, value = text.partition("=")
    if not name:
        raise LocalProtocolError("a header without a name", hint="write NAME or NAME=VALUE")
    return name, value if equals else None


def has_header(headers: Mapping[str, str], wanted: Header) -> bool:
    """Return whether there is a header of the name, with the value."""
    name, value = wanted
    return name in headers and value in (None, headers[name])


def _at(body: bytes, path: Path) -> Any:  # noqa: ANN401  # what JSON has
    """Return the value at a path; `_MISSING` where there is none."""
    if len(body) > MAX_JSON:
        return _MISSING
    try:
        found = json.loads(body)  # what is no strict JSON is found, too
        for step in path:
            if _kind(found) is not type(step):
                return _MISSING
            found = found[step]
    except (ValueError, LookupError, RecursionError):
        return _MISSING
    return found


def _kind(found: object) -> type | None:
    """Return the type of the steps that lead into a JSON value."""
    return str if isinstance(found, dict) else int if isinstance(found, list) else None


def _scalar(text: str) -> Any:  # noqa: ANN401  # what JSON has
    """Return the number, true, false or null that a text is in JSON."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return _MISSING
    return _MISSING if isinstance(found, str | dict | list) else found


def _is(found: object, text: str, scalar: object) -> bool:
    """Return whether a JSON value is meant by a text; True is no number."""
    if isinstance(found, str):
        return found == text
    if isinstance(found, bool) or isinstance(scalar, bool):
        return found is scalar
    return found is not _MISSING and not isinstance(found, dict | list) and found == scalar
