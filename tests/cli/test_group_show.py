"""`txmq group show` on terminals of 80 and 120 columns, and in a file."""

from __future__ import annotations

import re
from typing import Any

import pytest

from txmq.cli.group_view import readable_group
from txmq.cli.output import Output
from txmq.model.retry import RetryPolicy

SINCE = 1_782_907_200_000_000
WHY = (
    "undecided transactions hold keys of it, such as 018bcfe568de2c2028425cbae877c6d8; "
    "in the queues of these keys: 7"
)
STYLE = re.compile(r"\x1b\[[0-9;]*m")


def position(partition: int, **more: Any) -> dict[str, Any]:
    usual = {
        "topic": "orders",
        "partition": partition,
        "floor": 1_234_567,
        "cursor": 1_234_570,
        "end": 1_234_600,
    }
    usual |= {
        "unprocessed": 34,
        "unsettled": 33,
        "leased": 3,
        "leased_to": ["billing-1"],
        "redeliver": 0,
        "reserved": 0,
        "retrying": 0,
    }
    return (
        usual
        | {"owners": ["billing-1"], "passed": 0, "age_ms": 61_000, "why": "", "reason": ""}
        | more
    )


SETTINGS = {
    "mode": "ordered",
    "retry": RetryPolicy().to_json(),
    "lease_us": 60_000_000,
    "altered": [],
}
MEMBER = {
    "member": "billing-1",
    "since": 3,
    "assignment": [["orders", n] for n in range(32)],
    "leased": 6,
    "paused": [],
}
FENCE = {
    "topic": "orders",
    "key_hash": -(1 << 62),
    "state": "dead",
    "partition": 1,
    "offset": 1_234_567,
    "parked": 17,
}
STORE = {
    "group": "billing",
    "store": "5" * 32,
    "state": "no owner",
    "member": "billing-1",
    "host": "h",
    "messages": 12,
}
REPLY = {
    "group": "billing",
    "state": "active",
    "settings": SETTINGS,
    "flood": None,
    "member_list": [MEMBER | {"oldest_lease": SINCE}],
    "paused_topics": [],
    "positions": [position(0), position(1, why=WHY, reason="undecided")],
    "store_list": [STORE],
    "fence_list": [FENCE | {"since": SINCE}],
}


def printed(capsys: pytest.CaptureFixture[str], reply: dict[str, Any]) -> list[str]:
    Output(as_json=False).show(readable_group(reply))
    return [STYLE.sub("", line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("columns", [80, 120])
def test_it_fits_a_terminal_and_no_word_is_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": str(columns)}.items():
        monkeypatch.setenv(name, value)
    lines = printed(capsys, REPLY)
    assert max(map(len, lines)) <= columns
    assert (
        "orders/0            34   1234567  1234600   61000         33       3  billing-1" in lines
    )
    for word in (*WHY.split(), "orders/31", "2026-07-01", "-4611686018427387904", "retry_delays_s"):
        assert any(word in line for line in lines), word


def test_in_a_file_each_thing_is_a_line_and_none_ends_in_spaces(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = printed(capsys, REPLY)
    assert [line for line in lines if line != line.rstrip()] == []
    assert f"orders/1   undecided  {WHY}" in lines
    assert "lease_s         60.0" in lines


def test_columns_come_where_something_is_in_them() -> None:
    [usual, *_rest] = readable_group(REPLY)["partitions"]
    assert list(usual) == [
        "partition",
        "unprocessed",
        "position",
        "end",
        "age_ms",
        "unsettled",
        "leased",
        "owners",
    ]
    quiet = readable_group(
        {
            "positions": [
                position(0, leased=0, unsettled=0, age_ms=0),
                position(1, leased=0, unsettled=0, age_ms=0, retrying=5),
            ]
        }
    )
    assert list(quiet["partitions"][0]) == [
        "partition",
        "unprocessed",
        "position",
        "end",
        "retrying",
        "owners",
    ]
    assert "not_moving" not in quiet


def test_a_topic_that_is_paused_is_named() -> None:
    assert readable_group({"paused_topics": ["orders", "refunds"]}) == {
        "paused_topics": "orders refunds"
    }
    assert readable_group({"settings": {"retry": RetryPolicy((1, 2)).to_json()}})["settings"][
        0
    ] == {
        "setting": "retry_delays_s",
        "value": [1.0, 2.0],
    }
