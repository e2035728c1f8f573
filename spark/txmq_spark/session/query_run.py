"""The run of a streaming query until its end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Final

import structlog
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException

from txmq_spark.session.hadoop_files import Directory
from txmq_spark.session.query_errors import query_failure

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

# Spark waits 10 s for the process that plans a query's batches, which no setting
# changes (4.3.0, 2026-11-22). A busy machine may need longer to start Python once.
WORKER_LATE: Final = "Python worker failed to connect back"
STARTS: Final = 4
# One wait for a query's end. SIGTERM interrupts it in Python, and Java waits on: only
# then can it be told to stop the query.
WAIT_S: Final = 2
log = structlog.get_logger()


def last_batch(spark: SparkSession, log: str) -> int:
    """Return the number of the last batch in a log of Spark; -1 = there is none."""
    names = (name.removesuffix(".compact") for name in Directory(spark, log).names())
    return max((int(name) for name in names if name.isdigit()), default=-1)


def clear_unplanned(spark: SparkSession, checkpoint: str) -> None:
    """Remove what is left of a first batch whose plan could not be written.

    Spark 4.3.0 would refuse such a checkpoint for ever, as after a full disk, though
    nothing was done with it (2026-11-23).
    """
    log = f"{checkpoint}/offsets"
    if last_batch(spark, log) < 0:
        # Not the directory: another run of the query may have planned a batch just now.
        for name in Directory(spark, log).names():
            if name.startswith("."):
                Directory(spark, log).remove(name)


def run_query(
    writer: DataStreamWriter,
    every_s: int | None,
    between: Callable[[StreamingQuery], None] = lambda _query: None,
) -> StreamingQuery:
    """Run a query until it is stopped, a batch every so many seconds, and return it.

    `every_s` None = process what is there, and end. `between` is called as often, and
    at the end. A query whose worker was late is started again: it goes on at its
    checkpoint. Raises QueryFailed.
    """
    if every_s is None:
        triggered = writer.trigger(availableNow=True)
    else:
        triggered = writer.trigger(processingTime=f"{every_s} seconds")
    for left in reversed(range(STARTS)):
        query: StreamingQuery | None = None
        try:
            query = triggered.start()
            due = monotonic() + (every_s or inf)
            while not query.awaitTermination(WAIT_S):
                if monotonic() >= due:
                    between(query)
                    due = monotonic() + (every_s or inf)
        except (PySparkException, Py4JJavaError) as error:
            if not (left and WORKER_LATE in str(error)):
                raise query_failure(error) from error
            log.warning("spark.worker_late", starts_left=left)
        else:
            break
        finally:
            if query is not None:
                # The JVM may have had the signal that ends this process, too.
                with suppress(Py4JError, OSError):
                    query.stop()
    assert query is not None, "it has ended well"
    between(query)
    return query
