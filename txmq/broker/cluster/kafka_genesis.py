"""Single records of a shared log's partition, read before a node follows it.

The first one is the genesis: written once, read by empty nodes. Another one is that of
a node's place, which tells whether the partition is still the one that the node read.
The latest ones name the node that leads, from which others copy its log.
"""

from __future__ import annotations

import time
from typing import Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from txmq.broker.cluster.kafka_client import KafkaAddress, unavailable
from txmq.broker.cluster.kafka_partition import LOST, NUMBER, SAFE_WRITES, WHOLE_READS
from txmq.errors import ConfigError, LogUnavailable, StoreError
from txmq.store.log.cut import LONGEST_COPY
from txmq.store.log_copy import CopyNeeded
from txmq.store.shared.known_nodes import SILENT_AFTER_S
from txmq.store.shared.records import Genesis, NodeStatus, Slice, checksum_of, decode, encode
from txmq.store.shared.rules import NO_NONCE, Place

WITHIN_S: Final = 15.0
LOOK_BACK: Final = 4_096  # offsets before the end, where the leader may have said of itself


def begin_log(kafka: KafkaAddress, topic: str, genesis: Genesis) -> Genesis:
    """Begin a log in an empty topic, and return how the topic's log begins: where
    several begin one, the first counts.

    Raises ConfigError where the topic has something else, CopyNeeded where the
    beginning was removed, LogUnavailable where Kafka does not take the record or does
    not answer.
    """
    found = find_genesis(kafka, topic)
    if found is None:
        _write(kafka, topic, genesis)
        found = find_genesis(kafka, topic)
    assert found is not None, "a record was written"
    return found


def read_genesis(kafka: KafkaAddress, topic: str) -> Genesis:
    """Return what the topic begins with, for a node without a log; blocks.

    Raises ConfigError where it begins with something else, CopyNeeded where that was
    removed, LogUnavailable where Kafka does not answer.
    """
    found = find_genesis(kafka, topic)
    if found is None:
        raise ConfigError(
            "cluster.topic", f"{topic} is empty", hint="`txmq cluster create` begins a log there"
        )
    return found


def require_known(kafka: KafkaAddress, topic: str, place: Place) -> None:
    """Raise StoreError where a topic lacks the record at a place, or has another one;
    CopyNeeded where the record was removed. Raises LogUnavailable where Kafka does not
    answer.
    """
    found = _record(kafka, topic, place.offset)
    if found == b"":
        raise CopyNeeded(f"{topic} begins behind offset {place.offset}", keep=place.whole)
    if found is None or checksum_of(found) != place.checksum:
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


def find_genesis(kafka: KafkaAddress, topic: str) -> Genesis | None:
    """Return how the topic's log begins, None where it is empty. Raises as
    `read_genesis` does.
    """
    data = _record(kafka, topic, 0)
    if data is None:
        return None
    record = decode(data)
    if isinstance(record, Genesis):
        return record
    if not data:
        raise CopyNeeded(f"{topic} has a log whose beginning was removed, as retention does")
    raise ConfigError(
        "cluster.topic", f"{topic} has records that are no log's", hint="name a topic of its own"
    )


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


def find_leader(kafka: KafkaAddress, topic: str) -> NodeStatus:
    """Return what the leader says of itself, once it has; it does so every 30 s.

    Raises LogUnavailable where Kafka does not answer, or nobody leads.
    """
    consumer, place = kafka.client(Consumer, WHOLE_READS), TopicPartition(topic, NUMBER)
    try:
        first, end = consumer.get_watermark_offsets(place, timeout=WITHIN_S)
        start = TopicPartition(topic, NUMBER, max(first, end - LOOK_BACK))
        consumer.assign([start])
        return _leader(consumer, end)
    except KafkaException as failed:
        raise unavailable("name the leader", failed.args[0]) from failed
    finally:
        consumer.close()


def _leader(consumer: Consumer, end: int) -> NodeStatus:
    """Return the node that has the latest epoch, as of the offset `end` or later."""
    said: dict[bytes, NodeStatus] = {}
    epoch, nonce, read_to = -1, NO_NONCE, -1
    until = time.monotonic() + SILENT_AFTER_S
    while time.monotonic() < until:
        message = consumer.poll(0.1)
        if message is not None and message.error() is None:
            record, read_to = decode(message.value() or b""), message.offset() or 0
            if isinstance(record, Slice) and record.epoch >= epoch:  # it beats all the time
                epoch, nonce = record.epoch, record.nonce
            elif isinstance(record, NodeStatus) and not record.leaves:
                said[record.nonce] = record
        is_at_end = message is not None and message.error() is not None
        if nonce in said and (is_at_end or read_to + 1 >= end):
            return said[nonce]
    raise LogUnavailable("no node leads", hint="are other nodes up?")
