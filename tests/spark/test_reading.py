"""Topics and letters as DataFrames, from a broker process."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException

from txmq.model.message import Message

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession

    import txmq


def source(spark: SparkSession, broker: str, topic: str) -> DataFrameReader:
    return spark.read.format("txmq").option("url", broker).option("topic", topic)


def bodies(frame: DataFrame) -> list[bytes]:
    return [
        bytes(row.body)
        for row in frame.orderBy("topic", "partition", "offset").select("body").collect()
    ]


def test_messages_are_read_as_they_were_sent(
    spark: SparkSession, broker: str, topic: str, client: txmq.Client
) -> None:
    client.call("topic.create", name=topic, partitions=2)
    sent = [
        Message(b"%d" % n, key=f"k{n % 3}", tag="even" if n % 2 == 0 else None) for n in range(500)
    ]
    receipts = client.send_batch(topic, sent)
    single = client.send(topic, b"\x00\xff", key="ключ", headers={"trace": "1", "": "empty"})
    rows = source(spark, broker, topic).load().collect()
    found = {(row.partition, row.offset): row for row in rows}
    assert len(rows) == len(found) == 501
    for message, receipt in zip(sent, receipts, strict=True):
        row = found[receipt.partition, receipt.offset]
        assert (row.body, row.key, row.tag, row.message_id, row.headers) == (
            *message[:3],
            receipt.message_id,
            None,
        )
    last = found[single.partition, single.offset]
    assert (last.topic, last.key, last.headers, last.attempt) == (
        topic,
        "ключ",
        {"trace": "1", "": "empty"},
        1,
    )
    assert last.born_at.year >= 2024


def test_an_action_reads_a_fixed_set(
    spark: SparkSession, broker: str, topic: str, client: txmq.Client
) -> None:
    client.call("topic.create", name=topic, partitions=1)
    client.send_many(topic, [b"%d" % n for n in range(100)])
    ends = json.dumps({topic: {"0": 100}})
    frozen = (
        source(spark, broker, topic).option("endingOffsets", ends).option("minPartitions", 3).load()
    )
    client.send_many(topic, [b"later"] * 10)
    assert bodies(frozen) == [b"%d" % n for n in range(100)]
    assert frozen.rdd.getNumPartitions() == 3
    starts = json.dumps({topic: {"0": 95}})
    assert source(spark, broker, topic).option("startingOffsets", starts).load().count() == 15


def test_columns_are_chosen_by_a_schema(
    spark: SparkSession, broker: str, topic: str, client: txmq.Client
) -> None:
    client.send(topic, b"x", key="k")
    assert source(spark, broker, topic).schema("key string, offset bigint").load().collect() == [
        ("k", 0)
    ]
    with pytest.raises(PySparkException, match="there is no column key int"):
        source(spark, broker, topic).schema("key int").load().collect()


def test_an_empty_topic_has_no_rows(
    spark: SparkSession, broker: str, topic: str, client: txmq.Client
) -> None:
    client.call("topic.create", name=topic, partitions=3)
    assert source(spark, broker, topic).load().collect() == []


def test_the_error_for_an_unknown_topic_names_it(spark: SparkSession, broker: str) -> None:
    with pytest.raises(PySparkException, match="there is no topic 'nowhere'"):
        source(spark, broker, "nowhere").load().collect()
