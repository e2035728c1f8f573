"""librdkafka's own mock of Kafka, from its wheel: three nodes within this process.

It is a hostile one: it takes a later record after one that it refused, and does not
recognize copies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final

import confluent_kafka
from confluent_kafka import KafkaError, Producer

from txmq.broker.cluster.kafka_client import KafkaAddress
from txmq.testing.wait import PATIENCE_S

NODES: Final = (1, 2, 3)
TOPIC: Final = "log"
PRODUCE, FETCH = 0, 1  # Kafka's numbers of requests
CUT: Final = KafkaError._TRANSPORT  # the connection is cut instead of an answer
REFUSALS: Final = (
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.NOT_ENOUGH_REPLICAS,
    KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
)
# What a Python object has before librdkafka's handle.
OBJECT_BYTES: Final = 16
LONG_MS: Final = 3_600_000


class MockCluster:
    """A cluster that is a part of a client, and ends with the test."""

    _running: ClassVar[list[MockCluster]] = []

    def __init__(self) -> None:
        self._client = Producer(
            {"bootstrap.servers": "mock", "test.mock.num.brokers": len(NODES), "log_level": 0}
        )
        [path] = Path(confluent_kafka.__file__).parents[1].glob("confluent_kafka.libs/librdkafka*")
        self._library = ctypes.CDLL(str(path))
        handle = ctypes.c_void_p.from_address(id(self._client) + OBJECT_BYTES)
        self._library.rd_kafka_handle_mock_cluster.restype = ctypes.c_void_p
        self._cluster = ctypes.c_void_p(self._library.rd_kafka_handle_mock_cluster(handle))
        self._do("topic_create", TOPIC.encode(), 1, len(NODES))
        self._do("start_request_tracking")
        nodes = self._client.list_topics(TOPIC, timeout=PATIENCE_S).brokers.values()
        self.address = KafkaAddress(",".join(f"{node.host}:{node.port}" for node in nodes))
        self._running.append(self)

    @classmethod
    def end_all(cls) -> None:
        """End all clusters."""
        while cls._running:
            cls._running.pop()._client.close()

    @property
    def leader(self) -> int:
        topics = self._client.list_topics(TOPIC, timeout=PATIENCE_S).topics
        return int(topics[TOPIC].partitions[0].leader)

    def move_leader(self, node: int) -> None:
        """Make another node the leader of the partition."""
        self._do("partition_set_leader", TOPIC.encode(), 0, node)

    def refuse(self, errors: Sequence[int]) -> None:
        """Have the next records refused by these errors, one after the other."""
        self._answer(PRODUCE, [(error, 0) for error in errors])

    def refuse_reads(self, errors: Sequence[int]) -> None:
        """Likewise the next requests for records."""
        self._answer(FETCH, [(error, 0) for error in errors])

    def answer_late(self) -> None:
        """Take the next record at once, and answer in an hour."""
        self._answer(PRODUCE, [(0, LONG_MS)])

    def _answer(self, request: int, answers: Sequence[tuple[int, int]]) -> None:
        """Answer the next requests of a kind by errors after milliseconds.

        Answers that are set for a node hide those that are set for all of them.
        """
        flat = [number for answer in answers for number in answer]
        self._do("broker_push_request_error_rtts", self.leader, request, len(answers), *flat)

    def cut(self, *nodes: int) -> None:
        """End all connections to nodes, and take none until `mend`."""
        for node in nodes or NODES:
            self._do("broker_set_down", node)

    def mend(self) -> None:
        for node in NODES:
            self._do("broker_set_up", node)

    def produced(self) -> int:
        """Return how many requests to take a record have come since the last call."""
        count = ctypes.c_size_t()
        library = self._library
        library.rd_kafka_mock_get_requests.restype = ctypes.POINTER(ctypes.c_void_p)
        requests = library.rd_kafka_mock_get_requests(self._cluster, ctypes.byref(count))
        keys = [
            library.rd_kafka_mock_request_api_key(ctypes.c_void_p(requests[at]))
            for at in range(count.value)
        ]
        library.rd_kafka_mock_request_destroy_array(requests, count)
        self._do("clear_requests")
        return keys.count(PRODUCE)

    def _do(self, name: str, *args: object) -> None:
        getattr(self._library, f"rd_kafka_mock_{name}")(self._cluster, *args)
