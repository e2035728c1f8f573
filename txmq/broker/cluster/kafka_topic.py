"""The topic of a shared log: how it is made, and what it must be like.

A topic may lose what it has acknowledged, by its settings alone: copies that are too
few, a leader elected from those that lag behind, records that are removed by their age.
A node does not start on such a topic.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from time import monotonic, sleep
from typing import Final, NamedTuple, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic

from txmq.broker.cluster.kafka_client import HINTS, KafkaAddress, unavailable
from txmq.errors import ConfigError
from txmq.store.shared.records import HEADER_SIZE, MOST_DATA

WITHIN_S: Final = 15.0
# Not all nodes of Kafka know at once of a new topic.
KNOWN_WITHIN_S, PAUSE_S = 5.0, 0.1
# What a topic has beside its settings.
PARTITIONS, REPLICAS = OF_COPIES = ("partitions", "replication.factor")
IN_SYNC: Final = "min.insync.replicas"
# Kafka counts what its own batch adds.
BATCH_BYTES: Final = 1 << 10
# A text is the only value that is right, a number the least one.
NEEDED: Final[Mapping[str, str | int]] = {
    PARTITIONS: "1",
    REPLICAS: 3,
    IN_SYNC: 2,
    "unclean.leader.election.enable": "false",
    "cleanup.policy": "delete",
    "retention.bytes": "-1",
    "retention.ms": "-1",
    "max.message.bytes": HEADER_SIZE + MOST_DATA + BATCH_BYTES,
}
Answer = TypeVar("Answer")
Key = TypeVar("Key")


class Topic(NamedTuple):
    """A topic as Kafka describes it.

    A topic that is made again under its name has another `id`, where the engine has
    ids. `settings` are Kafka's own and those of `NEEDED`.
    """

    id: str
    settings: Mapping[str, str | None]


def create(kafka: KafkaAddress, name: str, replicas: int = 3) -> bool:
    """Make a topic that loses nothing, unless there is one of that name. Return whether
    it was made. Raises ConfigError where Kafka refuses it.

    With fewer than three replicas it may, and takes records all the same.
    """
    admin = kafka.client(AdminClient)
    settings = {key: str(needed) for key, needed in NEEDED.items() if key not in OF_COPIES}
    settings[IN_SYNC] = str(min(replicas, 2))
    # Kafka refuses records of a node whose clock is an hour ahead.
    settings["message.timestamp.type"] = "LogAppendTime"
    new = NewTopic(name, num_partitions=1, replication_factor=replicas, config=settings)
    try:
        _answer(
            lambda: admin.create_topics([new], request_timeout=WITHIN_S), f"make the topic {name}"
        )
    except ConfigError as refused:
        if _code(refused) == KafkaError.TOPIC_ALREADY_EXISTS:
            return False
        raise
    return True


def check(kafka: KafkaAddress, name: str, accepted: Collection[str] = ()) -> Topic:
    """Return the topic if it loses nothing. Raises ConfigError with all that is wrong.

    `accepted` names settings that the operator wants to be so, or that the engine has
    not.
    """
    topic = describe(kafka, name)
    if faults := [*dangers(topic, accepted)]:
        raise ConfigError(
            "cluster.topic",
            f"{name} may lose what it has acknowledged: {'; '.join(faults)}",
            hint="`txmq cluster create` makes one that does not; "
            "what has to be so can be named in `cluster.accept`",
        )
    return topic


def describe(kafka: KafkaAddress, name: str) -> Topic:
    """Return what Kafka says of a topic. Raises ConfigError if there is none."""
    admin, doing = kafka.client(AdminClient), f"describe the topic {name}"
    names, resource = TopicCollection([name]), ConfigResource(ConfigResource.Type.TOPIC, name)
    topic = _answer(lambda: admin.describe_topics(names, request_timeout=WITHIN_S), doing)
    found = _answer(lambda: admin.describe_configs([resource], request_timeout=WITHIN_S), doing)
    settings = {key: entry.value for key, entry in found.items()}
    replicas = min(len(partition.replicas) for partition in topic.partitions)
    settings |= {PARTITIONS: str(len(topic.partitions)), REPLICAS: str(replicas)}
    return Topic(str(topic.topic_id), settings)


def dangers(topic: Topic, accepted: Collection[str]) -> Iterator[str]:
    """Yield what may lose records, each with its setting and what that must be."""
    for name, needed in NEEDED.items():
        value = topic.settings.get(name)
        if name in accepted:
            continue
        if value is None:
            yield f"{name} is not known, and must be {_bound(needed)}"
        elif int(value) < needed if isinstance(needed, int) else value != needed:
            yield f"{name} is {value}, and must be {_bound(needed)}"


def _code(refused: ConfigError) -> int | None:
    """Return Kafka's number for the reason of a refusal."""
    cause = refused.__cause__
    return cause.args[0].code() if isinstance(cause, KafkaException) else None


def _bound(needed: str | int) -> str:
    return f"at least {needed}" if isinstance(needed, int) else needed


def _answer(ask: Callable[[], Mapping[Key, Future[Answer]]], doing: str) -> Answer:
    """Return what Kafka answers. Raises ConfigError where it refuses, LogUnavailable
    where it does not answer.
    """
    asked_at = monotonic()
    while True:
        [done] = ask().values()
        try:
            return done.result()
        except KafkaException as failed:
            error = failed.args[0]
            is_unknown = error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART
            if error.code() < 0:  # librdkafka's own
                raise unavailable(doing, error) from failed
            if not is_unknown or monotonic() - asked_at > KNOWN_WITHIN_S:
                said, hint = f"Kafka refuses to {doing}: {error.str()}", HINTS.get(error.code(), "")
                raise ConfigError("cluster.topic", said, hint=hint) from failed
        sleep(PAUSE_S)
