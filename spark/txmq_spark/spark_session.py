"""The Spark session of a job: that of spark-submit, or a local one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pyspark import SparkFiles
from pyspark.sql import SparkSession

from txmq_spark.local_session import local_session
from txmq_spark.source import TxmqDataSource

# Where the process that plans a stream's batches looks for shipped files, below the
# place where they are (Spark 4.3.0, 2026-11-23): without this it does not find any.
STREAM_FILES: Final = "streaming_job"


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
        with local_session("local[*]") as own:
            yield own
        return
    spark = SparkSession.builder.appName("txmq").getOrCreate()
    register(spark)
    try:
        yield spark
    finally:
        spark.stop()
