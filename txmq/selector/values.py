"""Values of selectors, compared in three-valued logic; None = unknown.

A header is text. Beside a text it is compared as text, by code points; beside a number
as a number, if it is one; beside TRUE and FALSE as one of them. A comparison that is
not possible is unknown, as is everything about a missing header.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from operator import eq, ge, gt, le, lt, ne
from typing import Any

Number = int | float
Value = str | int | float | bool | None
Headers = Mapping[str, str | None]
Operand = Callable[[Headers], Value]
Condition = Callable[[Headers], bool | None]

COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": eq, "<>": ne, "!=": ne, "<": lt, "<=": le, ">": gt, ">=": ge,
}  # fmt: skip
ORDERED = frozenset({"<", "<=", ">", ">="})
TRUTHS = {"true": True, "false": False}
LONGEST_NUMBER = 64

# SQL-92's exact and approximate numbers, without a sign
NUMBER = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?"
_NUMBER = re.compile(rf"[+-]?{NUMBER}")


def parse_number(text: str) -> Number | None:
    """Parse a text as a number; None where it is not one."""
    if len(text) > LONGEST_NUMBER or not _NUMBER.fullmatch(text):
        return None
    if text.lstrip("+-").isdigit():
        return int(text)
    found = float(text)
    return found if math.isfinite(found) else None


def compare(sign: str, left: Value, right: Value) -> bool | None:
    """Compare two values; None = unknown."""
    if left is None or right is None:
        return None
    if isinstance(left, str) and not isinstance(right, str):
        left = _like(left, right)
    elif isinstance(right, str) and not isinstance(left, str):
        right = _like(right, left)
    if left is None or right is None or isinstance(left, bool) is not isinstance(right, bool):
        return None
    if isinstance(left, bool) and sign in ORDERED:
        return None
    return COMPARISONS[sign](left, right)


def _like(text: str, other: Value) -> Value:
    """Convert a header's text to the type of the value beside it."""
    return TRUTHS.get(text.lower()) if isinstance(other, bool) else parse_number(text)


def logical_and(left: bool | None, right: bool | None) -> bool | None:  # noqa: FBT001  # truth values
    """Return `left` AND `right`."""
    if left is False or right is False:
        return False
    return None if left is None or right is None else True


def logical_or(left: bool | None, right: bool | None) -> bool | None:  # noqa: FBT001  # truth values
    """Return `left` OR `right`."""
    if left is True or right is True:
        return True
    return None if left is None or right is None else False


def logical_not(value: bool | None) -> bool | None:  # noqa: FBT001  # a truth value
    """Return NOT `value`."""
    return None if value is None else not value


def is_in(value: Value, values: tuple[Value, ...]) -> bool | None:
    """Return `value` IN `values`."""
    found: bool | None = False
    for other in values:
        found = logical_or(found, compare("=", value, other))
        if found:
            return True
    return found


class LikePattern:
    """The pattern of a LIKE: % stands for any text, _ for any character.

    A match takes at most (length of the text) x (length of the pattern) steps.
    """

    def __init__(self, pattern: str, escape: str = "") -> None:
        """Raises ValueError for an escape character before an ordinary one."""
        self._parts: list[str | None] = []  # a character; "" = any one; None = any number of them
        characters = iter(pattern)
        for character in characters:
            if escape and character == escape:
                literal = next(characters, "")
                if literal not in ("%", "_", escape) or not literal:
                    raise ValueError(f"{escape!r} stands before neither % nor _ nor itself")
                self._parts.append(literal)
            elif character != "%":
                self._parts.append("" if character == "_" else character)
            elif not self._parts or self._parts[-1] is not None:
                self._parts.append(None)

    def matches(self, text: str) -> bool:
        """Return whether the whole text matches."""
        parts, end = self._parts, len(self._parts)
        at = part = 0
        retry_part, retry_at = -1, 0  # behind the last %, and how far that one has taken
        while at < len(text):
            if part < end and parts[part] is None:
                retry_part, retry_at = part + 1, at
                part += 1
            elif part < end and parts[part] in ("", text[at]):
                part, at = part + 1, at + 1
            elif retry_part >= 0:
                retry_at += 1
                part, at = retry_part, retry_at
            else:
                return False
        return all(rest is None for rest in parts[part:])
