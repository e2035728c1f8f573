"""Dead letters as frames."""

from __future__ import annotations

from base64 import b64decode
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.spark.consuming import let_die
from txmq.errors import BadRequest
from txmq_spark.source import broker_link
from txmq_spark.source.arrow_letters import letter_batches
from txmq_spark.source.broker_link import PAGE_LETTERS_WITH_BODIES, BrokerLink
from txmq_spark.source.letter_ranges import number_ranges

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    import txmq


def test_a_letter_has_its_place_and_its_error(
    spark: SparkSession, broker: str, topic: str, client: txmq.Client
) -> None:
    client.call("topic.create", name=topic, partitions=1)
    receipts = [
        client.send(topic, b"%d" % n, key=f"k{n % 2}", headers={"n": str(n)}) for n in range(6)
    ]
    let_die(client, topic, topic, [b"2", b"3"])
    frame = spark.read.format("txmq").option("url", broker).option("letters", topic).load()
    first, second = frame.orderBy("offset").collect()
    assert (first.body, second.body) == (b"2", b"3")
    assert (first.topic, first.partition, first.offset) == (topic, 0, 2)
    assert (first.origin_topic, first.origin_partition, first.origin_offset) == (topic, 0, 2)
    assert (first.group, first.key, first.headers, first.message_id) == (
        topic,
        "k0",
        {"n": "2"},
        receipts[2].message_id,
    )
    assert first.error_text == "b'2' cannot be processed"
    assert (first.attempts, first.attempt, first.replays, first.parked, first.reserved_by) == (
        1,
        1,
        0,
        1,
        None,
    )
    assert first.first_failed_at <= first.dead_at
    assert first.fingerprint == second.fingerprint != ""
    chosen = (
        spark.read.format("txmq")
        .option("url", broker)
        .option("letters", topic)
        .schema("key string, parked long")
    )
    assert sorted(chosen.load().collect()) == [("k0", 1), ("k1", 1)]


def test_a_group_without_letters_has_no_rows(
    spark: SparkSession, broker: str, topic: str, client: txmq.Client
) -> None:
    client.send(topic, b"x")
    let_die(client, topic, topic, [])
    assert (
        spark.read.format("txmq").option("url", broker).option("letters", topic).load().collect()
        == []
    )


def test_letters_that_were_closed_are_left_out(
    broker: str, topic: str, client: txmq.Client
) -> None:
    client.call("topic.create", name=topic, partitions=1)
    for n in range(5):
        client.send(topic, b"%d" % n)
    let_die(client, topic, topic, [b"0", b"2", b"4"], "concurrent")
    client.call(
        "dlq.abandon", group=topic, letters=[[topic, 0, 2]], operator="tests", reason="a test"
    )
    with BrokerLink(broker) as link:
        assert [letter["offset"] for letter in link.letters(topic, bodies=False)] == [0, 4]
        numbers = [letter["number"] for letter in link.letters(topic, bodies=True)]
        [second] = link.letters(topic, bodies=True, after=numbers[0], last=numbers[1])
    assert second["offset"] == 4


def let_pages_be_asked(monkeypatch: pytest.MonkeyPatch, letters: int, most: int) -> list[int]:
    """Let links see so many letters, of which a page may have `most`. Return a list of
    the limits that are asked for.
    """
    asked = []

    def call(
        _link: BrokerLink, _name: str, /, *, limit: int, after: int, **_: Any
    ) -> dict[str, Any]:
        asked.append(limit)
        if limit > most:
            raise BadRequest("a frame of 44783472 bytes")
        numbers = range(after + 1, min(after + limit, letters) + 1)
        page = [{"number": number, "state": "dead"} for number in numbers]
        return {"letters": page, "next": numbers[-1] if len(page) == limit else None}

    monkeypatch.setattr(BrokerLink, "call", call)
    return asked


def test_pages_shrink_until_large_bodies_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = let_pages_be_asked(monkeypatch, 5, most=2)
    with BrokerLink("txmq://127.0.0.1:1") as link:
        assert [letter["number"] for letter in link.letters("g", bodies=True)] == [1, 2, 3, 4, 5]
    assert asked == [128, 16, 2, 2, 2]


def test_a_task_asks_for_no_letters_behind_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = let_pages_be_asked(monkeypatch, 9_000, most=1_000)
    with BrokerLink("txmq://127.0.0.1:1") as link:
        found = [one["number"] for one in link.letters("g", bodies=True, after=1_000, last=1_300)]
    assert found == list(range(1_001, 1_301))
    assert asked == [128, 128, 44]


def test_pages_without_bodies_come_one_ahead_and_end_with_the_range(
    monkeypatch: pytest.MonkeyPatch, broker: str, topic: str, client: txmq.Client
) -> None:
    client.call("topic.create", name=topic, partitions=1)
    bodies = [b"%d" % n for n in range(7)]
    for body in bodies:
        client.send(topic, body)
    let_die(client, topic, topic, bodies, "concurrent")
    monkeypatch.setattr(broker_link, "PAGE_LETTERS", 2)
    asked: list[int] = []
    page_payload = broker_link._page_payload

    def noted(group: str, after: int, last: int | None) -> bytes:
        asked.append(after)
        return page_payload(group, after, last)

    monkeypatch.setattr(broker_link, "_page_payload", noted)
    with BrokerLink(broker) as link:
        listed = link.letters(topic, bodies=False, after=1, last=6)
        assert next(listed)["number"] == 2
        assert asked == [1, 3]
        assert link.call("topic.show", name=topic)["partitions"] == 1  # meanwhile
        link.close()  # the page that is on its way is asked for again
        assert [letter["number"] for letter in listed] == [3, 4, 5, 6]
        assert asked == [1, 3, 5]
        assert [one["number"] for one in link.letters(topic, bodies=False)] == list(range(1, 8))
        assert list(link.letters(topic, bodies=False, after=7, last=7)) == []


@given(st.integers(0, 50), st.integers(1, 50), st.integers(0, 40_000), st.integers(1, 60))
def test_ranges_of_letters_hold_each_number_once(
    after: int, width: int, letters: int, least: int
) -> None:
    found = number_ranges(after, after + width, letters, least)
    held = [n for start, last in found for n in range(start + 1, last + 1)]
    assert held == list(range(after + 1, after + width + 1))
    assert len(found) == min(width, max(least, -(-letters // 10_000)))


def test_a_damaged_letter_is_a_row_with_its_reason() -> None:
    letter = {"offset": 3, "key": None, "damaged": "bad checksum", "state": "dead"}
    [batch] = letter_batches([letter], ["offset", "key", "body", "damaged"])
    assert batch.to_pylist() == [
        {"offset": 3, "key": None, "body": None, "damaged": "bad checksum"}
    ]


@pytest.mark.parametrize("select", [None, {"topic": None, "states": ["open"]}])
def test_letters_that_are_held_or_closed_between_two_pages_are_read_as_they_are_then(
    broker: str, topic: str, client: txmq.Client, select: dict[str, Any] | None
) -> None:
    """Pages of letters with bodies: a plan takes some of the next page, others are
    abandoned. What was read stays, what is closed is left out.
    """
    client.call("topic.create", name=topic, partitions=1)
    count = 2 * PAGE_LETTERS_WITH_BODIES + 10
    client.send_many(topic, [b"%d" % n for n in range(count)])
    let_die(client, topic, topic, {b"%d" % n for n in range(count)}, "concurrent")
    held, closed = range(150, 160), range(200, 210)
    with BrokerLink(broker) as link:
        if select is None:
            letters = link.letters(topic, bodies=True)
        else:
            letters = link.selected_letters(topic, select | {"topic": topic}, bodies=True)
        found = [next(letters)]
        client.call("plan.create", name=topic, group=topic)
        client.call("plan.add", name=topic, letters=[(topic, 0, n) for n in held])
        client.call(
            "dlq.abandon", group=topic, letters=[(topic, 0, n) for n in closed], reason="not needed"
        )
        found += letters
    assert [one["offset"] for one in found] == [n for n in range(count) if n not in closed]
    assert [b64decode(one["body"]) for one in found] == [b"%d" % one["offset"] for one in found]
    assert [one["offset"] for one in found if one.get("plan") == topic] == list(held)


@pytest.mark.parametrize("selected", [False, True])
def test_letters_with_large_bodies_come_in_pages_that_fit(
    broker: str, topic: str, client: txmq.Client, *, selected: bool
) -> None:
    client.call("topic.create", name=topic, partitions=1)
    bodies = [b"%d" % n + bytes(1_000_000) for n in range(12)]
    for body in bodies:
        client.send(topic, body)
    let_die(client, topic, topic, set(bodies), "concurrent")
    with BrokerLink(broker) as link:
        read = link.letters(topic, bodies=True)
        if selected:
            read = link.selected_letters(topic, {"topic": topic}, bodies=True)
        assert [b64decode(one["body"]) for one in read] == bodies
