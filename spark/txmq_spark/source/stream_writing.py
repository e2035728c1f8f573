"""Streams as messages: each batch of a query is a job, with one decision.

The name of the job is the query's id, which is in its checkpoint, and the number of the
batch. A batch that Spark runs again, in whatever order its rows come then, meets the
decision of its first run. So repeated tasks, speculative copies, and a driver that dies
before, during or after its decision send nothing twice. Two queries have two ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Self

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

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
from txmq_spark.source.writing import QueryBatch, batch_job_name, query_batch, require_append


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

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StoredBundle:
        """Store the rows of a task as one bundle of its batch.

        Raises the errors of `client.send`.
        """
        batch = query_batch()
        if batch is None:
            raise ConfigError(
                "writeStream",
                "Spark has not told the task's query and batch",
                hint="use a micro-batch trigger",
            )
        return self.store(batch, iterator)

    def store(self, batch: QueryBatch, rows: Iterator[pa.RecordBatch]) -> StoredBundle:
        """Store rows as one bundle of a batch of a query, unless it is published."""
        with task_client(self._options.url) as client:
            job = find_job(client, batch_job_name(batch))
            return store_in_job(client, job, rows, self._options.topic)

    def commit(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int,  # noqa: N803  # Spark's name
    ) -> None:
        """Publish the winning bundles of the batch, as `JobWriter.commit` does.

        A batch without messages is decided, too: a run that died may have stored some,
        of letters that were closed meanwhile, and later messages of their keys wait.
        Raises TransactionAborted where another run of the query rolled the batch back.
        """
        with task_client(self._options.url) as client:
            commit_bundles(client, messages)

    def abort(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int,  # noqa: N803  # Spark's name
    ) -> None:
        """Drop all bundles of the batch, as `JobWriter.abort` does."""
        with task_client(self._options.url) as client:
            abort_bundles(client, messages)
