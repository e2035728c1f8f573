"""Spark for txmq: a data source, and jobs that reconcile, replay and watch dead
letters, and land topics as files.
"""

from txmq.errors.extras import require

require("spark", "pyspark", "pyarrow")

from txmq_spark.session.pyspark_version import require_pyspark

require_pyspark()

from txmq_spark.session.spark_session import register
from txmq_spark.source.data_source import TxmqDataSource

__all__ = ["TxmqDataSource", "register"]
