"""The parser of selectors, by recursive descent.

either    = both { OR both }
both      = negation { AND negation }
negation  = NOT negation | predicate
predicate = "(" either ")"
          | value comparison value
          | value [NOT] BETWEEN value AND value
          | value [NOT] IN "(" value { "," value } ")"
          | value [NOT] LIKE text [ESCAPE text]
          | value IS [NOT] NULL
value     = text | [+|-] number | TRUE | FALSE | name of a header | $key | $tag | $topic
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from txmq.errors import InvalidSelector
from txmq.selector.lexer import Token, TokenKind, tokenize
from txmq.selector.values import (
    COMPARISONS,
    Condition,
    Headers,
    LikePattern,
    Operand,
    Value,
    compare,
    is_in,
    logical_and,
    logical_not,
    logical_or,
    parse_number,
)

MAX_DEPTH = 32
MAX_IN_VALUES = 256
OWN = ("$key", "$tag", "$topic")  # fields of a message that are not headers


@dataclass(frozen=True, slots=True)
class Selector:
    """A compiled condition; `text` is its source."""

    text: str
    condition: Condition

    def matches(
        self, headers: Mapping[str, str], *, key: str | None, tag: str | None, topic: str
    ) -> bool:
        """Return whether the condition is true for a message, not false or unknown."""
        return self.condition({**headers, "$key": key, "$tag": tag, "$topic": topic}) is True


def parse(text: str) -> Selector:
    """Compile a selector. Raises InvalidSelector with the position of the mistake."""
    parser = _Parser(tokenize(text))
    condition = parser.either(0)
    parser.expect_end()
    return Selector(text, condition)


class _Parser:
    def __init__(self, found: list[Token]) -> None:
        self._tokens = found
        self._at = 0

    def either(self, depth: int) -> Condition:
        if depth > MAX_DEPTH:
            raise self._unexpected(f"nest at most {MAX_DEPTH} brackets and NOTs")
        return self._joined(
            "OR", logical_or, partial(self._joined, "AND", logical_and, self._negation), depth
        )

    def _joined(
        self,
        keyword: str,
        join: Callable[[bool | None, bool | None], bool | None],
        part: Callable[[int], Condition],
        depth: int,
    ) -> Condition:
        conditions = [part(depth)]
        while self._accept(keyword):
            conditions.append(part(depth))
        return conditions[0] if len(conditions) == 1 else _folded(join, tuple(conditions))

    def _negation(self, depth: int) -> Condition:
        if depth > MAX_DEPTH:
            raise self._unexpected(f"nest at most {MAX_DEPTH} brackets and NOTs")
        if self._accept("NOT"):
            inner = self._negation(depth + 1)
            return lambda headers: logical_not(inner(headers))
        if self._accept("("):
            inside = self.either(depth + 1)
            self._expect(")")
            return inside
        return self._predicate()

    def _predicate(self) -> Condition:
        left = self._operand()
        word = self._tokens[self._at]
        if word.kind is TokenKind.SIGN and word.text in COMPARISONS:
            self._at += 1
            return _comparison(word.text, left, self._operand())
        if self._accept("IS"):
            there = self._accept("NOT")
            self._expect("NULL")
            return lambda headers: (left(headers) is not None) is there
        inverted = self._accept("NOT")
        condition = self._between(left) or self._in(left) or self._like(left)
        if condition is None:
            raise self._unexpected(
                "a comparison is needed: = <> < <= > >= BETWEEN, IN, LIKE or IS NULL"
            )
        return (lambda headers: logical_not(condition(headers))) if inverted else condition

    def _between(self, left: Operand) -> Condition | None:
        if not self._accept("BETWEEN"):
            return None
        low = self._operand()
        self._expect("AND")
        at_least, at_most = _comparison(">=", left, low), _comparison("<=", left, self._operand())
        return lambda headers: logical_and(at_least(headers), at_most(headers))

    def _in(self, left: Operand) -> Condition | None:
        if not self._accept("IN"):
            return None
        self._expect("(")
        values = [self._literal()]
        while self._accept(","):
            values.append(self._literal())
            if len(values) > MAX_IN_VALUES:
                raise self._unexpected(f"use at most {MAX_IN_VALUES} values in a list")
        self._expect(")")
        chosen = tuple(values)
        return lambda headers: is_in(left(headers), chosen)

    def _like(self, left: Operand) -> Condition | None:
        if not self._accept("LIKE"):
            return None
        word = self._token(TokenKind.TEXT, "a pattern in single quotes is needed")
        escape = (
            self._token(TokenKind.TEXT, "one character in single quotes is needed")
            if self._accept("ESCAPE")
            else None
        )
        if escape is not None and len(escape.text) != 1:
            raise InvalidSelector(f"{escape.text!r} is not one character", escape.position)
        try:
            pattern = LikePattern(word.text, "" if escape is None else escape.text)
        except ValueError as error:
            raise InvalidSelector(str(error), word.position) from None

        def like(headers: Headers) -> bool | None:
            value = left(headers)
            return pattern.matches(value) if isinstance(value, str) else None

        return like

    def _operand(self) -> Operand:
        word = self._tokens[self._at]
        if word.kind is not TokenKind.NAME:
            value = self._literal()
            return lambda _headers: value
        self._at += 1
        name = word.text
        if name.startswith("$") and name not in OWN:
            raise InvalidSelector(
                f"unknown field {name!r}", word.position, hint=f"use {', '.join(OWN)} or a header"
            )
        return lambda headers: headers.get(name)

    def _literal(self) -> Value:
        word = self._tokens[self._at]
        if word.kind is TokenKind.TEXT:
            self._at += 1
            return word.text
        if self._accept("TRUE") or self._accept("FALSE"):
            return word.text == "TRUE"
        negative = self._accept("-")
        if not negative:
            self._accept("+")
        word = self._token(
            TokenKind.NUMBER, "a header's name, a text, a number, TRUE or FALSE is needed"
        )
        number = parse_number(word.text)
        if number is None:
            raise InvalidSelector(f"{word.text} is too large", word.position, hint="use a float")
        return -number if negative else number

    def _token(self, kind: TokenKind, needed: str) -> Token:
        word = self._tokens[self._at]
        if word.kind is not kind:
            raise self._unexpected(needed)
        self._at += 1
        return word

    def _accept(self, text: str) -> bool:
        word = self._tokens[self._at]
        found = word.text == text and word.kind in (TokenKind.KEYWORD, TokenKind.SIGN)
        self._at += found
        return found

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            raise self._unexpected(f"{text} is needed")

    def expect_end(self) -> None:
        if self._tokens[self._at].kind is not TokenKind.END:
            raise self._unexpected("AND, OR or the end is needed")

    def _unexpected(self, needed: str) -> InvalidSelector:
        word = self._tokens[self._at]
        found = "the end" if word.kind is TokenKind.END else repr(word.text)
        return InvalidSelector(f"unexpected {found}", word.position, hint=needed)


def _folded(
    join: Callable[[bool | None, bool | None], bool | None], conditions: tuple[Condition, ...]
) -> Condition:
    def folded(headers: Headers) -> bool | None:
        found = conditions[0](headers)
        for condition in conditions[1:]:
            found = join(found, condition(headers))
        return found

    return folded


def _comparison(sign: str, left: Operand, right: Operand) -> Condition:
    return lambda headers: compare(sign, left(headers), right(headers))
