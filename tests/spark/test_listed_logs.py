"""Reads of several logs, of which operators add and remove some meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from unittest.mock import Mock
from uuid import uuid4

import psycopg2
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from structlog.testing import capture_logs

import txmq
from tests.client.listed import BY, add_logs, ask
from tests.spark.consuming import drain, let_die
from tests.spark.queries import require_late_worker, run_to_end
from tests.spark.stream_driver import StreamDriver, texts
from txmq.errors import ConfigError, LogChanged, UnknownGroup, UnknownTopic
from txmq.testing.broker_thread import BrokerThread
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq_spark import TxmqDataSource
from txmq_spark.alerts.watch_rules import WatchRules
from txmq_spark.database.mapping import BusinessTable, Mapping
from txmq_spark.plan.rules import LetterClass
from txmq_spark.reconcile import ReconcileOptions, reconciled
from txmq_spark.replay import ReplayOptions, expected, replay
from txmq_spark.source.logs import Logs, survey_removed
from txmq_spark.source.message_reading import message_look
from txmq_spark.source.offset_ranges import DataLoss
from txmq_spark.source.options import ReadOptions
from txmq_spark.watching import AgeWatch, WatchOptions, groups_of_topics

TOPIC = "orders"


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[list[BrokerThread]]:
    """Three brokers, of which none knows of the others."""
    with ExitStack() as opened:
        yield [opened.enter_context(BrokerThread(tmp_path / name)) for name in "abc"]


def send(broker: BrokerThread, *numbers: int, topic: str = TOPIC) -> None:
    with txmq.connect(broker.url, timeout=PATIENCE_S) as client:
        client.send_many(topic, texts(*numbers), partition=0)


def log_id(broker: BrokerThread) -> str:
    return str(ask(broker, "broker.show")["log_id"])


def let_die_at(broker: BrokerThread, body: bytes = b"") -> None:
    """Send a message that becomes a dead letter."""
    with txmq.connect(broker.url, timeout=PATIENCE_S) as client:
        client.send(TOPIC, body)
        let_die(client, "billing", TOPIC, [body])


def read_all(options: dict[str, str]) -> list[tuple[str, bytes]]:
    """Return log and body of each row of a batch, without Spark."""
    source = TxmqDataSource(options)
    reader = source.reader(source.schema())
    found: list[tuple[str, bytes]] = []
    for task in reader.partitions():
        for batch in reader.read(task):
            assert isinstance(batch, pa.RecordBatch)
            found += [(row["log"], row["body"]) for row in batch.to_pylist()]
    return sorted(found)


def remove(first: BrokerThread, other: BrokerThread) -> None:
    """Remove a log from the list, which it must not have keys for."""
    ask(first, "cluster.drain_log", log_id=log_id(other), **BY)
    ask(first, "cluster.remove_log", log_id=log_id(other), **BY)


def test_a_stream_reads_a_log_that_is_added_from_its_first_message_on(
    logs: list[BrokerThread],
) -> None:
    send(logs[0], 0, 1)
    send(logs[1], 10, 11)
    with StreamDriver(url=logs[0].url, topic=TOPIC, startingOffsets="latest") as driver:
        before = driver.progress
        assert driver.step() == []
        assert driver.progress == before, "as of one log"
        send(logs[0], 2)
        planned = driver.plan()
        add_logs(logs[0], logs[1], together=True)
        assert driver.run(driver.progress, planned) == texts(2), "as it was planned"
        driver.progress = planned
        assert driver.step() == texts(10, 11)
        assert driver.step() == []
        driver.restart(url=logs[1].url, topic=TOPIC)  # finds the others by this one, too
        send(logs[1], 12)
        add_logs(logs[0], logs[2])
        send(logs[2], 20)
        send(logs[0], 3)
        assert sorted(driver.step()) == sorted(texts(12, 20, 3))
        start, end = driver.batches[-1]
        assert sorted(driver.run(start, end)) == sorted(texts(12, 20, 3)), "it is run again"


def test_a_run_that_ends_leaves_a_log_that_is_added_to_the_next_one(
    logs: list[BrokerThread],
) -> None:
    send(logs[0], 0)
    send(logs[1], 10)
    with StreamDriver(url=logs[0].url, topic=TOPIC) as driver:
        driver.reader.prepareForTriggerAvailableNow()
        add_logs(logs[0], logs[1], together=True)
        assert driver.step() == texts(0)
        assert driver.step() == []
        driver.restart()
        driver.reader.prepareForTriggerAvailableNow()
        assert driver.step() == texts(10)


def test_a_limit_holds_for_all_logs_together(logs: list[BrokerThread]) -> None:
    send(logs[0], *range(6))
    send(logs[1], *range(10, 16))
    add_logs(logs[0], logs[1], together=True)
    with StreamDriver(url=logs[0].url, topic=TOPIC, maxOffsetsPerTrigger="4") as driver:
        read = [driver.step() for _ in range(3)]
        assert [len(one) for one in read] == [4, 4, 4]
        assert sorted(body for one in read for body in one) == sorted(
            texts(*range(6), *range(10, 16))
        )


def test_a_log_that_is_removed_is_read_to_its_end_and_left(logs: list[BrokerThread]) -> None:
    send(logs[0], 0)
    add_logs(logs[0], logs[1], together=False)
    send(logs[1], 10, 11, 12)
    options = {"url": logs[0].url, "topic": TOPIC, "maxOffsetsPerTrigger": "2"}
    with StreamDriver(**options) as driver:
        assert len(driver.step()) == 2
        remove(logs[0], logs[1])
        driver.restart()  # knows it by the progress alone
        read = [body for start, end in driver.batches for body in driver.run(start, end)]
        while not json.loads(driver.plan())["others"][0].get("left"):
            read += driver.step()
        read += driver.step()
        assert sorted(read) == sorted(texts(0, 10, 11, 12))
        start, end = driver.batches[0]
        logs[1].stop()
        driver.restart()
        send(logs[0], 1)
        assert driver.step() == texts(1)
        with pytest.raises(DataLoss, match="listed no more"):
            driver.run(start, end)
        last, left = driver.batches[-2]
        assert driver.run(last, left) == [], "it was planned at the end of that log"


def test_a_log_that_is_removed_and_away_is_an_error_until_its_loss_is_taken(
    logs: list[BrokerThread],
) -> None:
    send(logs[0], 0)
    add_logs(logs[0], logs[1], together=False)
    send(logs[1], 10)
    with StreamDriver(url=logs[0].url, topic=TOPIC) as driver:
        assert sorted(driver.step()) == sorted(texts(0, 10))
        remove(logs[0], logs[1])
        logs[1].stop()
        with pytest.raises(DataLoss, match="listed no more"):
            driver.plan()
        send(logs[0], 1)
        driver.restart(url=logs[0].url, topic=TOPIC, failOnDataLoss="false")
        assert driver.step() == texts(1)
        assert "others" not in json.loads(driver.progress)


def test_a_log_that_is_listed_where_another_one_answers_is_refused(
    logs: list[BrokerThread],
) -> None:
    send(logs[0], 0)
    send(logs[2], 20)
    with StreamDriver(url=logs[0].url, topic=TOPIC) as driver:
        add_logs(logs[0], logs[1], together=True)
        place = logs[2].url.removeprefix("txmq://")
        ask(logs[0], "cluster.add_logs", logs=[{"log_id": uuid4().hex, "addresses": place}], **BY)
        with pytest.raises(LogChanged):
            driver.plan()
        let_die_at(logs[2], b"21")
        letters = {"url": logs[2].url, "letters": "billing"}
        source = TxmqDataSource(letters)
        reader = source.reader(source.schema())
        [planned] = reader.partitions()
        planned.value = planned.value._replace(log_id=log_id(logs[1]))
        with pytest.raises(LogChanged):
            list(reader.read(planned))


def test_a_batch_reads_all_logs_or_one_of_them(logs: list[BrokerThread]) -> None:
    send(logs[0], 0, 1)
    send(logs[1], 10)
    add_logs(logs[0], logs[1], together=True)
    ids = [log_id(one) for one in logs[:2]]

    def read(**options: str) -> list[tuple[str, bytes]]:
        return read_all({"url": logs[1].url, "topic": TOPIC} | options)

    assert read() == sorted(zip([ids[0], ids[0], ids[1]], texts(0, 1, 10), strict=True))
    assert read(log=ids[1]) == [(ids[1], b"10")]
    with pytest.raises(ConfigError, match="each has offsets of its own"):
        read(startingOffsets=json.dumps({TOPIC: {"0": 1}}))
    assert read(startingOffsets=json.dumps({TOPIC: {"0": 1}}), log=ids[0]) == [(ids[0], b"1")]
    with pytest.raises(ConfigError, match="there is no log"):
        read(log=log_id(logs[2]))
    with pytest.raises(UnknownTopic):
        read(topic="nowhere")


def test_letters_of_all_logs_come_with_their_logs(logs: list[BrokerThread]) -> None:
    add_logs(logs[0], logs[1], together=True)

    def letters() -> list[tuple[str, bytes]]:
        return read_all({"url": logs[0].url, "letters": "billing"})

    with pytest.raises(UnknownGroup):
        letters()
    let_die_at(logs[0], b"0")
    with StreamDriver(url=logs[0].url, letters="billing") as driver:
        assert driver.step() == [b"0"]
        let_die_at(logs[1], b"1")
        assert driver.step() == [b"1"]
        add_logs(logs[0], logs[2])
        let_die_at(logs[2], b"2")
        assert driver.step() == [b"2"]
        assert driver.step() == []
    assert letters() == sorted((log_id(one), b"%d" % n) for n, one in enumerate(logs))


def test_a_watch_takes_the_topics_of_a_group_from_all_logs(logs: list[BrokerThread]) -> None:
    add_logs(logs[0], logs[1], together=True)
    let_die_at(logs[1])
    assert groups_of_topics(logs[0].url, ["billing"]) == {TOPIC: ["billing"]}
    let_die_at(logs[0])
    assert groups_of_topics(logs[0].url, ["billing"]) == {TOPIC: ["billing"]}
    with pytest.raises(UnknownGroup):
        groups_of_topics(logs[0].url, ["nobody"])


def test_a_log_that_is_listed_no_more_is_waited_for_elsewhere(logs: list[BrokerThread]) -> None:
    options = ReadOptions(logs[0].url, (TOPIC,))
    send(logs[0], 0)
    with Logs(options) as found:
        [place] = found.places()
        removed = found.removed(place.link.log_id, "")
        assert removed is not None
        assert removed.link is place.link, "that of the URL, which has to be there"
        [survey] = survey_removed(removed, message_look(options))
        assert survey.survey.ends()[TOPIC, 0] == 1
        assert place.link.patient


def test_a_log_that_an_old_list_has_need_not_be_there(logs: list[BrokerThread]) -> None:
    send(logs[0], 0)
    send(logs[1], 10)
    add_logs(logs[0], logs[1], together=True)
    add_logs(logs[0], logs[2], together=False)
    remove(logs[0], logs[2])  # of which the other was not told
    logs[2].stop()
    found = read_all({"url": logs[1].url, "topic": TOPIC})
    assert sorted(body for _log, body in found) == sorted(texts(0, 10))


def test_the_oldest_letter_of_each_log_is_told_once(logs: list[BrokerThread]) -> None:
    sinks, query = Mock(), Mock(id="query")
    watch = AgeWatch(
        WatchOptions(logs[0].url, ("billing",), "alerts", "", rules=WatchRules(age=0)), sinks
    )
    add_logs(logs[0], *logs[1:], together=True)
    with capture_logs() as told:
        watch.tell(query)
    assert [one["event"] for one in told] == ["spark.ages_untold"]  # no log has the group
    for one in logs[1:]:
        let_die_at(one)
    watch.tell(query)
    assert sinks.send.call_count == 2
    watch.tell(query)
    assert sinks.send.call_count == 2


def test_a_query_of_spark_goes_on_with_a_log_that_is_added(
    spark: SparkSession, logs: list[BrokerThread], tmp_path: Path
) -> None:
    send(logs[0], 0, 1)
    send(logs[1], 10)
    stream = spark.readStream.format("txmq").options(url=logs[0].url, topic=TOPIC).load()
    writer = stream.select("log", "body").writeStream.format("parquet")
    writer = writer.option("path", str(tmp_path / "lake"))
    writer = writer.option("checkpointLocation", str(tmp_path / "progress"))

    def landed() -> list[tuple[str, bytes]]:
        rows = spark.read.parquet(str(tmp_path / "lake")).collect()
        return sorted((row["log"], bytes(row["body"])) for row in rows)

    ids = [log_id(one) for one in logs]
    run_to_end(writer)
    assert landed() == [(ids[0], b"0"), (ids[0], b"1")]
    query = writer.trigger(processingTime="0 seconds").start()

    def has_read(messages: int) -> bool:
        nonlocal query
        failure = query.exception()
        if failure is not None:
            require_late_worker(failure)
            query = writer.start()
        return len(landed()) == messages

    try:
        add_logs(logs[0], logs[1], together=True)
        wait_until(lambda: has_read(3), 2 * PATIENCE_S, what="it reads the log that was added")
        add_logs(logs[0], logs[2])
    finally:
        query.stop()
    send(logs[2], 20)
    run_to_end(writer)
    expected = [(ids[0], b"0"), (ids[0], b"1"), (ids[1], b"10"), (ids[2], b"20")]
    assert landed() == sorted(expected)


def test_a_plan_is_of_one_log_and_knows_messages_of_all(
    spark: SparkSession, database: str, tmp_path: Path
) -> None:
    with ExitStack() as opened:
        logs = [
            opened.enter_context(BrokerThread(tmp_path / name, databases={"shop": database}))
            for name in "ab"
        ]
        connection = opened.enter_context(closing(psycopg2.connect(database)))
        with connection, connection.cursor() as cursor:
            cursor.execute("CREATE TABLE orders (id text PRIMARY KEY, written_by uuid)")
        clients = [
            opened.enter_context(txmq.connect(one.url, timeout=PATIENCE_S, service="shop"))
            for one in logs
        ]
        for client, key in zip(clients, "ab", strict=True):
            with client.transaction(connection) as tx:
                with connection.cursor() as cursor:
                    cursor.execute("INSERT INTO orders VALUES (%s, %s)", (key, str(tx.token)))
                tx.send(TOPIC, key.encode(), key=key)
            tx.wait_published(PATIENCE_S)
            let_die(client, "billing", TOPIC, [key.encode()])
        add_logs(*logs, together=True)
        table = BusinessTable(name="orders", key="id", token="written_by")
        for client, broker, key in zip(clients, logs, "ab", strict=True):
            asked = ReconcileOptions(broker.url, ("billing",), database)
            asked = asked._replace(mapping=Mapping(tables=(table,)))
            with reconciled(spark, asked) as found:
                assert found.summary.missing == {}
                [row] = found.letters.collect()
                assert (row["key"], row["class"]) == (key, LetterClass.REPLAY_ALONE)
                plan = found.write(str(tmp_path / f"plan-{key}"))
            [now] = expected(plan, logs[0].url).collect()
            assert now["outcome"] == "planned"
            options = ReplayOptions(logs[0].url, settings={"rate": 0, "ramp_s": 0}, wait=False)
            replay(plan, options)
            assert drain(client, "billing", TOPIC) == [key.encode()]
