"""Places that alerts go to: a topic, and a table in PostgreSQL.

Both take an alert once, however often it is sent: a topic by the name under which it is
sent, a table by the alert's id. The table remembers that name, and whether the topic
has the alert. So what a run has left between the two is sent later, also if the alert
would not be made again, because its letter was closed meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from threading import Lock
from typing import Any, Final, NamedTuple, TypeVar
from uuid import UUID

import pyarrow as pa
import structlog
from psycopg2.extras import execute_values
from psycopg2.sql import SQL, Identifier

from txmq.crashpoints import crashpoint
from txmq.errors import DatabaseUnavailable
from txmq.model.units import SECOND
from txmq.tx.postgres.errors import translated
from txmq.tx.postgres.session import connect, transaction
from txmq_spark.alerts.watch_rules import Alert
from txmq_spark.database.sql_tables import create, table_name
from txmq_spark.source.job_bundles import find_job, publish, store_rows, task_client

T = TypeVar("T")
APPLICATION_NAME: Final = "txmq-spark watch"
DATABASE_PATIENCE_S: Final = 60.0  # while PostgreSQL restarts
PAUSE_S: Final = 0.5
TABLE: Final = SQL("""
CREATE TABLE IF NOT EXISTS {table} (
    id text PRIMARY KEY,                        -- the same whenever the alert is made again
    kind text NOT NULL,
    consumer_group text NOT NULL,
    dead_at timestamptz NOT NULL,               -- of the letter that it is about
    alert jsonb NOT NULL,                       -- as in the topic
    added_at timestamptz NOT NULL DEFAULT now(),
    job text,                                   -- under which it is sent to the topic
    told_at timestamptz                         -- when the topic had it
)""")
INSERT: Final = SQL("""
INSERT INTO {table} (id, kind, consumer_group, dead_at, alert, job) VALUES %s
ON CONFLICT (id) DO NOTHING""")
ROW: Final = "(%s, %s, %s, to_timestamp(%s), %s::jsonb, %s)"
OF_JOB: Final = SQL("SELECT kind, alert FROM {table} WHERE job = %s ORDER BY id")
MARK_SENT: Final = SQL("UPDATE {table} SET told_at = now() WHERE job = %s AND told_at IS NULL")
UNSENT_JOBS: Final = SQL("""
SELECT DISTINCT job FROM {table}
WHERE told_at IS NULL AND split_part(job, ' ', 2) = %s ORDER BY job""")
log = structlog.get_logger()
_sending = Lock()  # a batch is sent by a thread of Spark, what was left by the main one


class AlertTable(NamedTuple):
    """A table for alerts, which the first use makes where it does not exist."""

    dsn: str
    name: str

    def prepare(self) -> None:
        """Make the table where it does not exist; wait for a server that restarts.

        Raises DatabaseError.
        """
        patiently(self._prepare)

    def _prepare(self) -> None:
        name = self._identifier()
        with (
            closing(connect(self.dsn, application_name=APPLICATION_NAME)) as connection,
            translated(f"making the table {self.name}"),
            connection.cursor() as cursor,
        ):
            cursor.execute("SELECT to_regclass(%s)", (name.as_string(connection),))
            if cursor.fetchone() == (None,):
                create(cursor, TABLE.format(table=name))

    def add(self, alerts: Sequence[Alert], job: str) -> list[Alert]:
        """Add alerts that the table does not have; wait for a server that restarts.

        Return all alerts of the job: also those of an earlier run. Raises
        DatabaseError.
        """
        return patiently(lambda: self._add(alerts, job))

    def mark_sent(self, job: str) -> None:
        """Note that the topic has the alerts of a job. Raises DatabaseError."""
        patiently(lambda: self._execute(MARK_SENT, job))

    def unsent_jobs(self, query: str) -> list[str]:
        """Return the jobs of a query whose alerts the topic may lack.

        Raises DatabaseError.
        """
        return [str(job) for (job,) in patiently(lambda: self._execute(UNSENT_JOBS, query))]

    def _execute(self, statement: SQL, value: str) -> list[tuple[Any, ...]]:
        with (
            closing(connect(self.dsn, application_name=APPLICATION_NAME)) as connection,
            translated(f"asking {self.name} for alerts"),
            connection.cursor() as cursor,
        ):
            cursor.execute(statement.format(table=self._identifier()), (value,))
            return cursor.fetchall() if cursor.description else []

    def _add(self, alerts: Sequence[Alert], job: str) -> list[Alert]:
        rows = [
            (
                one.fields["id"],
                one.kind,
                one.fields["group"],
                one.fields["dead_at"] / SECOND,
                one.to_json(),
                job,
            )
            for one in alerts
        ]
        with (
            closing(connect(self.dsn, application_name=APPLICATION_NAME)) as connection,
            translated(f"adding alerts to {self.name}"),
            transaction(connection) as cursor,
        ):
            table = self._identifier()
            if rows:
                execute_values(cursor, INSERT.format(table=table), rows, ROW)
            cursor.execute(OF_JOB.format(table=table), (job,))
            stored = [_stored(*row) for row in cursor.fetchall()]
            crashpoint("spark.alerts_inserted")
        ids = {one.fields["id"] for one in stored}
        return [*stored, *(one for one in alerts if one.fields["id"] not in ids)]

    def _identifier(self) -> Identifier:
        return table_name(self.name)


class AlertSinks(NamedTuple):
    """A topic, and perhaps a table."""

    url: str
    topic: str
    table: AlertTable | None = None

    def send(self, name: str, alerts: Sequence[Alert]) -> None:
        """Send alerts under a name, under which nothing is sent to the topic again.

        Raises TxmqError.
        """
        if alerts:
            with _sending:
                self._send(name, alerts)

    def resume(self, query: str) -> None:
        """Send what is in the table, and what earlier runs of a query, or calls that
        have failed, have not sent to the topic. Raises TxmqError.
        """
        if self.table is not None:
            with _sending:
                for name in self.table.unsent_jobs(query):
                    self._send(name, [])

    def _send(self, name: str, alerts: Sequence[Alert]) -> None:
        with task_client(self.url) as client:
            job = find_job(client, name)
            if not job.committed:
                if self.table is not None:
                    alerts = self.table.add(alerts, name)
                crashpoint("spark.alerts_stored")
                token, _messages = store_rows(client, job.token, [_rows(alerts)], self.topic)
                publish(client, job.token, [UUID(token)] if token else [])
        if self.table is not None:
            self.table.mark_sent(name)


def patiently(step: Callable[[], T]) -> T:
    """Take a step that may be repeated, until the database is there, for a minute."""
    deadline = time.monotonic() + DATABASE_PATIENCE_S
    while True:
        try:
            return step()
        except DatabaseUnavailable as error:
            if time.monotonic() >= deadline:
                raise
            log.warning("spark.database_away", error=str(error))
        time.sleep(PAUSE_S)


def _stored(kind: str, alert: dict[str, Any]) -> Alert:
    """Return the alert of a row."""
    return Alert(kind, {name: value for name, value in alert.items() if name != "alert"})


def _rows(alerts: Sequence[Alert]) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "body": pa.array([one.to_json().encode() for one in alerts], pa.binary()),
            "key": [one.fields["group"] for one in alerts],
            "tag": [one.kind for one in alerts],
        }
    )
