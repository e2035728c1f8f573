"""What a partition of Kafka promises a node, over librdkafka's mock of Kafka."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError
from structlog.testing import capture_logs

from tests.broker.cluster.loop import Loop
from tests.broker.cluster.mock_cluster import TOPIC, MockCluster
from txmq.broker.cluster import kafka_client, kafka_partition
from txmq.broker.cluster.kafka_client import KafkaAddress
from txmq.broker.cluster.kafka_partition import KafkaPartition
from txmq.errors import ConfigError, LogUnavailable
from txmq.store.shared.records import HEADER_SIZE, MOST_DATA
from txmq.testing.wait import PATIENCE_S, wait_until

RECORDS = [b"%d" % number for number in range(50)]


class Bench:
    """A mock cluster, and what its partitions have told."""

    def __init__(self) -> None:
        self.cluster, self.loop = MockCluster(), Loop()
        self.partitions: list[KafkaPartition] = []
        self.reports: list[tuple[Exception | None, int | None]] = []
        self.records: list[tuple[int, bytes]] = []
        self.ends: list[int] = []
        self.lost: list[int] = []

    def partition(self, report_within_s: float = 600.0) -> KafkaPartition:
        partition = KafkaPartition(
            self.loop, self.cluster.address, TOPIC, report_within_s=report_within_s
        )
        self.partitions.append(partition)
        return partition

    def produce(self, partition: KafkaPartition, *records: bytes) -> None:
        """Produce records, and wait for their reports."""
        due = len(self.reports) + len(records)
        for record in records:
            partition.produce(record, self.report)
        self.loop.run_until(lambda: len(self.reports) == due, "reports")

    def is_taken(self, partition: KafkaPartition, record: bytes) -> bool:
        self.produce(partition, record)
        return self.reports[-1][0] is None

    def report(self, error: Exception | None, offset: int | None) -> None:
        self.reports.append((error, offset))

    def read(self, partition: KafkaPartition, offset: int = 0) -> None:
        partition.read_from(
            offset,
            lambda at, data: self.records.append((at, data)),
            self.ends.append,
            self.lost.append,
        )


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    for partition in bench.partitions:
        partition.close()


def test_records_come_in_their_order_with_the_offsets_that_were_reported(bench: Bench) -> None:
    writer, reader = bench.partition(), bench.partition()
    bench.produce(writer, *RECORDS)
    assert bench.reports == [(None, offset) for offset in range(len(RECORDS))]
    bench.read(reader)
    bench.loop.run_until(lambda: bench.ends, "the end")
    assert bench.records == [*enumerate(RECORDS)]
    assert bench.ends == [len(RECORDS)]
    bench.produce(writer, b"more")
    bench.loop.run_until(lambda: len(bench.ends) > 1, "the end again")
    assert bench.records[-1] == (len(RECORDS), b"more")
    assert bench.ends[-1] == len(RECORDS) + 1
    assert bench.lost == []


def test_a_reader_begins_where_it_was(bench: Bench) -> None:
    bench.produce(bench.partition(), *RECORDS)
    bench.read(bench.partition(), 40)
    bench.loop.run_until(lambda: bench.ends, "the end")
    assert bench.records == [*enumerate(RECORDS)][40:]


def test_a_reader_of_an_empty_partition_has_read_all(bench: Bench) -> None:
    bench.read(bench.partition())
    bench.loop.run_until(lambda: bench.ends, "the end")
    assert (bench.records, bench.ends) == ([], [0])


def test_a_reader_whose_offset_is_away_is_told_the_first_and_gets_nothing(bench: Bench) -> None:
    bench.produce(bench.partition(), *RECORDS)
    bench.read(bench.partition(), 1_000)
    bench.loop.run_until(lambda: bench.lost, "what was lost")
    assert (bench.records, bench.ends, bench.lost) == ([], [], [0])


def test_a_record_that_nobody_takes_has_failed_in_time_and_the_next_one_is_tried(
    bench: Bench,
) -> None:
    writer = bench.partition(report_within_s=0.5)
    bench.cluster.cut()
    bench.produce(writer, b"lost", b"lost too")
    for error, offset in bench.reports:
        assert offset is None
        assert isinstance(error, LogUnavailable)
        assert (error.retriable, error.outcome) == (True, "unknown")
    assert "min.insync.replicas" in str(bench.reports[0][0])
    bench.cluster.mend()
    # Whether half a second is enough now is up to the machine.
    wait_until(lambda: bench.is_taken(writer, b"next"), what="a record is taken")


def test_a_record_that_is_too_large_has_failed_at_once(bench: Bench) -> None:
    writer = bench.partition()
    bench.produce(writer, bytes(2 << 20))
    bench.produce(writer, bytes(HEADER_SIZE + MOST_DATA))
    (error, _), (fits, offset) = bench.reports
    assert isinstance(error, LogUnavailable)
    assert "max.message.bytes" in error.hint
    assert (fits, offset) == (None, 0)


def test_reading_goes_on_after_an_outage(bench: Bench) -> None:
    writer, reader = bench.partition(), bench.partition()
    bench.read(reader)
    bench.produce(writer, b"before")
    bench.loop.run_until(lambda: bench.records, "a record")
    bench.cluster.cut()
    bench.cluster.mend()
    bench.produce(writer, b"after")
    bench.loop.run_until(lambda: len(bench.records) == 2, "the next record")
    assert bench.records == [(0, b"before"), (1, b"after")]


def test_an_error_of_a_read_skips_no_record(bench: Bench) -> None:
    writer, reader = bench.partition(), bench.partition()
    bench.read(reader)
    bench.produce(writer, b"before")
    bench.loop.run_until(lambda: bench.records, "a record")
    bench.cluster.refuse_reads(
        [KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.UNKNOWN_TOPIC_OR_PART] * 2
    )
    bench.produce(writer, *RECORDS)
    bench.loop.run_until(lambda: len(bench.records) > len(RECORDS), "the next records")
    assert bench.records == [*enumerate([b"before", *RECORDS])]
    assert bench.lost == []


def test_a_reader_that_hears_nothing_goes_on_with_a_new_consumer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_partition, "REOPEN_S", 0.0)
    writer, reader = bench.partition(), bench.partition()
    bench.read(reader)
    thread = reader._reader
    assert thread is not None
    first = thread._consumer

    def is_new() -> bool:
        bench.loop.run_waiting()  # the end of the first one may come before
        return thread._consumer is not first

    wait_until(is_new, what="a new consumer")
    bench.produce(writer, *RECORDS)
    monkeypatch.setattr(kafka_partition, "REOPEN_S", PATIENCE_S)
    bench.loop.run_until(lambda: len(bench.records) == len(RECORDS), "the records")
    assert bench.records == [*enumerate(RECORDS)]
    assert bench.lost == []


def test_trouble_of_one_kind_is_logged_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now, kafka = [0.0], KafkaAddress("127.0.0.1:1")
    monkeypatch.setattr(kafka_client, "monotonic", lambda: now[0])
    with capture_logs() as logged:
        for now[0] in (0.0, 59.0, 61.0):
            kafka.note(KafkaError(KafkaError._TRANSPORT))
            kafka.note(KafkaError(KafkaError._AUTHENTICATION))
    assert [line["hint"].split()[0] for line in logged] == ["are", "check"] * 2


def test_nothing_is_told_after_the_end(bench: Bench) -> None:
    writer, reader = bench.partition(), bench.partition()
    bench.produce(writer, *RECORDS)
    bench.read(reader)
    bench.loop.wait()
    reader.close()
    bench.loop.run_waiting()
    assert (bench.records, bench.ends) == ([], [])


def test_a_call_that_closes_the_partition_is_the_last_one(bench: Bench) -> None:
    writer, reader = bench.partition(), bench.partition()
    bench.produce(writer, *RECORDS)
    taken: list[int] = []

    def take(offset: int, _data: bytes) -> None:
        taken.append(offset)
        reader.close()

    reader.read_from(0, take, taken.append, taken.append)
    bench.loop.run_until(lambda: taken, "a record")
    bench.loop.run_waiting()
    assert taken == [0]


@pytest.mark.parametrize("outage", [None, MockCluster.cut])
def test_the_threads_end_whether_kafka_answers_or_not(
    bench: Bench, outage: Callable[[MockCluster], None] | None
) -> None:
    before = {*threading.enumerate()}
    partition = bench.partition()
    bench.read(partition)
    bench.produce(partition, *RECORDS)
    if outage is not None:
        outage(bench.cluster)
        partition.produce(b"under way", bench.report)
    threads = {*threading.enumerate()} - before
    assert len(threads) == 2
    partition.close()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    bench.loop.run_waiting()
    assert len(bench.reports) == len(RECORDS)


@pytest.mark.parametrize("option", ["acks", "enable.idempotence", "bootstrap.servers", "debug"])
def test_an_option_that_is_not_about_connections_is_refused(option: str) -> None:
    partition = KafkaPartition(Loop(), KafkaAddress("127.0.0.1:1", {option: "1"}), TOPIC)
    with pytest.raises(ConfigError, match=rf"^cluster\.options\.{option}: .*security\."):
        partition.produce(b"", print)


def test_an_address_that_is_shown_has_no_password() -> None:
    address = KafkaAddress("kafka-1:9092", {"sasl.password": "s3cret"})
    assert repr(address) == "KafkaAddress(servers='kafka-1:9092')"


def test_an_option_that_librdkafka_does_not_know_is_named() -> None:
    partition = KafkaPartition(Loop(), KafkaAddress("127.0.0.1:1", {"sasl.word": "1"}), TOPIC)
    with pytest.raises(ConfigError, match=r"^cluster\.options: .*sasl\.word"):
        partition.produce(b"", print)


class BusyLog:
    """A consumer of a partition in which there is another record whenever it asks."""

    def __init__(self) -> None:
        self.read = 0

    def assign(self, _places: object) -> None: ...
    def close(self) -> None: ...
    def consume(self, _most: int, timeout: float) -> list[object]:
        return []

    def poll(self, _timeout: float) -> object:
        offset, self.read = self.read, self.read + 1
        return SimpleNamespace(
            error=lambda: None,
            offset=lambda: offset,
            value=lambda: b"x",
            leader_epoch=lambda: 1,
        )

    def get_watermark_offsets(self, _place: object, *, cached: bool) -> tuple[int, int]:
        assert cached
        return 0, max(self.read, 10)


def test_a_reader_that_keeps_up_has_all_though_nobody_stops_to_write(bench: Bench) -> None:
    kafka: Any = SimpleNamespace(client=lambda _kind, _settings: BusyLog())
    reader = KafkaPartition(bench.loop, kafka, TOPIC)
    bench.partitions.append(reader)
    bench.read(reader)
    bench.loop.run_until(lambda: bench.ends, "it has all")
    assert bench.ends[0] == 10
    assert len(bench.records) == 10
