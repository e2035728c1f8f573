"""Places that alerts go to: a topic, and a table in PostgreSQL.

Both take an alert once, however often it is sent: a topic by the name under which it is
sent, a table by the alert's id.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Final, NamedTuple
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
from txmq_spark.database_snapshot import table_name
from txmq_spark.named_jobs import current_job
from txmq_spark.watch_rules import Alert
from txmq_spark.writing import publish, store_rows, task_client

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
    added_at timestamptz NOT NULL DEFAULT now()
)""")
INSERT: Final = SQL("""
INSERT INTO {table} (id, kind, consumer_group, dead_at, alert) VALUES %s
ON CONFLICT (id) DO NOTHING""")
ROW: Final = "(%s, %s, %s, to_timestamp(%s), %s::jsonb)"
log = structlog.get_logger()


class AlertTable(NamedTuple):
    """A table for alerts, which the first use makes where it does not exist."""

    dsn: str
    name: str

    def prepare(self) -> None:
        """Make the table where it does not exist. Raises DatabaseError."""
        name = self._identifier()
        with (
            closing(connect(self.dsn, application_name=APPLICATION_NAME)) as connection,
            translated(f"making the table {self.name}"),
            connection.cursor() as cursor,
        ):
            cursor.execute("SELECT to_regclass(%s)", (name.as_string(connection),))
            if cursor.fetchone() == (None,):
                cursor.execute(TABLE.format(table=name))

    def add(self, alerts: Sequence[Alert]) -> None:
        """Add alerts that the table does not have; wait for a server that restarts.

        Raises DatabaseError.
        """
        if alerts:
            patiently(lambda: self._add(alerts))

    def _add(self, alerts: Sequence[Alert]) -> None:
        rows = [
            (
                one.fields["id"],
                one.kind,
                one.fields["group"],
                one.fields["dead_at"] / SECOND,
                one.to_json(),
            )
            for one in alerts
        ]
        with (
            closing(connect(self.dsn, application_name=APPLICATION_NAME)) as connection,
            translated(f"adding alerts to {self.name}"),
            transaction(connection) as cursor,
        ):
            statement = INSERT.format(table=self._identifier())
            execute_values(cursor, statement, rows, ROW)
            crashpoint("spark.alerts_inserted")

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
        if not alerts:
            return
        if self.table is not None:
            self.table.add(alerts)
        crashpoint("spark.alerts_stored")
        with task_client(self.url) as client:
            job = current_job(client, name)
            if not job.committed:
                token, _messages = store_rows(client, job.token, [_rows(alerts)], self.topic)
                publish(client, job.token, [UUID(token)] if token else [])


def patiently(step: Callable[[], None]) -> None:
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


def _rows(alerts: Sequence[Alert]) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "body": pa.array([one.to_json().encode() for one in alerts], pa.binary()),
            "key": [one.fields["group"] for one in alerts],
            "tag": [one.kind for one in alerts],
        }
    )
