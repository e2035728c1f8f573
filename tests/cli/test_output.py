"""Output of commands."""

from __future__ import annotations

import json
import re
from typing import Any
from unittest.mock import Mock

import pytest
from rich.table import Table

from txmq.cli.output import Columns, Output, format_cell
from txmq.cli.status_line import StatusLine
from txmq.errors import InDoubt, Throttled, TxmqError, UnknownTopic
from txmq.model.printable import escape_unprintable
from txmq.model.tracebacks import last_line

NOON = 1_782_907_200_000_000  # 2026-07-01T12:00:00Z


def shown(
    capsys: pytest.CaptureFixture[str], value: dict[str, Any], columns: Columns = ()
) -> list[str]:
    Output(as_json=False).show(value, columns=columns)
    return capsys.readouterr().out.splitlines()


def test_single_values_come_first_and_each_list_is_a_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reply = {
        "group": "billing",
        "rows": [{"topic": "a", "lag": 5}, {"topic": "bcd", "lag": 12}],
        "paused": False,
    }
    assert shown(capsys, reply) == [
        "group   billing",
        "paused  no",
        "",
        "rows",
        "topic  lag",
        "a        5",
        "bcd     12",
    ]


def test_a_lone_list_needs_no_title_and_an_empty_one_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert shown(capsys, {"topics": [{"name": "a"}]}) == ["name", "a"]
    assert shown(capsys, {"topics": []}) == ["no topics"]


def test_chosen_columns_come_in_their_order_and_those_that_no_row_has_are_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = {"rows": [{"a": 1, "b": 2, "c": 3}]}
    assert shown(capsys, rows, columns=("c", "x", "a")) == ["c  a", "3  1"]


def test_columns_may_be_chosen_for_each_table(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {"ones": [{"a": 1, "b": 2}], "others": [{"a": 3, "c": 4}]}
    columns = {"ones": ("b", "a"), "others": ("c",)}
    assert shown(capsys, rows, columns=columns) == [
        "",
        "ones",
        "b  a",
        "2  1",
        "",
        "others",
        "c",
        "4",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Traceback\n  raise\nKeyError: 1\n", "KeyError: 1"),
        ("Traceback\nKeyError: 1\n(attempt 3 of 5 in place)\n", "KeyError: 1"),
        ("", ""),
    ],
)
def test_the_last_line_of_a_traceback_is_the_error(text: str, line: str) -> None:
    assert last_line(text) == line


def test_rows_with_different_fields_share_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, {"rows": [{"a": "1"}, {"b": "2"}]}) == ["a  b", "1  -", "-  2"]


def test_nothing_is_cut_where_no_terminal_sets_a_width(capsys: pytest.CaptureFixture[str]) -> None:
    text = "x" * 5_000
    assert shown(capsys, {"error": text}) == [f"error  {text}"]


def test_an_address_stays_whole_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    url = f"postgresql://postgres:{'x' * 32}@127.0.0.1:5432/postgres"
    broker, database = shown(capsys, {"broker": "txmq://127.0.0.1:7650", "postgres": url})
    assert broker.endswith("txmq://127.0.0.1:7650")
    assert database.endswith(url)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("stored_at", NOON, "2026-07-01 12:00:00.000Z"),
        ("at", NOON + 123_456, "2026-07-01 12:00:00.123Z"),
        ("oldest", NOON, "2026-07-01 12:00:00.000Z"),
        ("check_at", 0, "-"),
        ("born_at", 1 << 62, str(1 << 62)),
        ("since", 17, "17"),
        ("key_hash", NOON, str(NOON)),
        ("done", [["orders", 3, 17], ["orders", 4, 1]], "orders/3/17 orders/4/1"),
        ("ends", [1, 2], "1 2"),
        ("by_topic", {"a": 1, "b": 2}, "a=1, b=2"),
        ("headers", {}, "-"),
        ("offset", None, "-"),
        ("in_doubt", True, "yes"),
        ("key", "a\x1b[31m\nb\u202e", "a\\x1b[31m\\nb\\u202e"),
        ("tag", "[bold]Zürich[/bold]", "[bold]Zürich[/bold]"),
    ],
)
def test_a_value_reads_as_what_it_is(name: str, value: object, text: str) -> None:
    assert format_cell(name, value) == text


def test_markup_in_a_value_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, {"rows": [{"key": "[red]x[/red]"}]}) == ["key", "[red]x[/red]"]


def test_json_is_the_reply_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    reply = {"name": "Zürich\x1b", "ends": [1, 2], "none": None}
    Output(as_json=True).show(reply, columns=("other",))
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "\x1b" not in out
    assert json.loads(out) == reply


def test_an_error_is_one_line_with_its_hint(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=False).print_error(TxmqError("first\nsecond", hint="do this"))
    assert capsys.readouterr() == ("", "txmq: first\\nsecond (do this)\n")


@pytest.mark.parametrize(
    ("error", "fields"),
    [
        (
            UnknownTopic("no topic a", hint="create it", detail={"topic": "a"}),
            {
                "error": "UnknownTopic",
                "message": "no topic a",
                "hint": "create it",
                "retriable": False,
            }
            | {"outcome": "not done", "detail": {"topic": "a"}},
        ),
        (
            InDoubt("who knows", token="ab"),
            {
                "error": "InDoubt",
                "message": "who knows",
                "hint": "see its outcome with: txmq tx show ab",
            }
            | {"retriable": False, "outcome": "unknown"},
        ),
        (
            Throttled("slow down"),
            {
                "error": "Throttled",
                "message": "slow down",
                "hint": "",
                "retriable": True,
                "outcome": "not done",
            }
            | {"detail": {}},
        ),
    ],
)
def test_an_error_as_json_has_its_hint_and_outcome(
    capsys: pytest.CaptureFixture[str], error: TxmqError, fields: dict[str, Any]
) -> None:
    Output(as_json=True).print_error(error)
    out, err = capsys.readouterr()
    assert out == ""
    assert json.loads(err) == fields


def test_printable_text_stays_as_it_is() -> None:
    assert escape_unprintable("o-1 ✓ naïve 日本") == "o-1 ✓ naïve 日本"


def test_an_empty_reply_is_said_to_be_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, {}) == ["done"]
    Output(as_json=True).show({})
    assert json.loads(capsys.readouterr().out) == {}


def test_a_traceback_keeps_its_lines_in_the_column_of_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "Traceback:\n  File x\nE: \x1b[2J\u202e\rstate  done\x85\n"
    assert shown(capsys, {"state": "dead", "error_text": text}) == [
        "state       dead",
        "error_text  Traceback:",
        "              File x",
        "            E: \\x1b[2J\\u202e\\rstate  done\\x85",
    ]
    assert shown(capsys, {"error_text": ""}) == ["error_text  -"]


def test_a_status_line_is_for_terminals_and_escapes_what_it_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = "\r\x1b[Ksearching a\\x1b[2J\r\x1b[K"
    for terminal, text in ((True, shown), (False, "")):
        monkeypatch.setattr("sys.stderr.isatty", lambda terminal=terminal: terminal)
        line = StatusLine()
        line.show("searching a\x1b[2J")
        line.clear()
        assert capsys.readouterr().err == text


def test_a_table_that_would_break_words_is_shown_row_by_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("COLUMNS", "25")
    rows = [{"place": f"orders/0/{n}", "held_by": "0123456789abcdef"} for n in (1, 2)]
    first, *_rest, last = shown(capsys, {"letters": rows})
    assert "place" in first
    assert first.endswith("orders/0/1")
    assert last.endswith("0123456789abcdef")
    narrow = [{"place": row["place"], "held_by": "m"} for row in rows]
    assert len(shown(capsys, {"letters": narrow})) == 3


def test_rows_one_below_the_other_fold_between_words_and_make_no_tables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    made = Mock(wraps=Table)
    monkeypatch.setattr("rich.table.Table", made)
    rows = [{"place": f"orders/0/{n}", "text": "one two three 0123456789abcdef"} for n in range(50)]
    first = shown(capsys, {"letters": rows})[:4]
    assert [re.sub(r"\x1b\[[\d;]*m", "", line) for line in first] == [
        "place  orders/0/0",
        "text   one two three",
        "       0123456789abcdef",
        "",
    ]
    assert made.call_count <= 1
