"""Queries of Spark that a busy machine may stop: they are started again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.errors import StreamingQueryException

from txmq_spark.session.query_run import WORKER_LATE

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter


def require_late_worker(failure: BaseException) -> None:
    """Raise the failure of a query, unless Spark has only not waited for the process
    that plans its batches.
    """
    if WORKER_LATE not in str(failure):
        raise failure


def run_to_end(writer: DataStreamWriter) -> StreamingQuery:
    """Run a query with what there is now."""
    while True:  # until the time of the test is up
        query = writer.trigger(availableNow=True).start()
        try:
            query.awaitTermination()
        except StreamingQueryException as error:
            require_late_worker(error)
        else:
            return query
