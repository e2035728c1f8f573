"""Topics as a stream, from a broker process, as Spark drives the reader."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from tests.spark.consuming import let_die
from tests.spark.stream_driver import StreamDriver, texts
from txmq.errors import UnknownGroup
from txmq_spark.source.offset_ranges import DataLoss
from txmq_spark.source.pushed_filters import EPOCH

if TYPE_CHECKING:
    import txmq


@pytest.fixture
def drivers(broker: str) -> Iterator[Callable[..., StreamDriver]]:
    """A function that starts a query."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(StreamDriver(url=broker, **options))


def test_each_message_is_in_one_batch_over_restarts_and_growth(
    drivers: Callable[..., StreamDriver], topic: str, client: txmq.Client
) -> None:
    client.call("topic.create", name=topic, partitions=1)
    client.send_many(topic, texts(*range(5)))
    driver = drivers(topicPattern=f"{topic}(-2)?", maxOffsetsPerTrigger="3")
    assert driver.step() == texts(0, 1, 2)
    driver.restart()
    assert driver.step() == texts(3, 4)
    assert driver.step() == []
    before = driver.progress
    assert driver.plan() == before
    client.call("topic.grow", name=topic, partitions=2)
    client.call("topic.create", name=f"{topic}-2", partitions=1)
    client.send_many(topic, texts(5), partition=1)
    client.send_many(f"{topic}-2", texts(6))
    assert sorted(driver.step()) == texts(5, 6)
    for start, end in driver.batches:  # Spark repeats a batch whose end it has planned
        assert driver.run(start, end) == driver.run(start, end)
    assert driver.run(driver.batches[0][0], before) == texts(*range(5))


def test_available_now_ends_at_the_messages_of_its_beginning(
    drivers: Callable[..., StreamDriver], topic: str, client: txmq.Client
) -> None:
    client.send_many(topic, texts(0, 1))
    driver = drivers(topic=topic)
    driver.reader.prepareForTriggerAvailableNow()
    client.send_many(topic, texts(2))
    assert sorted(driver.step()) == texts(0, 1)
    assert driver.plan(all_available=True) == driver.progress
    driver.restart()
    assert driver.step() == texts(2)


def test_a_stream_starts_where_it_is_told(
    drivers: Callable[..., StreamDriver], topic: str, client: txmq.Client
) -> None:
    client.call("topic.create", name=topic, partitions=1)
    for text in texts(0, 1, 2):
        client.send(topic, text)
    stored = [found["stored_at"] for found in client.call("message.find", topic=topic)["messages"]]
    at = (EPOCH + timedelta(microseconds=stored[1])).isoformat()
    latest = drivers(topic=topic, startingOffsets="latest")
    given = drivers(topic=topic, startingOffsets=json.dumps({topic: {"0": 2}}))
    timed = drivers(topic=topic, startingTimestamp=at)
    client.send(topic, b"3")
    assert latest.step() == texts(3)
    assert given.step() == texts(2, 3)
    assert timed.step() == texts(*(n for n in range(3) if stored[n] >= stored[1]), 3)


def test_a_survey_that_takes_long_is_used_for_a_while(
    drivers: Callable[..., StreamDriver], topic: str, client: txmq.Client
) -> None:
    client.send_many(topic, texts(0))
    driver = drivers(topic=topic)
    driver.reader._rest = 1 << 40
    assert driver.step() == texts(0)
    client.send_many(topic, texts(1))
    assert driver.plan() == driver.progress
    driver.reader._rest = 0
    assert driver.step() == texts(1)


def test_letters_are_a_stream_in_the_order_of_their_deaths(
    drivers: Callable[..., StreamDriver], topic: str, client: txmq.Client
) -> None:
    client.call("topic.create", name=topic, partitions=1)
    client.send_many(topic, texts(0, 1, 2))
    let_die(client, topic, topic, texts(0, 1, 2), "concurrent")
    driver = drivers(letters=topic, maxOffsetsPerTrigger="2")
    latest = drivers(letters=topic, startingOffsets="latest")
    assert (driver.step(), driver.step(), driver.step()) == (texts(0, 1), texts(2), [])
    client.call("dlq.abandon", group=topic, letters=[[topic, 0, 1]], reason="a test")
    client.send_many(topic, texts(3))
    let_die(client, topic, topic, texts(3), "concurrent")
    driver.restart()
    assert driver.step() == latest.step() == texts(3)
    assert driver.run(*driver.batches[0]) == texts(0)  # closed letters are left out
    client.call("group.delete", group=topic, operator="tests", reason="a test")
    with pytest.raises(DataLoss, match="was deleted"):
        driver.plan()
    with pytest.raises(UnknownGroup):
        drivers(letters="nobody")


def test_a_limit_is_not_for_all_that_is_available(
    drivers: Callable[..., StreamDriver], topic: str, client: txmq.Client
) -> None:
    client.send_many(topic, texts(*range(5)))
    driver = drivers(topic=topic, maxOffsetsPerTrigger="2")
    assert driver.reader.getDefaultReadLimit() == ReadMaxRows(2)
    end = driver.plan(all_available=True)
    assert sorted(driver.run(driver.progress, end)) == texts(*range(5))
