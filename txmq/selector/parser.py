"""From the text of a selector to a condition, by recursive descent.

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
from txmq.selector.lexer import Kind, Word, words
from txmq.selector.values import (
    COMPARISONS,
    Condition,
    Headers,
    Number,
    Operand,
    Pattern,
    Value,
    among,
    both,
    compare,
    either,
    negated,
)

DEEPEST = 32
MOST_IN = 256
OWN = ("$key", "$tag", "$topic")  # what is not a header


@dataclass(frozen=True, slots=True)
class Selector:
    """A condition, ready to be asked; `text` is how it was written."""

    text: str
    condition: Condition

    def matches(
        self, headers: Mapping[str, str], *, key: str | None, tag: str | None, topic: str
    ) -> bool:
        """Whether a message is wanted: the condition is true. Neither false nor unknown
        will do.
        """
        return self.condition({**headers, "$key": key, "$tag": tag, "$topic": topic}) is True


def parse(text: str) -> Selector:
    """The selector of a text. Raises InvalidSelector, which tells the position."""
    parser = _Parser(words(text))
    condition = parser.either(0)
    parser.expect_end()
    return Selector(text, condition)


class _Parser:
    def __init__(self, found: list[Word]) -> None:
        self._words = found
        self._at = 0

    def either(self, depth: int) -> Condition:
        if depth > DEEPEST:
            raise self._unexpected(f"no more than {DEEPEST} brackets and NOTs inside one another")
        return self._joined("OR", either, partial(self._joined, "AND", both, self._negation), depth)

    def _joined(
        self,
        keyword: str,
        join: Callable[[bool | None, bool | None], bool | None],
        part: Callable[[int], Condition],
        depth: int,
    ) -> Condition:
        conditions = [part(depth)]
        while self._take(keyword):
            conditions.append(part(depth))
        return conditions[0] if len(conditions) == 1 else _folded(join, tuple(conditions))

    def _negation(self, depth: int) -> Condition:
        if depth > DEEPEST:
            raise self._unexpected(f"no more than {DEEPEST} brackets and NOTs inside one another")
        if self._take("NOT"):
            inner = self._negation(depth + 1)
            return lambda headers: negated(inner(headers))
        if self._take("("):
            inside = self.either(depth + 1)
            self._expect(")")
            return inside
        return self._predicate()

    def _predicate(self) -> Condition:
        left = self._operand()
        word = self._words[self._at]
        if word.kind is Kind.SIGN and word.text in COMPARISONS:
            self._at += 1
            return _comparison(word.text, left, self._operand())
        if self._take("IS"):
            there = self._take("NOT")
            self._expect("NULL")
            return lambda headers: (left(headers) is not None) is there
        inverted = self._take("NOT")
        condition = self._between(left) or self._in(left) or self._like(left)
        if condition is None:
            raise self._unexpected(
                "a comparison is needed: = <> < <= > >= BETWEEN, IN, LIKE or IS NULL"
            )
        return (lambda headers: negated(condition(headers))) if inverted else condition

    def _between(self, left: Operand) -> Condition | None:
        if not self._take("BETWEEN"):
            return None
        low = self._operand()
        self._expect("AND")
        at_least, at_most = _comparison(">=", left, low), _comparison("<=", left, self._operand())
        return lambda headers: both(at_least(headers), at_most(headers))

    def _in(self, left: Operand) -> Condition | None:
        if not self._take("IN"):
            return None
        self._expect("(")
        values = [self._literal()]
        while self._take(","):
            values.append(self._literal())
            if len(values) > MOST_IN:
                raise self._unexpected(f"no more than {MOST_IN} values in one list")
        self._expect(")")
        chosen = tuple(values)
        return lambda headers: among(left(headers), chosen)

    def _like(self, left: Operand) -> Condition | None:
        if not self._take("LIKE"):
            return None
        word = self._word(Kind.TEXT, "a pattern in single quotes is needed")
        escape = (
            self._word(Kind.TEXT, "one character in single quotes is needed")
            if self._take("ESCAPE")
            else None
        )
        if escape is not None and len(escape.text) != 1:
            raise InvalidSelector(f"{escape.text!r} is not one character", escape.position)
        try:
            pattern = Pattern(word.text, "" if escape is None else escape.text)
        except ValueError as error:
            raise InvalidSelector(str(error), word.position) from None

        def like(headers: Headers) -> bool | None:
            value = left(headers)
            return pattern.matches(value) if isinstance(value, str) else None

        return like

    def _operand(self) -> Operand:
        word = self._words[self._at]
        if word.kind is not Kind.NAME:
            value = self._literal()
            return lambda _headers: value
        self._at += 1
        name = word.text
        if name.startswith("$") and name not in OWN:
            raise InvalidSelector(
                f"there is no {name!r}", word.position, hint=f"only {', '.join(OWN)} and headers"
            )
        return lambda headers: headers.get(name)

    def _literal(self) -> Value:
        word = self._words[self._at]
        if word.kind is Kind.TEXT:
            self._at += 1
            return word.text
        if self._take("TRUE") or self._take("FALSE"):
            return word.text == "TRUE"
        negative = self._take("-")
        if not negative:
            self._take("+")
        number = _number(
            self._word(
                Kind.NUMBER, "a header's name, a text, a number, TRUE or FALSE is needed"
            ).text
        )
        return -number if negative else number

    def _word(self, kind: Kind, needed: str) -> Word:
        word = self._words[self._at]
        if word.kind is not kind:
            raise self._unexpected(needed)
        self._at += 1
        return word

    def _take(self, text: str) -> bool:
        word = self._words[self._at]
        found = word.text == text and word.kind in (Kind.KEYWORD, Kind.SIGN)
        self._at += found
        return found

    def _expect(self, text: str) -> None:
        if not self._take(text):
            raise self._unexpected(f"{text} is needed")

    def expect_end(self) -> None:
        if self._words[self._at].kind is not Kind.END:
            raise self._unexpected("AND, OR or the end is needed")

    def _unexpected(self, needed: str) -> InvalidSelector:
        word = self._words[self._at]
        found = "the end" if word.kind is Kind.END else repr(word.text)
        return InvalidSelector(f"{found} cannot stand here", word.position, hint=needed)


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


def _number(text: str) -> Number:
    return float(text) if "." in text else int(text)
