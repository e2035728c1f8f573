"""`txmq tail`: first and last messages, and their output."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.cli.support import NOBODY, ScriptedClient, client, run
from txmq.cli.commands.tail import json_fields, text_line
from txmq.model.message import ReceivedMessage

__all__ = ["client"]
NOON = 1_782_907_200_000_000  # 2026-07-01T12:00:00Z


def message(body: bytes, **fields: str | None) -> ReceivedMessage:
    key, tag = fields.pop("key", None), fields.pop("tag", None)
    headers = {name: value for name, value in fields.items() if value is not None}
    return ReceivedMessage("orders", 3, 17, key, tag, headers, body, "id-1", 1, NOON - 5, NOON)


@pytest.mark.parametrize(
    ("received", "line"),
    [
        (message(b"hello"), "2026-07-01 12:00:00.000Z orders/3/17 hello"),
        (
            message("Zürich\n".encode(), key="o-1", tag="made", h="v"),
            "2026-07-01 12:00:00.000Z orders/3/17 key=o-1 tag=made h=v Zürich\\n",
        ),
        (
            message(b"\x1b[2J", key="\x07"),
            "2026-07-01 12:00:00.000Z orders/3/17 key=\\x07 \\x1b[2J",
        ),
        (message(b"\xff\x00"), "2026-07-01 12:00:00.000Z orders/3/17 /wA="),
    ],
)
def test_a_message_is_one_line_that_no_terminal_obeys(received: ReceivedMessage, line: str) -> None:
    assert text_line(received) == line


def test_as_json_a_message_has_its_body_as_text_where_it_is_text() -> None:
    fields = {
        "topic": "orders",
        "partition": 3,
        "offset": 17,
        "key": "o-1",
        "tag": None,
        "headers": {"h": "v"},
    }
    fields |= {"message_id": "id-1", "born_at": NOON - 5, "stored_at": NOON}
    assert json_fields(message(b"hello", key="o-1", h="v")) == fields | {"body": "hello"}
    assert json_fields(message(b"\xff", key="o-1", h="v")) == fields | {"body_base64": "/w=="}


@pytest.fixture
def tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose local time is nine hours ahead of UTC."""
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "JST-9")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("tokyo")
def test_a_time_without_a_zone_is_local(client: ScriptedClient) -> None:
    client.replies = [{"firsts": [0], "ends": [5]}, {"messages": []}] * 2
    for start in ("2026-07-01T21:00", "2026-07-01T12:00Z"):
        assert run("tail", "orders", f"--from={start}", "--no-follow").exit_code == 0
    query = {"topic": "orders", "partition": 0, "start": NOON, "limit": 1}
    assert client.calls[1::2] == [("message.find", query)] * 2


@pytest.mark.parametrize("start", ["soon", "-1", "2y", "2026-13-01", "1" * 20])
def test_a_start_that_is_none_is_told_what_there_is(start: str) -> None:
    refused = run("tail", "orders", f"--from={start}", "--broker", NOBODY)
    assert refused.exit_code == 2
    told = " ".join(refused.stderr.replace("│", " ").split())
    assert f"invalid start '{start}': use first, last, an offset, a time like" in told
