"""The Spark session of a job: that of spark-submit, or a local one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pyspark.core.context
from pyspark import SparkFiles
from pyspark.sql import SparkSession

from txmq_spark.local_session import JVM_GONE, TASK_ATTEMPTS, local_session
from txmq_spark.source import TxmqDataSource

# Where the process that plans a stream's batches looks for shipped files, below the
# place where they are (Spark 4.3.0, 2026-11-23): without this it does not find any.
STREAM_FILES: Final = "streaming_job"
ADAPTIVE: Final = "spark.sql.adaptive.enabled"
_planning_once: Final = threading.Lock()  # so that each restores what the user has set


def register(spark: SparkSession) -> None:
    """Make the data source `txmq` known to a session, also to streams whose packages
    were shipped by `--py-files`.
    """
    spark.dataSource.register(TxmqDataSource)
    files = Path(SparkFiles.getRootDirectory())
    if files.is_dir() and not (files / STREAM_FILES).exists():
        (files / STREAM_FILES).symlink_to(files)


@contextmanager
def job_session() -> Iterator[SparkSession]:
    """Yield a session with the data source `txmq`.

    Under spark-submit it is the submitted one, else a local one on all cores.
    """
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        with _own_interrupts(), local_session(f"local[*,{TASK_ATTEMPTS}]") as own:
            yield own
        return
    with _own_interrupts():
        spark = SparkSession.builder.appName("txmq").getOrCreate()
    register(spark)
    try:
        yield spark
    finally:
        with suppress(*JVM_GONE):
            spark.stop()


@contextmanager
def _own_interrupts() -> Iterator[None]:
    """Keep PySpark from handling Ctrl-C in the block.

    Its handler calls the JVM, within the call that it interrupts: both fail, with their
    stacks on the terminal (4.3.0, 2026-11-29).
    """
    module: Any = pyspark.core.context
    before = module.signal
    module.signal = SimpleNamespace(SIGINT=signal.SIGINT, signal=lambda *_: None)
    try:
        yield
    finally:
        module.signal = before


@contextmanager
def planned_once(spark: SparkSession) -> Iterator[None]:
    """Plan queries of the block before their first stage, and not anew behind each.

    Adaptive plans of Spark pay where stages have much data. With a few rows they cost
    more than the rows. Queries that other threads begin in the session meanwhile have
    plans of the same kind; their results are the same.
    """
    with _planning_once:
        before = spark.conf.get(ADAPTIVE)
        spark.conf.set(ADAPTIVE, "false")
        try:
            yield
        finally:
            spark.conf.set(ADAPTIVE, str(before))
