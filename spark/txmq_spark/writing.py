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

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, DataType, MapType, StringType, StructType

import txmq
from txmq.batch.cells import header_cell, text_too_long
from txmq.client.protocol.call_steps import run_calls
from txmq.client.protocol.named_jobs import NamedJob, current_job
from txmq.client.protocol.sender.rows import micros_now
from txmq.client.protocol.transaction.tokens import new_token
from txmq.crashpoints import crashpoint
from txmq.errors import ConfigError, TransactionAborted
from txmq.model import limits
from txmq.model.message import COMMIT
from txmq_spark.arrow_rows import (
    SCHEMA,
    ArrowRows,
    binary_column,
    empty_column,
    longest_of,
)
from txmq_spark.broker_link import BrokerLink
from txmq_spark.source_options import WriteOptions

if TYPE_CHECKING:
    from txmq.client.blocking.transaction.jobs import JobBundle

SERVICE: Final = "txmq-spark"
# Spark sets these for the tasks of a query's batch, and for its driver's thread.
QUERY_PROPERTY: Final = "sql.streaming.queryId"
BATCH_PROPERTY: Final = "streaming.sql.batchId"
TIMEOUT_S: Final = 30.0  # a decision over many bundles takes longer than a send
PUBLISH_TIMEOUT_S: Final = 30.0  # until all messages are visible; a large run takes a second or two
# the broker rolls back a job that has not been decided after this time
EXPIRE_S: Final = 24 * 3_600.0
TYPES: Final[dict[str, DataType]] = {
    "topic": StringType(),
    "body": BinaryType(),
    "key": StringType(),
    "tag": StringType(),
    "headers": MapType(StringType(), StringType()),
}
TEXT_LIMITS: Final = {"key": limits.KEY, "tag": limits.TAG}
HINT: Final = (
    "select body binary, and optionally key, tag, topic string, headers map<string,string>"
)


class QueryBatch(NamedTuple):
    """The batch of a streaming query that a task belongs to."""

    query: str
    number: int


@dataclass(frozen=True, slots=True)
class StoredBundle(WriterCommitMessage):
    """A task's result for the driver: the token of its job, and of its bundle there.

    The second is None where there was nothing to send, or the job is committed.
    """

    job: str
    token: str | None
    messages: int


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


def find_job(broker: txmq.Client | BrokerLink, name: str) -> NamedJob:
    """Return the job of a name, as the broker knows it."""
    return run_calls(broker.call, current_job(name))


def task_client(url: str) -> txmq.Client:
    """Return a client for a task or the driver."""
    return txmq.connect(url, service=SERVICE, timeout=TIMEOUT_S)


def store_in_job(
    client: txmq.Client, job: NamedJob, batches: Iterable[pa.RecordBatch], topic: str | None
) -> StoredBundle:
    """Store rows as one bundle of a job, unless it is committed.

    Raises the errors of `client.send`.
    """
    if job.committed:
        return StoredBundle(job.token.hex, None, 0)
    return StoredBundle(job.token.hex, *store_rows(client, job.token, batches, topic))


def commit_bundles(client: txmq.Client, messages: Sequence[WriterCommitMessage | None]) -> None:
    """Decide the job of tasks for their bundles, and wait until consumers can see them.

    Raises TransactionAborted where another run of the job rolled it back.
    """
    stored = _bundles(messages)
    jobs = sorted({message.job for message in stored})
    if len(jobs) > 1:
        abort_bundles(client, messages)
        raise TransactionAborted(
            "the job was rolled back by another run while its tasks were storing",
            hint="nothing was sent; run it again, once",
        )
    for job in jobs:
        publish(client, UUID(job), [UUID(one.token) for one in stored if one.token])


def abort_bundles(client: txmq.Client, messages: Sequence[WriterCommitMessage | None]) -> bool:
    """Roll back the jobs of tasks; False = none is known: no task came to its end."""
    jobs = sorted({message.job for message in _bundles(messages)})
    for job in jobs:
        client.job(UUID(job)).abort()
    return bool(jobs)


def _bundles(messages: Sequence[WriterCommitMessage | None]) -> list[StoredBundle]:
    return [message for message in messages if isinstance(message, StoredBundle)]


def store_rows(
    client: txmq.Client, job: UUID, batches: Iterable[pa.RecordBatch], topic: str | None
) -> tuple[str | None, int]:
    """Store rows as one bundle of a job, as `store_bundle` does."""
    return store_bundle(client, job, lambda group: sum(_add(group, one, topic) for one in batches))


def store_bundle(
    client: txmq.Client, job: UUID, fill: Callable[[JobBundle], int]
) -> tuple[str | None, int]:
    """Store one bundle of a job; return its token and the number of messages. `fill`
    adds the messages, and returns their number.

    The token is None where there are none. Raises the errors of `client.send`.
    """
    group = client.job(job, expire_after=EXPIRE_S).group()
    messages = fill(group)
    token = group.store().hex if messages else None
    crashpoint("spark.bundle_stored")
    return token, messages


def publish(client: txmq.Client, token: UUID, winners: Sequence[UUID]) -> None:
    """Decide a job for these bundles, and wait until consumers can see them.

    Raises TransactionAborted where the job was rolled back.
    """
    job = client.job(token)
    crashpoint("spark.before_decision")
    decided = job.decide(winners)
    crashpoint("spark.decided")
    if decided.outcome is not COMMIT:
        raise TransactionAborted(
            f"job {token} was rolled back by another run or by its time-out",
            hint="nothing was sent; run it again",
        )
    if not decided.repeated:
        job.wait_published(winners, PUBLISH_TIMEOUT_S)
    crashpoint("spark.published")


def require_append(*, overwrite: bool) -> None:
    """Raise ConfigError for a write that replaces what is there."""
    if overwrite:
        raise ConfigError("mode", "a topic cannot be overwritten", hint='mode("append")')


def check_columns(schema: StructType, topic: str | None) -> None:
    """Raise ConfigError where rows of this schema are not messages."""
    for field in schema:
        expected = TYPES.get(field.name)
        if expected is None or not _same(field.dataType, expected):
            what = f"{field.name} {field.dataType.simpleString()}"
            raise ConfigError("columns", f"a message has no column {what}", hint=HINT)
        if schema.names.count(field.name) > 1:
            raise ConfigError("columns", f"there are two columns {field.name}", hint=HINT)
    if "body" not in schema.names:
        raise ConfigError("columns", "a message needs a body", hint=HINT)
    if ("topic" in schema.names) == (topic is not None):
        raise ConfigError(
            "topic",
            "name the topic by either an option or a column",
            hint='option("topic", "orders")',
        )


def _same(found: DataType, expected: DataType) -> bool:
    if isinstance(expected, MapType):
        return isinstance(found, MapType) and (found.keyType, found.valueType) == (
            expected.keyType,
            expected.valueType,
        )
    return found == expected


def _add(group: JobBundle, batch: pa.RecordBatch, topic: str | None) -> int:
    """Add the rows to the bundle; return their number."""
    if topic is not None:
        _send(group, topic, batch)
        return int(batch.num_rows)
    topics = batch.column("topic")
    for name in _listed(pc.unique(topics), "topic"):
        if name is None:
            raise ConfigError(
                "columns", "a row has no topic", hint="filter such rows out, or fill in a topic"
            )
        _send(group, name, batch.filter(pc.equal(topics, name)))
    return int(batch.num_rows)


def _send(group: JobBundle, topic: str, batch: pa.RecordBatch) -> None:
    if batch.column("body").null_count:
        raise ConfigError(
            "columns", "a row has no body", hint="filter such rows out, or send empty bodies"
        )
    if not batch.num_rows:
        return
    columns = [
        binary_column(batch.column("body")),
        *(_cells(batch, name, most) for name, most in TEXT_LIMITS.items()),
        _header_cells(batch),
    ]
    rows = ArrowRows(pa.RecordBatch.from_arrays(columns, schema=SCHEMA), micros_now())
    group.send_rows(topic, rows, rows.size)


def _cells(batch: pa.RecordBatch, name: str, most: int) -> pa.Array:
    """Return a column of texts as a batch of messages has it. Raises ConfigError where
    a text is none, LocalProtocolError where it is too long.
    """
    if name not in batch.schema.names:
        return empty_column(batch.num_rows)
    column = batch.column(name)
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        _listed(column, name)  # says which
        raise
    cells = binary_column(column)
    if (longest := longest_of(cells)) > most:
        raise text_too_long(name, longest, most)
    return cells


def _header_cells(batch: pa.RecordBatch) -> pa.Array:
    headers = batch.column("headers") if "headers" in batch.schema.names else None
    if headers is None or headers.null_count == batch.num_rows:
        return empty_column(batch.num_rows)
    listed = _listed(headers, "headers")
    return pa.array([header_cell(dict(pairs or ())) for pairs in listed], pa.binary())


def _listed(column: pa.Array, name: str) -> list[Any]:
    """Return a column as Python values. Raises ConfigError where a text is none.

    A string of Spark may have any bytes, as of a cast from binary.
    """
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError as error:
        raise ConfigError(
            "columns",
            f"a row has a {name} that is no UTF-8: {error.object[:80]!r}",
            hint="use base64(column) for what is no text",
        ) from None
