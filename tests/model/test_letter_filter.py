"""The filter language for dead letters."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txmq.model.letter_filter import (
    STATES,
    InvalidFilter,
    Unfinished,
    format_filter,
    parse_filter,
    unfinished,
)
from txmq.model.units import HOUR, SECOND
from txmq.wire.calls.letters import SelectionArgs

NOW = 1_800_000_000 * SECOND


@pytest.mark.parametrize(
    ("text", "group", "select"),
    [
        ("", None, {}),
        (
            'group:billing error:ValueError age>1h key:"a b" state:open attempts>3 text:"no \\" x"',
            "billing",
            {
                "error_type": "ValueError",
                "died_before": NOW - HOUR,
                "key": "a b",
                "states": ["open"],
                "min_attempts": 4,
                "text": 'no " x',
            },
        ),
        ("state:any", None, {"states": [*STATES]}),
        ("state:open state:local", None, {"states": ["open", "local"]}),
        ("age<30min", None, {"died_from": NOW - HOUR // 2}),
        ("attempts:3 replays<2", None, {"min_attempts": 3, "max_attempts": 3, "max_replays": 1}),
        ("attempts:2.. header:a=b=c", None, {"min_attempts": 2, "header": ["a", "b=c"]}),
        ('header:trace "deadlock detected"', None,
         {"header": ["trace", None], "text": "deadlock detected"}),
        ("body:$.a[0]=1 body:x", None, None),
        ('body:"$.a.b=x y"', None, {"body": "$.a.b=x y"}),
        ("body:o-17", None, {"body": "o-17"}),
        ("key:", None, None),
        ('key:""', None, {"key": ""}),
        ("after:2027-01-15T08:00:00Z", None, {"died_from": NOW}),
        ("https://x", None, None),
        ('"https://x"', None, {"text": "https://x"}),
    ],
)  # fmt: skip
def test_a_filter_says_what_to_select(
    text: str, group: str | None, select: dict[str, Any] | None
) -> None:
    if select is None:
        with pytest.raises(InvalidFilter):
            parse_filter(text, NOW)
        return
    found = parse_filter(text, NOW)
    assert found == (group, select)
    SelectionArgs.model_validate_json(json.dumps(select))


@pytest.mark.parametrize(
    ("text", "at", "what"),
    [
        ("topic:orders errr:ValueError", 13, "no property 'errr'"),
        ("attempts>many", 9, "no number"),
        ("age>soon", 4, "length of time"),
        ("age:1h", 4, "compared"),
        ('key:"a b', 4, "without its end"),
        ("state:dead", 6, "no state"),
        ("error:A error:B", 8, "twice"),
        ("group:a group:b", 8, "twice"),
        ("topic>x", 6, "cannot be compared"),
        ("replays>3", 8, "at most"),
        ("after:yesterday", 6, "no time"),
        ("key: x", 4, "no value"),
        ("attempts<0", 9, "no fewer"),
        ("body:$.a", 5, "it has no value"),
        ("x" * 5_000, 4_096, "too long"),
    ],
)
def test_a_mistake_is_pointed_at(text: str, at: int, what: str) -> None:
    with pytest.raises(InvalidFilter, match=what) as wrong:
        parse_filter(text, NOW)
    assert wrong.value.position == at
    assert wrong.value.hint


words = st.text(min_size=1, max_size=12)
selections = st.fixed_dictionaries(
    {},
    optional={
        "error_type": words, "key": words, "text": words, "fingerprint": words,
        "min_attempts": st.integers(0, 99), "max_replays": st.integers(0, 99),
        "header": st.tuples(
            words.filter(lambda name: "=" not in name), words | st.none()
        ).map(list),
        "body": words.filter(lambda text: not text.startswith("$")),
        "died_from": st.integers(0, 2 * NOW), "died_before": st.integers(0, 2 * NOW),
        "states": st.just(["open", "abandoned"]),
    },
)  # fmt: skip


@given(selections)
def test_a_selection_is_written_and_read_again(select: dict[str, Any]) -> None:
    assert parse_filter(format_filter(select, "billing"), NOW) == ("billing", select)


@given(st.text(alphabet='abegorupx:=<>" \\.1h', max_size=40), st.integers(-1, 50))
def test_no_text_breaks_the_parser(text: str, at: int) -> None:
    with suppress(InvalidFilter):
        parse_filter(text, NOW)
    found = unfinished(text, at)
    assert 0 <= found.start <= len(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Unfinished(0, None, "")),
        ("err", Unfinished(0, None, "err")),
        ("topic:a err", Unfinished(8, None, "err")),
        ("topic:a error:Val", Unfinished(14, "error", "Val")),
        ('key:"a b" group:', Unfinished(16, "group", "")),
        ('key:"a b', Unfinished(4, "key", "a b")),
        ("topic:a ", Unfinished(8, None, "")),
    ],
)
def test_what_is_being_typed_is_known(text: str, expected: Unfinished) -> None:
    assert unfinished(text, len(text)) == expected
