"""The Spark session of a job: the one it was submitted to, or one of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from txmq.testing.spark import local_session
from txmq_spark.source import TxmqDataSource


@contextmanager
def session() -> Iterator[SparkSession]:
    """A session with the data source `txmq`: of spark-submit where that started us,
    else local, on all cores.
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
