"""DataFrames as messages: one job, whose tasks store bundles and whose one decision
publishes them.

Each task stores its rows as an undecided, invisible bundle under a new token, and
returns the token to the driver. The driver's commit is one decision that names the
winning bundles. It drops the bundles of other attempts and of tasks that were given up.
So repeated tasks, speculative copies and a driver that dies send nothing twice. With
`idempotency_key` the job has a name, and a second run meets the decision of the first.

In `foreachBatch` each batch of a query is a job of its own. The key names one of its
writes there, and the tasks add the query's id and the batch's number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, Self

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from txmq.client.protocol.named_jobs import NamedJob
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import ConfigError
from txmq_spark.source.job_bundles import (
    StoredBundle,
    abort_bundles,
    commit_bundles,
    find_job,
    store_in_job,
    task_client,
)
from txmq_spark.source.message_columns import check_columns
from txmq_spark.source.options import WriteOptions

# Spark sets these for the tasks of a query's batch, and for its driver's thread.
QUERY_PROPERTY: Final = "sql.streaming.queryId"
BATCH_PROPERTY: Final = "streaming.sql.batchId"


class QueryBatch(NamedTuple):
    """The batch of a streaming query that a task belongs to."""

    query: str
    number: int


class JobWriter(DataSourceArrowWriter):
    """Writer to topics.

    The driver makes it and runs `commit` and `abort`; the tasks run `write`.
    """

    def __init__(self, options: WriteOptions, job: NamedJob) -> None:
        self._options, self._job = options, job

    @classmethod
    def for_schema(cls, options: WriteOptions, schema: StructType, *, overwrite: bool) -> Self:
        """Return the writer for rows of this schema.

        Raises ConfigError where the rows are not messages, BrokerUnavailable.
        """
        require_append(overwrite=overwrite)
        check_columns(schema, options.topic)
        if options.idempotency_key is None:
            return cls(options, NamedJob(new_token(), committed=False))
        with task_client(options.url) as client:
            name = job_name(options.topic, options.idempotency_key)
            return cls(options, find_job(client, name))

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StoredBundle:
        """Store the rows as one bundle, in several parts if it is large.

        Raises ConfigError in `foreachBatch` without an idempotency key, and the errors
        of `client.send`.
        """
        return self.store(query_batch(), iterator)

    def store(self, batch: QueryBatch | None, iterator: Iterator[pa.RecordBatch]) -> StoredBundle:
        """Store the rows of a task, perhaps in a query's batch, as `write` does."""
        options = self._options
        if batch is not None and options.idempotency_key is None:
            # Only the user's code knows which of its writes are the same when Spark
            # runs a batch again.
            raise ConfigError(
                "idempotency_key",
                "foreachBatch may write a batch twice, and this write has no name",
                hint='option("idempotency_key", "NAME-OF-WRITE"), or use writeStream',
            )
        with task_client(options.url) as client:
            job = self._job
            if batch is not None and options.idempotency_key is not None:
                name = job_name(options.topic, options.idempotency_key, batch)
                job = find_job(client, name)
            return store_in_job(client, job, iterator, options.topic)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Publish all winning bundles.

        Messages that wait behind an undecided message of their key may become visible
        after this returns. Raises TransactionAborted where another run of the job
        rolled it back.
        """
        with task_client(self._options.url) as client:
            commit_bundles(client, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Drop all bundles. A commit of another run stays.

        Where no task of a query's batch came to its end, what tasks have stored is
        dropped with the next decision of the batch, or when it expires.
        """
        with task_client(self._options.url) as client:
            if not abort_bundles(client, messages):
                client.job(self._job.token).abort()


def job_name(topic: str | None, idempotency_key: str, batch: QueryBatch | None = None) -> str:
    """Return the name of the job that a write with this key is, perhaps in a query's
    batch.
    """
    of_batch = f"batch {batch.query} {batch.number} " if batch else ""
    return f"{of_batch}write {topic or ''} {idempotency_key}"


def query_batch() -> QueryBatch | None:
    """Return the batch of a query that this task belongs to; None = to none."""
    context = TaskContext.get()
    if context is None:
        return None
    query, batch = map(context.getLocalProperty, (QUERY_PROPERTY, BATCH_PROPERTY))
    return None if query is None or batch is None else QueryBatch(query, int(batch))


def batch_job_name(batch: QueryBatch) -> str:
    """Return the name of the job that a whole batch of a query is."""
    return f"stream {batch.query} {batch.number}"


def require_append(*, overwrite: bool) -> None:
    """Raise ConfigError for a write that replaces what is there."""
    if overwrite:
        raise ConfigError("mode", "a topic cannot be overwritten", hint='mode("append")')
