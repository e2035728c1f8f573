"""Streams as messages, exactly once; counted by reading the topic back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.errors import PySparkException

from tests.spark.queries import run_to_end
from tests.spark.stream_driver import texts
from tests.spark.test_writing import ROWS, bodies, undecided
from txmq.errors import ConfigError, TransactionAborted
from txmq_spark import TxmqDataSource
from txmq_spark.source.job_bundles import StoredBundle
from txmq_spark.source.options import WriteOptions
from txmq_spark.source.stream_progress import parse_progress
from txmq_spark.source.stream_writing import EpochWriter
from txmq_spark.source.writing import QueryBatch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    import txmq

QUERY = "0c8d2f6e-query"


@pytest.fixture
def made(client: txmq.Client, topic: str) -> str:
    """The topic, with three partitions."""
    client.call("topic.create", name=topic, partitions=3)
    return topic


class Run:
    """A run of a query's batch: tasks and driver, in any order."""

    def __init__(self, broker: str, topic: str, batch: int = 0, query: str = QUERY) -> None:
        # A query's id is unique, and so is a test's topic.
        self._batch = QueryBatch(f"{query} {topic}", batch)
        self.writer = EpochWriter.for_schema(
            WriteOptions(broker, topic, None), ROWS, overwrite=False
        )

    def task(self, *texts: str) -> StoredBundle:
        rows = pa.record_batch({"body": [text.encode() for text in texts], "key": list(texts)})
        return self.writer.store(self._batch, iter([rows] if texts else []))

    def commit(self, *messages: StoredBundle | None) -> None:
        self.writer.commit(messages, self._batch.number)

    def abort(self, *messages: StoredBundle | None) -> None:
        self.writer.abort(messages, self._batch.number)


def test_a_batch_is_published_once_however_often_and_in_whatever_order_it_is_run(
    broker: str, made: str, client: txmq.Client
) -> None:
    before = undecided(client)
    first = Run(broker, made)
    first.task("a", "b")  # the attempt of a task that was lost, or a speculative copy
    stored = [first.task("b", "a"), first.task("c"), first.task()]
    assert bodies(broker, made) == Counter()
    died = Run(broker, made)  # the driver died before its decision: the tasks run again
    died.task("a")
    first.commit(*stored)
    again = Run(broker, made)  # it died after its decision
    again.commit(again.task("c", "b"), again.task("a"))
    died.commit(died.task("c", "a", "b"))
    assert bodies(broker, made) == Counter([b"a", b"b", b"c"])
    following = Run(broker, made, 1)
    following.commit(following.task("a"))
    assert bodies(broker, made) == Counter([b"a", b"a", b"b", b"c"])
    assert undecided(client) <= before


def test_a_batch_that_failed_is_run_again(broker: str, made: str, client: txmq.Client) -> None:
    before = undecided(client)
    for _ in range(2):
        failed = Run(broker, made)
        failed.abort(failed.task("a"), None)
    Run(broker, made).abort(None, None)
    assert bodies(broker, made) == Counter()
    assert undecided(client) <= before
    again = Run(broker, made)
    again.commit(again.task("a"))
    again.abort(again.task("a"))
    assert bodies(broker, made) == Counter([b"a"])


def test_a_batch_that_has_no_rows_any_more_leaves_nothing_undecided(
    broker: str, made: str, client: txmq.Client
) -> None:
    """Its first run stored a letter and died; the letter was closed. Others of its key
    would wait for it a day.
    """
    before = undecided(client)
    Run(broker, made).task("a")
    again = Run(broker, made)
    again.commit(again.task())
    assert undecided(client) <= before
    following = Run(broker, made, 1)
    following.commit(following.task("a"))
    assert bodies(broker, made) == Counter([b"a"])


def test_of_two_runs_of_one_batch_at_once_the_loser_raises_an_error(broker: str, made: str) -> None:
    one, other = Run(broker, made), Run(broker, made)
    early = one.task("a")
    other.abort(other.task("a"))
    with pytest.raises(TransactionAborted, match="run it again"):
        one.commit(early)
    late = one.task("b")
    with pytest.raises(TransactionAborted, match="while its tasks were storing"):
        one.commit(early, late)
    assert bodies(broker, made) == Counter()
    last = Run(broker, made)
    last.commit(last.task("a"), last.task("b"))
    assert bodies(broker, made) == Counter([b"a", b"b"])


def test_two_queries_send_their_own_batches(broker: str, made: str) -> None:
    one, other = Run(broker, made), Run(broker, made, query="another")
    one.commit(one.task("a"))
    other.commit(other.task("a"))
    assert bodies(broker, made) == Counter([b"a", b"a"])


def test_a_key_of_ones_own_is_refused(broker: str) -> None:
    options = WriteOptions(broker, "t", "key")
    with pytest.raises(ConfigError, match="named by its checkpoint"):
        EpochWriter.for_schema(options, ROWS, overwrite=False)
    with pytest.raises(ConfigError, match="cannot be overwritten"):
        EpochWriter.for_schema(options._replace(idempotency_key=None), ROWS, overwrite=True)


# By Spark.


class FlakyStream(TxmqDataSource):
    """A sink whose tasks fail once, after they have stored their rows, and store them
    in another order the next time. With the option `dies`, its driver fails after its
    decision.
    """

    @classmethod
    def name(cls) -> str:
        return "flaky-stream"

    def streamWriter(  # noqa: N802  # Spark's name
        self,
        schema: StructType,
        overwrite: bool,  # noqa: FBT001  # Spark's signature
    ) -> FlakyWriter:
        dies = self.options.pop("dies", None)
        wanted = TxmqDataSource(self.options).streamWriter(schema, overwrite)
        assert isinstance(wanted, EpochWriter)
        return FlakyWriter(wanted._options, dies)


class FlakyWriter(EpochWriter):
    """The writer of that sink."""

    def __init__(self, options: WriteOptions, dies: str | None) -> None:
        super().__init__(options)
        self._dies = dies

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StoredBundle:
        context = TaskContext.get()
        assert context is not None
        if context.attemptNumber() == 0 and context.partitionId() == 0:
            super().write(iterator)
            raise RuntimeError("failed after it had stored its bundle")
        return super().write(batch.take(pa.array(range(len(batch))[::-1])) for batch in iterator)

    def commit(
        self,
        messages: Sequence[Any],
        batchId: int,  # noqa: N803  # Spark's name
    ) -> None:
        super().commit(messages, batchId)
        if self._dies:
            raise RuntimeError("died after its decision")


def test_spark_copies_a_topic_once_over_failed_tasks_a_dead_driver_and_growth(
    spark: SparkSession, broker: str, made: str, client: txmq.Client, tmp_path: Path
) -> None:
    spark.dataSource.register(FlakyStream)
    target, before = f"{made}-2", undecided(client)
    client.call("topic.create", name=target, partitions=2)
    client.send_many(made, texts(*range(60)), partition=0)

    def run(**options: str) -> list[dict[str, Any]]:
        source = {"url": broker, "topic": made, "maxOffsetsPerTrigger": "40"}
        rows = spark.readStream.format("txmq").options(**source).load().select("body", "key")
        writer = rows.writeStream.format("flaky-stream").options(url=broker, topic=target)
        writer = writer.options(checkpointLocation=str(tmp_path), **options)
        return [json.loads(progress.json) for progress in run_to_end(writer).recentProgress]

    with pytest.raises(PySparkException, match="died after its decision"):
        run(dies="1")
    assert bodies(broker, target) == Counter(texts(*range(40)))
    client.call("topic.grow", name=made, partitions=4)
    client.send_many(made, texts(*range(60, 70)), partition=3)
    batches = run()
    assert bodies(broker, target) == Counter(texts(*range(70)))
    assert undecided(client) <= before
    [source] = batches[-1]["sources"]
    assert sum(parse_progress(source["endOffset"])[0].topics[made].offsets) == 70


def test_foreach_batch_writes_each_batch_once_under_one_name_and_not_without_one(
    spark: SparkSession, broker: str, made: str, client: txmq.Client, tmp_path: Path
) -> None:
    client.call("topic.create", name=f"{made}-from", partitions=1)
    client.send_many(f"{made}-from", texts(1, 2, 3))
    options = {"url": broker, "topic": made}

    def run(checkpoint: str, *, named: bool = True) -> None:
        def copy(frame: DataFrame, _batch: int) -> None:
            more = {"idempotency_key": f"copies of {made}"} if named else {}
            rows = frame.select("body").write.format("txmq").options(**options, **more)
            rows.mode("append").save()

        read = {"url": broker, "topic": f"{made}-from", "maxOffsetsPerTrigger": "2"}
        stream = spark.readStream.format("txmq").options(**read).load()
        writer = stream.writeStream.foreachBatch(copy)
        run_to_end(writer.option("checkpointLocation", str(tmp_path / checkpoint)))

    with pytest.raises(PySparkException, match="foreachBatch may write a batch twice"):
        run("one", named=False)
    run("one")
    assert bodies(broker, made) == Counter([b"1", b"2", b"3"])
    for commit in (tmp_path / "one" / "commits").glob("*1*"):  # it died before it noted the batch
        commit.unlink()
    run("one")
    assert bodies(broker, made) == Counter([b"1", b"2", b"3"])
    run("other")  # counts its batches from 0, too
    assert bodies(broker, made) == Counter([b"1", b"2", b"3"] * 2)
