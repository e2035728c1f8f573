"""Selectors: the same answers as SQLite's, three-valued logic, errors that tell where,
and no text that costs much.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txmq.errors import InvalidSelector
from txmq.selector import parse
from txmq.selector.lexer import MAX_LENGTH

TEXTS = ("s1", "s2")
NUMBERS = ("n1", "n2")
ALPHABET = "ab%_'é \\"

texts = st.text(ALPHABET, max_size=5)
numbers = st.integers(-20, 20) | st.integers(-200, 200).map(lambda n: n / 10)
text_literals = texts.map(lambda text: "'" + text.replace("'", "''") + "'")
number_literals = numbers.map(lambda n: f"{n}")
signs = st.sampled_from(["=", "<>", "!=", "<", "<=", ">", ">="])
nots = st.sampled_from(["", "NOT "])


def _predicates(
    names: tuple[str, ...], literals: st.SearchStrategy[str], operand: st.SearchStrategy[str]
) -> st.SearchStrategy[str]:
    name = st.sampled_from(names)
    return st.one_of(
        st.builds("{} {} {}".format, name, signs, operand),
        st.builds("{} {} {}".format, operand, signs, name),
        st.builds("{} {} {}".format, literals, signs, literals),
        st.builds("{} {}BETWEEN {} AND {}".format, name, nots, operand, operand),
        st.builds(
            "{} {}IN ({})".format,
            name,
            nots,
            st.lists(literals, min_size=1, max_size=4).map(", ".join),
        ),
        st.builds("{} IS {}NULL".format, name, nots),
    )


patterns = texts.map(lambda text: text.replace("\\", "")).map(
    lambda text: "'" + text.replace("'", "''") + "'"
)
escaped = st.text("ab%_", max_size=4).map(
    lambda text: "'" + "".join(f"\\{c}" if c in "%_" else c for c in text) + "'"
)
likes = st.builds("{} {}LIKE {}".format, st.sampled_from(TEXTS), nots, patterns) | st.builds(
    "{} {}LIKE {} ESCAPE '\\'".format, st.sampled_from(TEXTS), nots, escaped
)
# Two headers compare as texts: SQLite compares two columns of numbers as numbers.
predicates = (
    _predicates(TEXTS, text_literals, st.sampled_from(TEXTS) | text_literals)
    | _predicates(NUMBERS, number_literals, number_literals)
    | likes
)
conditions = st.recursive(
    predicates,
    lambda inner: st.one_of(
        st.builds("({})".format, inner),
        st.builds("NOT {}".format, inner.map(lambda text: f"({text})")),
        st.builds("{} {} {}".format, inner, st.sampled_from(["AND", "OR", "and", "Or"]), inner),
    ),
    max_leaves=8,
)
rows = st.fixed_dictionaries(
    {name: st.none() | texts for name in TEXTS} | {name: st.none() | numbers for name in NUMBERS}
)


@pytest.fixture(scope="module")
def database() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:")
    connection.execute("PRAGMA case_sensitive_like = ON")
    connection.execute("CREATE TABLE one (s1, s2, n1, n2)")
    yield connection
    connection.close()


@given(conditions, rows)
def test_the_answer_is_sqlites(
    database: sqlite3.Connection, text: str, row: dict[str, str | float | None]
) -> None:
    database.execute("DELETE FROM one")
    database.execute("INSERT INTO one VALUES (:s1, :s2, :n1, :n2)", row)
    [(expected,)] = database.execute(f"SELECT ({text}) IS TRUE FROM one")
    headers = {name: f"{value}" for name, value in row.items() if value is not None}
    assert parse(text).matches(headers, key=None, tag=None, topic="t") is bool(expected), (
        text,
        row,
    )


@given(st.text(max_size=60) | st.text("()'\" ANDORTIS=<>%_a1.,-$", max_size=60))
def test_whatever_the_text_it_is_a_selector_or_is_told_where_it_is_not(text: str) -> None:
    position = 0
    try:
        parse(text).matches({"a": "1"}, key="k", tag=None, topic="t")
    except InvalidSelector as error:
        position = error.position
    assert 0 <= position <= len(text)


@pytest.mark.parametrize(
    ("text", "headers", "matches"),
    [
        ("price > 9", {"price": "10"}, True),
        ("price > '9'", {"price": "10"}, False),
        ("price > 9", {"price": "dear"}, False),
        ("NOT price > 9", {"price": "dear"}, False),
        ("price > 9 OR price IS NOT NULL", {"price": "dear"}, True),
        ("price = 10", {"price": "10.0"}, True),
        ("price = 10", {"price": "1e1"}, True),
        ("price = 1e1 AND price < 1.5E+3 AND price > .5 AND price > 9.0e0", {"price": "10"}, True),
        ("price > 0", {"price": ".5"}, True),
        ("price < 10", {"price": "nan"}, False),
        ("price > 10", {"price": "1e999"}, False),
        ("price = -1.5", {"price": "-1.5"}, True),
        ("price BETWEEN -2 AND +3", {"price": "3"}, True),
        ("n = 9007199254740993", {"n": "9007199254740992"}, False),
        ("paid = TRUE", {"paid": "True"}, True),
        ("paid = true", {"paid": "yes"}, False),
        ("paid <> FALSE", {"paid": "true"}, True),
        ("paid > FALSE", {"paid": "true"}, False),
        ("1 = 1", {}, True),
        ("TRUE = 1", {}, False),
        ("\"x-vip\" = '1'", {"x-vip": "1"}, True),
        ("\"and\" = '1'", {"and": "1"}, True),
        ("\"a\"\"b\" = 'it''s'", {'a"b': "it's"}, True),
        ("trace.id LIKE 'a%'", {"trace.id": "abc"}, True),
        ("a = ''", {"a": ""}, True),
        ("a IS NULL", {}, True),
        ("a <> 'x'", {}, False),
        ("$key = 'k-1' AND $tag IN ('paid', 'new') AND $topic <> 'x'", {}, True),
        ("$key LIKE 'k-_'", {"$key": "other"}, True),
        ("a\n=\t'x'", {"a": "x"}, True),
    ],
)
def test_what_matches(text: str, headers: dict[str, str], matches: object) -> None:
    assert parse(text).matches(headers, key="k-1", tag="paid", topic="orders") is matches


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("", 0),
        ("   ", 0),
        ("a", 1),
        ("a =", 3),
        ("a = 'x' b", 8),
        ("a = 'x", 4),
        ('"a = 1', 0),
        ("(a = 1", 6),
        ("a = 1)", 5),
        ("a BETWEEN 1 OR 2", 12),
        ("a IN ()", 6),
        ("a IN (b)", 6),
        ("a LIKE b", 7),
        ("a LIKE 5", 7),
        ("a LIKE 'x' ESCAPE 'xy'", 18),
        ("a LIKE 'x\\y' ESCAPE '\\'", 7),
        ("a IS 5", 5),
        ("NOT", 3),
        ("a = 1 AND", 9),
        ("a NOT = 1", 6),
        ("a ; b", 2),
        ("a = 12abc", 4),
        ("a = 1e999", 4),
        ("$body = 'x'", 0),
        ("a == 1", 3),
        ("a = 1 -- x", 6),
        ("__import__('os')", 10),
    ],
)
def test_an_error_tells_where_it_is(text: str, position: int) -> None:
    with pytest.raises(InvalidSelector) as raised:
        parse(text)
    assert raised.value.position == position


@pytest.mark.parametrize(
    "text",
    [
        "a = 1" + " " * MAX_LENGTH,
        "(" * 100 + "a = 1" + ")" * 100,
        "NOT " * 100 + "a = 1",
        f"a IN ({', '.join('1' for _ in range(300))})",
        " OR ".join(["a=1"] * 600),
    ],
)
def test_selectors_have_limits(text: str) -> None:
    with pytest.raises(InvalidSelector):
        parse(text)


def test_no_pattern_takes_long() -> None:
    """One that backtracks would take longer than the age of the world."""
    selector = parse("a LIKE '" + "%a" * 500 + "b'")
    assert not selector.matches({"a": "a" * 10_000}, key=None, tag=None, topic="t")
