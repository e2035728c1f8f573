"""The run of a streaming query until its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.errors import StreamingQueryException

from txmq_spark.query_errors import query_failure

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter


def run_query(writer: DataStreamWriter, every_s: int | None) -> StreamingQuery:
    """Run a query until it is stopped, a batch every so many seconds, and return it.

    `every_s` None = process what is there, and end. Raises QueryFailed.
    """
    if every_s is None:
        query = writer.trigger(availableNow=True).start()
    else:
        query = writer.trigger(processingTime=f"{every_s} seconds").start()
    try:
        query.awaitTermination()
    except StreamingQueryException as error:
        raise query_failure(error) from error
    finally:
        query.stop()
    return query
