"""Spark for txmq: a data source, and the jobs that reconcile and replay dead
letters.
"""

from txmq_spark.source import TxmqDataSource

__all__ = ["TxmqDataSource"]
