"""Copies of a topic as batches and as streams, with speculation, while an attempt of a
writing task is killed behind its bundle: a part of `cluster_program`.

The victims are the speculative copy or the first attempt of partition 0, and of them
the worker of Python or the whole executor. `DIRECTORY/steps` gets a line for each step
of such an attempt: case, attempt, what. Executors have this module by value.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from txmq_spark import TxmqDataSource
from txmq_spark.source.job_bundles import StoredBundle
from txmq_spark.source.stream_writing import EpochWriter
from txmq_spark.source.writing import JobWriter

# kind of query, victim, and what of it is killed
CASES = ("batch-copy-worker", "batch-first-executor", "stream-copy-executor", "stream-first-worker")


class Script(NamedTuple):
    """What happens to the attempts of partition 0 in a case."""

    case: str
    directory: str

    def note(self, attempt: int, what: str) -> None:
        with Path(self.directory, "steps").open("a") as journal:
            journal.write(f"{self.case} {attempt} {what}\n")

    def wait_for(self, attempt: int, what: str) -> None:
        """Wait until an attempt has noted something that begins so."""
        line = f"{self.case} {attempt} {what}"
        while f"\n{line}" not in "\n" + Path(self.directory, "steps").read_text():
            time.sleep(0.05)  # the caller ends one that hangs

    def run(self, attempt: int, store: Callable[[], StoredBundle]) -> StoredBundle:
        """Store the bundle of an attempt, and die if that is the victim."""
        victim, other = (1, 0) if "-copy-" in self.case else (0, 1)
        self.note(attempt, "began")
        if attempt == victim:
            self.wait_for(other, "began")
            self.note(attempt, f"stored {store().messages}")
            os.kill(os.getpid() if self.case.endswith("worker") else executor(), signal.SIGKILL)
            signal.pause()  # until the executor takes its workers along
        if attempt == other:
            self.wait_for(victim, "stored")
        return store()


def executor() -> int:
    """Return the process whose daemon has forked this worker."""
    stat = Path(f"/proc/{os.getppid()}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def dying(store: Callable[[], StoredBundle], case: str, directory: str) -> StoredBundle:
    """Store the bundle of a task; have the victim die."""
    task = TaskContext.get()
    assert task is not None
    if task.partitionId():
        return store()
    return Script(case, directory).run(task.attemptNumber(), store)


class DyingJob(JobWriter):
    """The writer of a batch."""

    case = directory = ""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StoredBundle:
        first = super().write
        return dying(partial(first, iterator), self.case, self.directory)


class DyingStream(EpochWriter):
    """The writer of a stream."""

    case = directory = ""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StoredBundle:
        first = super().write
        return dying(partial(first, iterator), self.case, self.directory)


class DyingSource(TxmqDataSource):
    """A sink whose attempts die."""

    @classmethod
    def name(cls) -> str:
        return "dying"

    def writer(self, schema: StructType, overwrite: bool) -> JobWriter:  # noqa: FBT001  # Spark's signature
        case, directory = self.options.pop("case"), self.options.pop("directory")
        wanted = TxmqDataSource(self.options).writer(schema, overwrite)
        assert isinstance(wanted, JobWriter)
        made = DyingJob(wanted._options, wanted._job)
        made.case, made.directory = case, directory
        return made

    def streamWriter(  # noqa: N802  # Spark's name
        self,
        schema: StructType,
        overwrite: bool,  # noqa: FBT001  # Spark's signature
    ) -> EpochWriter:
        case, directory = self.options.pop("case"), self.options.pop("directory")
        wanted = TxmqDataSource(self.options).streamWriter(schema, overwrite)
        assert isinstance(wanted, EpochWriter)
        made = DyingStream(wanted._options)
        made.case, made.directory = case, directory
        return made


def copy(spark: SparkSession, url: str, topic: str, directory: str) -> None:
    """Copy a topic once for each case."""
    spark.dataSource.register(TxmqDataSource)
    spark.dataSource.register(DyingSource)
    source = {"url": url, "topic": topic, "columns": "body,key"}
    rows = spark.read.format("txmq").options(**source).load()
    # Spark plans a stream of files itself: no worker can be late on a busy machine.
    rows.write.parquet(f"{directory}/rows")
    for case in CASES:
        given = {"url": url, "topic": f"{topic}-{case}", "case": case, "directory": directory}
        if case.startswith("batch"):
            writer = rows.write.format("dying")
            writer.options(**given, idempotency_key=case).mode("append").save()
            continue
        stream = spark.readStream.schema(rows.schema).parquet(f"{directory}/rows")
        query = stream.writeStream.format("dying").options(**given)
        query = query.option("checkpointLocation", f"{directory}/{case}")
        query.trigger(availableNow=True).start().awaitTermination()
