"""The lexer of selectors."""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from txmq.errors import InvalidSelector
from txmq.selector.values import NUMBER

MAX_LENGTH = 4_096  # characters of a selector
MAX_TOKENS = 1_024
KEYWORDS = frozenset(
    {"AND", "OR", "NOT", "BETWEEN", "IN", "LIKE", "ESCAPE", "IS", "NULL", "TRUE", "FALSE"}
)

_WORD = re.compile(
    rf"""\s*(?:
        (?P<number>{NUMBER}(?![A-Za-z0-9_.$]))
      | (?P<name>[A-Za-z_$][A-Za-z0-9_.$]*)
      | "(?P<quoted>(?:[^"]|"")+)"
      | '(?P<text>(?:[^']|'')*)'
      | (?P<sign><=|>=|<>|!=|[=<>(),+-])
    )""",
    re.VERBOSE,
)


class TokenKind(Enum):
    """The kinds of tokens."""

    NUMBER = "number"
    NAME = "name"
    TEXT = "text"
    SIGN = "sign"
    KEYWORD = "keyword"
    END = "end"


class Token(NamedTuple):
    """A token and its position.

    Keywords are in capitals; names and texts are without their quotes.
    """

    kind: TokenKind
    text: str
    position: int


def tokenize(selector: str) -> list[Token]:
    """Return the tokens of a selector, with END as the last. Raises InvalidSelector."""
    if len(selector) > MAX_LENGTH:
        raise InvalidSelector(
            f"{len(selector)} characters are too long", MAX_LENGTH, hint=f"use at most {MAX_LENGTH}"
        )
    found: list[Token] = []
    at, end = 0, len(selector.rstrip())
    while at < end:
        match = _WORD.match(selector, at)
        if match is None:
            start = at + len(selector[at:]) - len(selector[at:].lstrip())
            raise InvalidSelector(
                f"unexpected {selector[start : start + 20]!r}",
                start,
                hint=_hint(selector[start]),
            )
        found.append(_token(match))
        at = match.end()
        if len(found) > MAX_TOKENS:
            raise InvalidSelector(
                f"more than {MAX_TOKENS} words", at, hint="use a shorter condition"
            )
    return [*found, Token(TokenKind.END, "", end)]


def _token(match: re.Match[str]) -> Token:
    kind = match.lastgroup or ""
    text, position = match[kind], match.start(kind)
    if kind == "name" and text.upper() in KEYWORDS:
        return Token(TokenKind.KEYWORD, text.upper(), position)
    if kind == "quoted":
        return Token(TokenKind.NAME, text.replace('""', '"'), position - 1)
    if kind == "text":
        return Token(TokenKind.TEXT, text.replace("''", "'"), position - 1)
    return Token(TokenKind(kind), text, position)


def _hint(character: str) -> str:
    if character in "'\"":
        return "close the quote"
    return 'put texts in single quotes, and names with unusual characters in double ones: "x-vip"'
