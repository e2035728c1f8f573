"""The Spark session of a job: that of spark-submit, or a local one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from txmq_spark.local_session import local_session
from txmq_spark.source import TxmqDataSource


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
    spark.dataSource.register(TxmqDataSource)
    try:
        yield spark
    finally:
        spark.stop()
