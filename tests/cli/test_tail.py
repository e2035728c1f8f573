"""`txmq tail`: first and last messages, and their output."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace

import pytest

from tests.cli.support import NOBODY, ScriptedClient, client, run
from txmq.batch import encode
from txmq.cli.commands.tail import WAIT_MS, json_fields, read_partitions, text_line
from txmq.model.message import Message, ReceivedMessage
from txmq.wire.chunks import Chunk, Chunks

__all__ = ["client"]
NOON = 1_782_907_200_000_000  # 2026-07-01T12:00:00Z
PRODUCER = bytes(range(16))


def batch(bodies: list[bytes], sequence: int) -> bytes:
    messages = [Message(body, "k") for body in bodies]
    return encode(
        messages, producer_id=PRODUCER, epoch=0, sequence=sequence, born_at=[NOON] * len(bodies)
    )


class Partitions:
    """Partitions as lists of batches. Whole batches are read, as at a broker."""

    def __init__(self, **partitions: list[list[bytes]]) -> None:
        self.batches = {
            int(name.removeprefix("p")): batches for name, batches in partitions.items()
        }
        self.asked: list[tuple[int, int, int]] = []
        self.open: list[tuple[int, int]] = []

    def poll(self, partition: int, offset: int, wait_ms: int) -> None:
        self.asked.append((partition, offset, wait_ms))
        self.open.append((partition, offset))

    def replies(self) -> Iterator[tuple[int, Chunks]]:
        partition, offset = self.open.pop(0)
        base = 0
        for bodies in self.batches[partition]:
            if offset < base + len(bodies):
                chunk = Chunk(
                    "t", partition, base, NOON, 0, 1, 0, -1, 0, len(bodies), batch(bodies, base)
                )
                yield partition, Chunks(0, base + len(bodies), (chunk,))
                return
            base += len(bodies)
        yield partition, Chunks(0, offset, ())


def places(messages: Iterator[ReceivedMessage]) -> list[tuple[int, int, bytes]]:
    return [(message.partition, message.offset, message.body) for message in messages]


def test_each_partition_is_read_in_order_to_the_end_that_was_asked_for() -> None:
    polls = Partitions(p0=[[b"a", b"b"], [b"c"], [b"later"]], p2=[[b"x"]])
    found = places(read_partitions(polls, {0: 0, 2: 0}, {0: 3, 2: 1}))
    assert [place for place in found if place[0] == 0] == [(0, 0, b"a"), (0, 1, b"b"), (0, 2, b"c")]
    assert [place for place in found if place[0] == 2] == [(2, 0, b"x")]
    assert {wait_ms for _partition, _offset, wait_ms in polls.asked} == {0}


def test_a_batch_that_begins_before_the_start_gives_only_its_later_rows() -> None:
    polls = Partitions(p0=[[b"a", b"b", b"c"]])
    assert places(read_partitions(polls, {0: 1}, {0: 3})) == [(0, 1, b"b"), (0, 2, b"c")]


def test_a_partition_with_nothing_to_read_is_not_asked() -> None:
    polls = Partitions(p0=[[b"a"]])
    assert places(read_partitions(polls, {0: 1, 1: 5}, {0: 1, 1: 3})) == []
    assert polls.asked == []


def test_following_asks_again_after_every_answer_and_waits() -> None:
    polls = Partitions(p0=[[b"a"]], p1=[[], [b"x", b"y"]])
    assert places(islice(read_partitions(polls, {0: 0, 1: 0}), 3)) == [
        (0, 0, b"a"),
        (1, 0, b"x"),
        (1, 1, b"y"),
    ]
    assert polls.asked == [(0, 0, WAIT_MS), (1, 0, WAIT_MS), (0, 1, WAIT_MS)]


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
def test_a_time_without_a_zone_is_local(
    client: ScriptedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = SimpleNamespace(close=lambda: None)  # there is nothing to read
    monkeypatch.setattr("txmq.cli.commands.tail.TopicReader", lambda _url, _topic: reader)
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
