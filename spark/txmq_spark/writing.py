"""DataFrames as messages: one job, whose tasks store groups and whose one decision
sends them all.

Each task stores what it gets as a group under a fresh token, undecided and invisible,
and tells the driver the token. The driver's commit is one decision that names the
winning groups; a group that another attempt of the task stored, or a task that was
given up, is dropped by it. So a task that is tried again, a second copy of a slow one
and a driver that dies change nothing. With `idempotency_key` the job has a name:
running it again meets the first run's decision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, DataType, MapType, StringType, StructType

import txmq
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import ConfigError, TransactionAborted
from txmq.model.message import COMMIT, Message
from txmq_spark.jobs import Job, current
from txmq_spark.options import Writing

if TYPE_CHECKING:
    from txmq.client.blocking.transaction.jobs import JobGroup

SERVICE: Final = "txmq-spark"
PATIENCE_S: Final = 30.0  # a decision over many groups is more than one send
VISIBLE_S: Final = 30.0  # for the messages of a run to be seen; a large one takes a second or two
EXPIRE_S: Final = (
    24 * 3_600.0
)  # then the broker gives up a job whose driver never came to decide it
TYPES: Final[dict[str, DataType]] = {
    "topic": StringType(),
    "body": BinaryType(),
    "key": StringType(),
    "tag": StringType(),
    "headers": MapType(StringType(), StringType()),
}
HINT: Final = "select what shall be sent: body binary; and key, tag, topic string, headers map<string,string> if wanted"


@dataclass(frozen=True, slots=True)
class Stored(WriterCommitMessage):
    """What a task tells the driver: the token of its group, None where there was
    nothing to send.
    """

    token: str | None
    messages: int


class JobWriter(DataSourceArrowWriter):
    """Writes to topics. Made by the driver, where `commit` and `abort` run, too;
    `write` runs in its tasks.
    """

    def __init__(self, wanted: Writing, job: Job) -> None:
        self._wanted, self._job = wanted, job

    @classmethod
    def planned(cls, wanted: Writing, schema: StructType, *, overwrite: bool) -> Self:
        """The writer for rows of this schema. Raises ConfigError where they are no
        messages, BrokerUnavailable.
        """
        if overwrite:
            raise ConfigError("mode", "a topic cannot be overwritten", hint='mode("append")')
        check_columns(schema, wanted.topic)
        if wanted.idempotency_key is None:
            return cls(wanted, Job(new_token(), committed=False))
        with connected(wanted.url) as client:
            return cls(
                wanted, current(client, f"write {wanted.topic or ''} {wanted.idempotency_key}")
            )

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Stored:
        """Stores the rows as one group, in parts if they are many. Raises what
        `client.send` raises.
        """
        if self._job.committed:
            return Stored(None, 0)
        with connected(self._wanted.url) as client:
            group = client.job(self._job.token, expire_after=EXPIRE_S).group()
            messages = sum(_add(group, batch, self._wanted.topic) for batch in iterator)
            return Stored(group.store().hex if messages else None, messages)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Sends everything; what waits behind an undecided message of its key may be
        seen only after this returns.

        Raises TransactionAborted where another run of the same job gave it up
        meanwhile.
        """
        winners = [
            UUID(message.token)
            for message in messages
            if isinstance(message, Stored) and message.token
        ]
        with connected(self._wanted.url) as client:
            job = client.job(self._job.token)
            decided = job.decide(winners)
            if decided.outcome is COMMIT and not decided.repeated:
                job.wait_published(winners, VISIBLE_S)
        if decided.outcome is not COMMIT:
            hint = "nothing was sent: run it again"
            raise TransactionAborted(
                f"job {self._job.token} was rolled back by another run or by its time-out",
                hint=hint,
            )

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Drops everything; what another run of the job has committed stays."""
        with connected(self._wanted.url) as client:
            client.job(self._job.token).abort()


def connected(url: str) -> txmq.Client:
    """A client for a task or the driver."""
    return txmq.connect(url, service=SERVICE, timeout=PATIENCE_S)


def check_columns(schema: StructType, topic: str | None) -> None:
    """Raises ConfigError where rows of this schema are no messages."""
    for field in schema:
        wanted = TYPES.get(field.name)
        if wanted is None or not _same(field.dataType, wanted):
            what = f"{field.name} {field.dataType.simpleString()}"
            raise ConfigError("columns", f"a message has no column {what}", hint=HINT)
    if "body" not in schema.names:
        raise ConfigError("columns", "a message needs a body", hint=HINT)
    if ("topic" in schema.names) == (topic is not None):
        raise ConfigError(
            "topic",
            "either an option or a column says where to send",
            hint='option("topic", "orders")',
        )


def _same(found: DataType, wanted: DataType) -> bool:
    if isinstance(wanted, MapType):
        return isinstance(found, MapType) and (found.keyType, found.valueType) == (
            wanted.keyType,
            wanted.valueType,
        )
    return found == wanted


def _add(group: JobGroup, batch: pa.RecordBatch, topic: str | None) -> int:
    """Adds the rows to the group; returns how many they are."""
    if topic is not None:
        _send(group, topic, batch)
        return int(batch.num_rows)
    topics = batch.column("topic")
    for name in pc.unique(topics).to_pylist():
        if name is None:
            raise ConfigError("columns", "a row has no topic", hint="filter it out, or give it one")
        _send(group, name, batch.filter(pc.equal(topics, name)))
    return int(batch.num_rows)


def _send(group: JobGroup, topic: str, batch: pa.RecordBatch) -> None:
    if batch.column("body").null_count:
        raise ConfigError(
            "columns", "a row has no body", hint="filter it out, or send an empty one"
        )
    bodies, keys, tags, headers = (
        _values(batch, name) for name in ("body", "key", "tag", "headers")
    )
    if headers is None or not any(headers):
        group.send_many(topic, bodies or (), keys, tags)
        return
    empty = [None] * batch.num_rows
    for body, key, tag, pairs in zip(
        bodies or (), keys or empty, tags or empty, headers, strict=True
    ):
        group.add(topic, Message(body, key, tag, dict(pairs or ())))


def _values(batch: pa.RecordBatch, name: str) -> list[Any] | None:
    """A column as Python values, None where there is no such column."""
    return batch.column(name).to_pylist() if name in batch.schema.names else None
