"""Jobs at the broker: tasks store bundles of them, and one decision publishes these.

The decision drops all other bundles of the job: those of repeated attempts, and of
tasks that were given up. A job with a name is decided once, however often it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from uuid import UUID

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

import txmq
from txmq.client.protocol.calls import calls_by
from txmq.client.protocol.named_jobs import NamedJob, current_job
from txmq.crashpoints import crashpoint
from txmq.errors import TransactionAborted
from txmq.faces import run
from txmq.model.message import COMMIT
from txmq_spark.source.broker_link import BrokerLink
from txmq_spark.source.message_columns import add_rows

if TYPE_CHECKING:
    from txmq.client.blocking.transaction.jobs import JobBundle

SERVICE: Final = "txmq-spark"
TIMEOUT_S: Final = 30.0  # a decision over many bundles takes longer than a send
PUBLISH_TIMEOUT_S: Final = 30.0  # until all messages are visible; a large run takes a second or two
# the broker rolls back a job that has not been decided after this time
EXPIRE_S: Final = 24 * 3_600.0


@dataclass(frozen=True, slots=True)
class StoredBundle(WriterCommitMessage):
    """A task's result for the driver: the token of its job, and of its bundle there.

    The second is None where there was nothing to send, or the job is committed.
    """

    job: str
    token: str | None
    messages: int


def find_job(broker: txmq.Client | BrokerLink, name: str) -> NamedJob:
    """Return the job of a name, as the broker knows it."""
    return run(current_job(calls_by(broker.call), name))


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

    def fill(group: JobBundle) -> int:
        return sum(add_rows(group, one, topic) for one in batches)

    return store_bundle(client, job, fill)


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
