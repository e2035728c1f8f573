"""Spark for txmq: a data source, and the jobs that reconcile and replay dead
letters.
"""

from txmq.errors.extras import require

require("spark", "pyspark", "pyarrow")

from txmq_spark.source import TxmqDataSource
from txmq_spark.spark_session import register

__all__ = ["TxmqDataSource", "register"]
