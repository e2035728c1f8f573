"""The words of a selector."""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from txmq.errors import InvalidSelector

LONGEST = 4_096  # characters of a selector
MOST_WORDS = 1_024
KEYWORDS = frozenset(
    {"AND", "OR", "NOT", "BETWEEN", "IN", "LIKE", "ESCAPE", "IS", "NULL", "TRUE", "FALSE"}
)

_WORD = re.compile(
    r"""\s*(?:
        (?P<number>[0-9]+(?:\.[0-9]+)?(?![A-Za-z0-9_.$]))
      | (?P<name>[A-Za-z_$][A-Za-z0-9_.$]*)
      | "(?P<quoted>(?:[^"]|"")+)"
      | '(?P<text>(?:[^']|'')*)'
      | (?P<sign><=|>=|<>|!=|[=<>(),+-])
    )""",
    re.VERBOSE,
)


class Kind(Enum):
    """What a word is."""

    NUMBER = "number"
    NAME = "name"
    TEXT = "text"
    SIGN = "sign"
    KEYWORD = "keyword"
    END = "end"


class Word(NamedTuple):
    """A word, and where it begins. Keywords are in capitals; names and texts are
    without their quotes.
    """

    kind: Kind
    text: str
    position: int


def words(selector: str) -> list[Word]:
    """The words of a selector, the end among them. Raises InvalidSelector."""
    if len(selector) > LONGEST:
        raise InvalidSelector(
            f"a selector of {len(selector)} characters", LONGEST, hint=f"at most {LONGEST}"
        )
    found: list[Word] = []
    at, end = 0, len(selector.rstrip())
    while at < end:
        match = _WORD.match(selector, at)
        if match is None:
            start = at + len(selector[at:]) - len(selector[at:].lstrip())
            raise InvalidSelector(
                f"{selector[start : start + 20]!r} cannot stand here",
                start,
                hint=_hint(selector[start]),
            )
        found.append(_word(match))
        at = match.end()
        if len(found) > MOST_WORDS:
            raise InvalidSelector(
                f"more than {MOST_WORDS} words", at, hint="a selector is a short condition"
            )
    return [*found, Word(Kind.END, "", end)]


def _word(match: re.Match[str]) -> Word:
    kind = match.lastgroup or ""
    text, position = match[kind], match.start(kind)
    if kind == "name" and text.upper() in KEYWORDS:
        return Word(Kind.KEYWORD, text.upper(), position)
    if kind == "quoted":
        return Word(Kind.NAME, text.replace('""', '"'), position - 1)
    if kind == "text":
        return Word(Kind.TEXT, text.replace("''", "'"), position - 1)
    return Word(Kind(kind), text, position)


def _hint(character: str) -> str:
    if character in "'\"":
        return "a quote is not closed"
    return 'texts stand in single quotes, names with unusual characters in double ones: "x-vip"'
