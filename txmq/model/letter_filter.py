"""The filter language for failed messages, dead letters above all, as people type it.

    group:billing error:ValueError age>1h key:"a b" state:open attempts>3 "time-out"
    body:$.customer.id=17 header:region=eu

Terms are separated by spaces, and all of them hold. A term is a name, a sign (`:` and
`=` mean the same; `>` `>=` `<` `<=` compare) and a value, in double quotes where it has
spaces. A value alone is part of the error's type or text. `parse_filter` makes the
selection of `dlq.list` of it, `format_filter` the text of a selection.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from txmq.errors import LocalProtocolError
from txmq.model.content import body_criterion, parse_header
from txmq.model.units import SECOND

STATES = ("open", "replaying", "abandoned", "local", "retrying")
RETRIED = ("retrying", "replaying", "local")  # states of messages that have another attempt
MAX_FILTER = 4_096  # characters
UNITS = {"s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400, "w": 604_800}
EQUAL = (":", "=")
_TERM = re.compile(r"([a-z]+)(>=|<=|[:=<>])|(?=.)", re.DOTALL)
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_BARE = re.compile(r'[^\s"]+')
_SPAN = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)(s|min|m|h|d|w)")
_RANGE = re.compile(r"([0-9]{0,9})\.\.([0-9]{0,9})")
_SPACE = re.compile(r"\s*")
_PLAIN = re.compile(r'(?![a-z]+[:=<>])[^\s"\\]+')


def retried(select: Mapping[str, Any]) -> dict[str, Any]:
    """Return a selection as one of messages that are retried, unless it has states."""
    return {"states": list(RETRIED), **select}


class InvalidFilter(LocalProtocolError):
    """A filter of dead letters cannot be parsed; `position` is the place of the
    mistake, from 0.
    """

    def __init__(self, message: str, text: str, position: int, *, hint: str = "") -> None:
        super().__init__(
            f"in the filter, at {position}: {message}",
            hint=hint or "such as: error:ValueError age>1h attempts>3",
        )
        self.text, self.position = text, position


class LetterFilter(NamedTuple):
    """Filter as values: a group, None = it names none, and a selection."""

    group: str | None
    select: dict[str, Any]


class _Term(NamedTuple):
    name: str
    sign: str
    value: str
    now: int


class _Wrong(ValueError):
    """Mistake in a value, and what to write instead."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def parse_filter(text: str, now: int) -> LetterFilter:
    """Parse a filter; ages are counted from `now`, in microseconds. Raises
    InvalidFilter.
    """
    if len(text) > MAX_FILTER:
        raise InvalidFilter("it is too long", text, MAX_FILTER, hint="leave something out")
    select: dict[str, Any] = {}
    group: str | None = None
    at = _end(_SPACE, text, 0)
    while at < len(text):
        term, start, end = _term(text, at, now)
        try:
            found = FIELDS[term.name](term)
        except _Wrong as wrong:
            raise InvalidFilter(str(wrong), text, start, hint=wrong.hint) from None
        if "group" in found:
            if group is not None:
                raise InvalidFilter("group is given twice", text, at, hint="name one group")
            group = found.pop("group")
        for field in found:
            if field == "states":
                found["states"] = [*dict.fromkeys((*select.get("states", ()), *found["states"]))]
            elif field in select:
                message = f"{term.name} is given twice"
                raise InvalidFilter(message, text, at, hint="give each property once")
        select |= found
        at = _end(_SPACE, text, end)
    return LetterFilter(group, select)


def _term(text: str, at: int, now: int) -> tuple[_Term, int, int]:
    """Return the term at a place, where its value begins, and its end."""
    found = _TERM.match(text, at)
    assert found is not None, "there is something"
    name, sign = found[1] or "text", found[2] or ":"
    if name not in FIELDS:
        names = ", ".join(FIELDS)
        raise InvalidFilter(f"there is no property {name!r}", text, at, hint=f"use {names}")
    start = found.end()
    quoted = _QUOTED.match(text, start)
    if quoted is not None:
        value = re.sub(r"\\(.)", r"\1", quoted[1], flags=re.DOTALL)
        return _Term(name, sign, value, now), start, quoted.end()
    if text[start : start + 1] == '"':
        raise InvalidFilter("a quote without its end", text, start, hint='write "..."')
    bare = _BARE.match(text, start)
    if bare is None:
        raise InvalidFilter(f"{name} has no value", text, start, hint='write one, such as ""')
    return _Term(name, sign, bare[0], now), start, bare.end()


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return at if found is None else found.end()


def _only_equal(term: _Term) -> None:
    if term.sign not in EQUAL:
        raise _Wrong(f"{term.name} cannot be compared by {term.sign}", f"write {term.name}:VALUE")


def _text(field: str, longest: int) -> Callable[[_Term], dict[str, Any]]:
    def parse(term: _Term) -> dict[str, Any]:
        _only_equal(term)
        if len(term.value) > longest or (not term.value and field in ("text", "topic", "group")):
            raise _Wrong(f"{term.name} has 1 to {longest} characters", "correct the value")
        return {field: term.value}

    return parse


def _state(term: _Term) -> dict[str, Any]:
    _only_equal(term)
    found = term.value.split(",")
    if found == ["any"]:
        return {"states": list(STATES)}
    for one in found:
        if one not in STATES:
            raise _Wrong(f"{one!r} is no state", f"use {', '.join(STATES)} or any")
    return {"states": found}


def _header(term: _Term) -> dict[str, Any]:
    _only_equal(term)
    try:
        return {"header": [*parse_header(term.value)]}
    except LocalProtocolError as error:
        raise _Wrong(error.message, error.hint) from None


def _body(term: _Term) -> dict[str, Any]:
    _only_equal(term)
    try:
        body_criterion(term.value)
    except LocalProtocolError as error:
        raise _Wrong(error.message, error.hint) from None
    return {"body": term.value}


def _number(term: _Term) -> int:
    if not (term.value.isascii() and term.value.isdigit() and len(term.value) < 10):
        raise _Wrong(f"{term.value!r} is no number", f"write {term.name}>3")
    return int(term.value)


def _attempts(term: _Term) -> dict[str, Any]:
    found = _RANGE.fullmatch(term.value)
    if found is not None and term.sign in EQUAL and term.value != "..":
        ends = zip(("min_attempts", "max_attempts"), found.groups(), strict=True)
        return {name: int(end) for name, end in ends if end}
    number = _number(term)
    match term.sign:
        case ">":
            return {"min_attempts": number + 1}
        case ">=":
            return {"min_attempts": number}
        case "<" if number == 0:
            raise _Wrong("there are no fewer attempts than 0", "write attempts<=1")
        case "<":
            return {"max_attempts": number - 1}
        case "<=":
            return {"max_attempts": number}
    return {"min_attempts": number, "max_attempts": number}


def _replays(term: _Term) -> dict[str, Any]:
    number = _number(term)
    if term.sign == "<=" or (term.sign in EQUAL and number == 0):
        return {"max_replays": number}
    if term.sign == "<" and number:
        return {"max_replays": number - 1}
    raise _Wrong("letters are found by at most so many replays", "write replays<3 or replays:0")


def _age(term: _Term) -> dict[str, Any]:
    found = _SPAN.fullmatch(term.value)
    if found is None or term.sign in EQUAL:
        raise _Wrong("an age is compared with a length of time", "write age>1h, age<30min, age>7d")
    at = max(0, term.now - round(float(found[1]) * UNITS[found[2]] * SECOND))
    return {"died_before" if term.sign[0] == ">" else "died_from": at}


def _moment(field: str) -> Callable[[_Term], dict[str, Any]]:
    def parse(term: _Term) -> dict[str, Any]:
        _only_equal(term)
        try:
            at = datetime.fromisoformat(term.value)
            at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
            since = at - datetime(1970, 1, 1, tzinfo=UTC)
            micros = (since.days * 86_400 + since.seconds) * SECOND + since.microseconds
        except (ValueError, OverflowError):
            micros = -1
        if micros < 0:
            hint = f"write {term.name}:2026-11-23T09:30:00Z"
            raise _Wrong(f"{term.value!r} is no time", hint)
        return {field: micros}

    return parse


FIELDS: dict[str, Callable[[_Term], dict[str, Any]]] = {
    "group": _text("group", 256),
    "state": _state,
    "error": _text("error_type", 256),
    "fingerprint": _text("fingerprint", 256),
    "age": _age,
    "attempts": _attempts,
    "replays": _replays,
    "topic": _text("topic", 256),
    "key": _text("key", 1_024),
    "header": _header,
    "body": _body,
    "text": _text("text", 256),
    "after": _moment("died_from"),
    "before": _moment("died_before"),
}


def format_filter(select: Mapping[str, Any], group: str | None = None) -> str:
    """Return the text of a filter for a selection, and a group."""
    terms = [] if group is None else [f"group:{_written(group)}"]
    if (states := tuple(select.get("states") or ("open",))) != ("open",):
        terms.append("state:" + ("any" if set(states) == set(STATES) else ",".join(states)))
    names = {"error": "error_type", "fingerprint": "fingerprint", "topic": "topic", "key": "key"}
    terms += [
        f"{name}:{_written(str(select[field]))}"
        for name, field in names.items()
        if select.get(field) is not None
    ]
    low, high = select.get("min_attempts"), select.get("max_attempts")
    if low is not None or high is not None:
        ends = ("" if end is None else str(end) for end in (low, high))
        terms.append(f"attempts:{'..'.join(ends)}" if low != high else f"attempts:{low}")
    if select.get("max_replays") is not None:
        terms.append(f"replays<={select['max_replays']}")
    if (header := select.get("header")) is not None:
        name, value = header
        terms.append("header:" + _written(name if value is None else f"{name}={value}"))
    if select.get("body") is not None:
        terms.append(f"body:{_written(select['body'])}")
    for name, field in (("after", "died_from"), ("before", "died_before")):
        if select.get(field) is not None:
            at = datetime.fromtimestamp(select[field] // SECOND, UTC).replace(
                microsecond=select[field] % SECOND
            )
            terms.append(f"{name}:{at.isoformat().replace('+00:00', 'Z')}")
    if select.get("text") is not None:
        terms.append(f"text:{_written(select['text'])}")
    return " ".join(terms)


def _written(value: str) -> str:
    if _PLAIN.fullmatch(value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


class Unfinished(NamedTuple):
    """Word that is being typed, from `start` on: a value of `field`, None = a name."""

    start: int
    field: str | None
    begun: str


def unfinished(text: str, at: int) -> Unfinished:
    """Return what is being typed at a place. Never raises."""
    start = place = _end(_SPACE, text, 0)
    before = text[: max(0, at)][:MAX_FILTER]
    while place < len(before):
        start = place
        quoted_from = before.find('"', place)
        space = re.compile(r"\s").search(before, place)
        if quoted_from >= 0 and (space is None or quoted_from < space.start()):
            quoted = _QUOTED.match(before, quoted_from)
            place = len(before) if quoted is None else quoted.end()
            if place < len(before) and not before[place].isspace():
                continue
        else:
            place = len(before) if space is None else space.start()
        following = _end(_SPACE, before, place)
        if following > place:
            start = following
        place = following
    found = _TERM.match(before, start) if start < len(before) else None
    if found is None or found[1] not in FIELDS:
        return Unfinished(start, None, before[start:])
    return Unfinished(found.end(), found[1], before[found.end() :].removeprefix('"'))
