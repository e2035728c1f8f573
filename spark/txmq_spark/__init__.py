"""Spark for txmq: a data source, and jobs that reconcile, replay and watch dead
letters, and land topics as files.
"""

from txmq.errors.extras import require

require("spark", "pyspark", "pyarrow")

from txmq_spark.pyspark_version import require_pyspark

require_pyspark()

from txmq_spark.source import TxmqDataSource
from txmq_spark.spark_session import register

__all__ = ["TxmqDataSource", "register"]
