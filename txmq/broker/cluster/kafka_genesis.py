"""Single records of a shared log's partition, read before a node follows it.

The first one is the genesis: written once, read by empty nodes. Another one is that of
a node's place, which tells whether the partition is still the one that the node read.
"""

from __future__ import annotations

import time
from typing import Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from txmq.broker.cluster.kafka_client import KafkaAddress, unavailable
from txmq.broker.cluster.kafka_partition import LOST, NUMBER, SAFE_WRITES, WHOLE_READS
from txmq.errors import ConfigError, StoreError
from txmq.store.log.cut import ANOTHER_COPY, LONGEST_COPY
from txmq.store.shared.records import Genesis, checksum_of, decode, encode
from txmq.store.shared.rules import Place

WITHIN_S: Final = 15.0


def begin_log(kafka: KafkaAddress, topic: str, genesis: Genesis) -> Genesis:
    """Begin a log in an empty topic, and return how the topic's log begins: where
    several begin one, the first counts.

    Raises ConfigError where the topic has something else, LogUnavailable where Kafka
    does not take the record or does not answer.
    """
    found = _genesis(kafka, topic)
    if found is None:
        _write(kafka, topic, genesis)
        found = _genesis(kafka, topic)
    assert found is not None, "a record was written"
    return found


def read_genesis(kafka: KafkaAddress, topic: str) -> Genesis:
    """Return what the topic begins with, for a node without a log; blocks.

    Raises ConfigError where it begins with something else, LogUnavailable where Kafka
    does not answer.
    """
    found = _genesis(kafka, topic)
    if found is None:
        raise ConfigError(
            "cluster.topic", f"{topic} is empty", hint="`txmq cluster create` begins a log there"
        )
    return found


def require_known(kafka: KafkaAddress, topic: str, place: Place) -> None:
    """Raise StoreError where a topic lacks the record at a place, or has another one.

    What was forgotten there is not lacking: the node learns that by itself. Raises
    LogUnavailable where Kafka does not answer.
    """
    found = _record(kafka, topic, place.offset)
    if found is None or (found and checksum_of(found) != place.checksum):
        raise StoreError(
            f"{topic} is not the topic that this node has read: it has no such record at"
            f" offset {place.offset}",
            hint=f"nothing of this copy was changed: {LONGEST_COPY}",
        )


def _write(kafka: KafkaAddress, topic: str, genesis: Genesis) -> None:
    producer = kafka.client(Producer, {**SAFE_WRITES, "message.timeout.ms": int(WITHIN_S * 1_000)})
    failures: list[KafkaError | None] = []
    producer.produce(
        topic,
        encode(genesis),
        partition=NUMBER,
        on_delivery=lambda error, _: failures.append(error),
    )
    producer.flush(WITHIN_S + 1)
    if error := next(iter(failures), KafkaError(KafkaError._TIMED_OUT)):
        raise unavailable("take the first record", error)


def _genesis(kafka: KafkaAddress, topic: str) -> Genesis | None:
    """Return how the topic's log begins, None where it is empty. Raises ConfigError."""
    data = _record(kafka, topic, 0)
    if data is None:
        return None
    record = decode(data)
    if isinstance(record, Genesis):
        return record
    if not data:
        said = "has a log whose beginning was removed, as retention does"
        hint = "begin an empty node with a copy of another one's: " + ANOTHER_COPY
    else:
        said, hint = "has records that are no log's", "name a topic of its own"
    raise ConfigError("cluster.topic", f"{topic} {said}", hint=hint)


def _record(kafka: KafkaAddress, topic: str, offset: int) -> bytes | None:
    """Return the first record from an offset on, None where the topic ends there or
    before. It is empty where the record was removed.
    """
    consumer, place = kafka.client(Consumer, WHOLE_READS), TopicPartition(topic, NUMBER, offset)
    until = time.monotonic() + WITHIN_S
    try:
        consumer.assign([place])
        while time.monotonic() < until:
            message = consumer.poll(0.1)
            if message is None:
                continue
            error = message.error()
            if error is None:
                return message.value() or b""
            if error.code() == KafkaError._PARTITION_EOF:
                return None
            if error.code() in LOST:
                first, _next = consumer.get_watermark_offsets(place, timeout=WITHIN_S)
                return b"" if offset < first else None
    except KafkaException as failed:
        raise unavailable(f"read the record at {offset}", failed.args[0]) from failed
    finally:
        consumer.close()
    raise unavailable(f"read the record at {offset}", KafkaError(KafkaError._TIMED_OUT))
