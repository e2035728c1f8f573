"""The first record of a shared log's partition: written once, read by empty nodes."""

from __future__ import annotations

import time
from typing import Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from txmq.broker.cluster.kafka_client import KafkaAddress, unavailable
from txmq.broker.cluster.kafka_partition import LOST, NUMBER, SAFE_WRITES, WHOLE_READS
from txmq.errors import ConfigError
from txmq.store.shared.records import Genesis, decode, encode

WITHIN_S: Final = 15.0


def write_genesis(kafka: KafkaAddress, topic: str, genesis: Genesis) -> None:
    """Begin the log in an empty topic. Raises LogUnavailable where Kafka does not take
    it.
    """
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


def read_genesis(kafka: KafkaAddress, topic: str) -> Genesis:
    """Return what the topic begins with, for a node without a log; blocks.

    Raises ConfigError where it begins with something else, LogUnavailable where Kafka
    does not answer.
    """
    consumer = kafka.client(Consumer, WHOLE_READS)
    try:
        consumer.assign([TopicPartition(topic, NUMBER, 0)])
        message = _first(consumer)
    finally:
        consumer.close()
    record = decode(message) if message is not None else None
    if isinstance(record, Genesis):
        return record
    why = "is empty" if message is None else "does not begin with a log"
    raise ConfigError(
        "cluster.topic",
        f"{topic} {why}",
        hint="`txmq cluster create` begins one; where its beginning was removed, copy the data"
        " directory of another node (`txmq log backup`)",
    )


def _first(consumer: Consumer) -> bytes | None:
    """Return the first record, None for an empty topic; b"" where it was removed."""
    until = time.monotonic() + WITHIN_S
    while time.monotonic() < until:
        try:
            message = consumer.poll(0.1)
        except KafkaException as failed:
            raise unavailable("read the first record", failed.args[0]) from failed
        if message is None:
            continue
        error = message.error()
        if error is None:
            return message.value() or b""
        if error.code() == KafkaError._PARTITION_EOF:
            return None
        if error.code() in LOST:
            return b""
    raise unavailable("read the first record", KafkaError(KafkaError._TIMED_OUT))
