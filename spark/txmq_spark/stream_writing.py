"""Streams as messages: each batch of a query is a job, with one decision.

The name of the job is the query's id, which is in its checkpoint, and the number of the
batch. A batch that Spark runs again, in whatever order its rows come then, meets the
decision of its first run. So repeated tasks, speculative copies, and a driver that dies
before, during or after its decision send nothing twice. Two queries have two ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self
from uuid import UUID

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from txmq.client.protocol.call_steps import run_calls
from txmq.client.protocol.named_jobs import current_job
from txmq.errors import ConfigError, TransactionAborted
from txmq_spark.source_options import WriteOptions
from txmq_spark.writing import (
    QUERY_PROPERTY,
    check_columns,
    publish,
    require_append,
    store_rows,
    task_client,
)

BATCH_PROPERTY: Final = "streaming.sql.batchId"  # Spark sets it beside QUERY_PROPERTY


@dataclass(frozen=True, slots=True)
class EpochBundle(WriterCommitMessage):
    """A task's result for the driver: the job of its batch, and its bundle there.

    The token is None where there was nothing to send, or the batch is published.
    """

    job: str
    token: str | None
    messages: int


class EpochWriter(DataSourceStreamArrowWriter):
    """Writer of a query to topics. Spark makes one for each task and each decision."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    @classmethod
    def for_schema(cls, options: WriteOptions, schema: StructType, *, overwrite: bool) -> Self:
        """Return the writer for rows of this schema.

        Raises ConfigError where the rows are not messages.
        """
        require_append(overwrite=overwrite)
        if options.idempotency_key is not None:
            raise ConfigError(
                "idempotency_key",
                "the batches of a stream are named by its checkpoint",
                hint="leave it out, and keep the checkpointLocation",
            )
        check_columns(schema, options.topic)
        return cls(options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> EpochBundle:
        """Store the rows of a task as one bundle of its batch.

        Raises the errors of `client.send`.
        """
        context = TaskContext.get()
        assert context is not None, "Spark calls this in a task"
        query, batch = map(context.getLocalProperty, (QUERY_PROPERTY, BATCH_PROPERTY))
        if query is None or batch is None:
            raise ConfigError(
                "writeStream",
                f"Spark has not told the task's query and batch ({query}, {batch})",
                hint="use a micro-batch trigger",
            )
        return self.store(query, int(batch), iterator)

    def store(self, query: str, batch: int, rows: Iterator[pa.RecordBatch]) -> EpochBundle:
        """Store rows as one bundle of a batch of a query, unless it is published."""
        with task_client(self._options.url) as client:
            job = run_calls(client.call, current_job(f"stream {query} {batch}"))
            if job.committed:
                return EpochBundle(job.token.hex, None, 0)
            return EpochBundle(
                job.token.hex, *store_rows(client, job.token, rows, self._options.topic)
            )

    def commit(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int,  # noqa: N803  # Spark's name
    ) -> None:
        """Publish the winning bundles of the batch, as `JobWriter.commit` does.

        Raises TransactionAborted where another run of the query rolled the batch back.
        """
        stored = [message for message in messages if isinstance(message, EpochBundle)]
        winners = [UUID(message.token) for message in stored if message.token]
        jobs = sorted({message.job for message in stored})
        if not winners:
            return
        if len(jobs) > 1:
            self.abort(messages, batchId)
            raise TransactionAborted(
                f"batch {batchId} was rolled back by another run while its tasks were storing",
                hint="nothing was sent; run the query again, once",
            )
        with task_client(self._options.url) as client:
            publish(client, UUID(jobs[0]), winners)

    def abort(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int,  # noqa: N803  # Spark's name
    ) -> None:
        """Drop all bundles of the batch. A commit of another run stays.

        Where no task came to its end, what tasks have stored is dropped with the next
        decision of the batch, or when it expires.
        """
        jobs = {message.job for message in messages if isinstance(message, EpochBundle)}
        with task_client(self._options.url) as client:
            for job in sorted(jobs):
                client.job(UUID(job)).abort()
