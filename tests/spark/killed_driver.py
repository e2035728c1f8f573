"""A driver that copies topics, and stops in the decision of each copy, until it is
killed.

    python -m tests.spark.killed_driver URL TOPIC DIRECTORY "batch|stream POINT"...
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import StructType

from tests.spark.conftest import SETTINGS
from tests.spark.queries import run_to_end
from txmq import crashpoints
from txmq_spark import TxmqDataSource
from txmq_spark.session.local_session import local_session
from txmq_spark.source.options import WriteOptions
from txmq_spark.source.stream_writing import EpochWriter
from txmq_spark.source.writing import JobWriter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


class StoppingSource(TxmqDataSource):
    """A sink whose decisions stop at the crash point of its option `point`."""

    @classmethod
    def name(cls) -> str:
        return "stopping"

    def writer(self, schema: StructType, overwrite: bool) -> JobWriter:  # noqa: FBT001  # Spark's signature
        point = self.options.pop("point")
        writer = TxmqDataSource(self.options).writer(schema, overwrite)
        assert isinstance(writer, JobWriter)
        return StoppingJob(writer, point)

    def streamWriter(  # noqa: N802  # Spark's name
        self,
        schema: StructType,
        overwrite: bool,  # noqa: FBT001  # Spark's signature
    ) -> EpochWriter:
        point = self.options.pop("point")
        writer = TxmqDataSource(self.options).streamWriter(schema, overwrite)
        assert isinstance(writer, EpochWriter)
        return StoppingStream(writer._options, point)


class StoppingJob(JobWriter):
    """The writer of a batch."""

    def __init__(self, writer: JobWriter, point: str) -> None:
        super().__init__(writer._options, writer._job)
        self._point = point

    def commit(self, messages: Sequence[Any]) -> None:
        arm(self._point)
        super().commit(messages)


class StoppingStream(EpochWriter):
    """The writer of a stream."""

    def __init__(self, options: WriteOptions, point: str) -> None:
        super().__init__(options)
        self._point = point

    def commit(
        self,
        messages: Sequence[Any],
        batchId: int,  # noqa: N803  # Spark's name
    ) -> None:
        arm(self._point)
        super().commit(messages, batchId)


def arm(point: str) -> None:
    """Have this process stop at its next way past the point."""
    os.environ[crashpoints.VARIABLE] = f"{point}:1:STOP"
    crashpoints._forget()


def copy_batch(frame: DataFrame, url: str, target: str, form: str = "txmq", **more: str) -> None:
    """Copy rows in one job, in any thread."""
    spark: Any = frame.sparkSession
    spark._jvm.SparkSession.setActiveSession(spark._jsparkSession)
    writer = frame.write.format(form).options(url=url, topic=target, idempotency_key=target)
    writer.options(**more).mode("append").save()


def run_stream(
    frame: DataFrame, url: str, target: str, place: str, form: str = "txmq", **more: str
) -> StreamingQuery:
    """Copy what a stream has now, in any thread."""
    spark: Any = frame.sparkSession
    spark._jvm.SparkSession.setActiveSession(spark._jsparkSession)
    writer = frame.writeStream.format(form).options(url=url, topic=target, **more)
    return run_to_end(writer.option("checkpointLocation", f"{place}/{target}"))


def rows(spark: SparkSession, url: str, topic: str, *, stream: bool) -> DataFrame:
    reader = spark.readStream if stream else spark.read
    source = {"url": url, "topic": topic, "columns": "body,key"}
    return reader.format("txmq").options(**source).load()


def main(url: str, topic: str, place: str, *points: str) -> None:
    with local_session("local[2]", SETTINGS) as spark:
        jvm: Any = spark.sparkContext._jvm
        print("java:", jvm.System.getProperty("java.home"), flush=True)  # noqa: T201  # a program
        spark.dataSource.register(StoppingSource)
        batch, stream = (rows(spark, url, topic, stream=stream) for stream in (False, True))
        for kind, point in map(str.split, points):
            more = {"form": "stopping", "point": point}
            given = (url, f"{topic}-{kind}-{point}")
            copying = (
                partial(run_stream, stream, *given, place, **more)
                if kind == "stream"
                else partial(copy_batch, batch, *given, **more)
            )
            Thread(target=copying, daemon=True).start()
        while True:
            time.sleep(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
