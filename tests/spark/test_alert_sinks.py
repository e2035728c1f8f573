"""Alerts in a topic and a table, over killed senders and a crashed PostgreSQL."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from tests.spark.test_writing import sent
from tests.tx.postgres.support import rows
from txmq.testing.postgres_server import OwnServer
from txmq.testing.processes import run_script
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.tx.postgres.session import connect
from txmq_spark.alerts import sinks as subject
from txmq_spark.alerts.sinks import AlertSinks, AlertTable
from txmq_spark.alerts.watch_rules import Alert

if TYPE_CHECKING:
    import txmq

WAITING = (
    "SELECT FROM pg_stat_activity"
    " WHERE wait_event_type = 'Lock' AND query ~ 'told' AND datname = current_database()"
)
# True: the row is there when the sender dies at that place, and the message.
POINTS = {
    "spark.alerts_inserted": (False, False),
    "spark.alerts_stored": (True, False),
    "spark.bundle_stored": (True, False),
    "spark.before_decision": (True, False),
    "spark.decided": (True, True),
    "spark.published": (True, True),
}


# Sends an alert named as the crash point, and dies there.
SENDERS = """
import json, os, sys
from txmq.crashpoints import VARIABLE
from tests.spark.test_alert_sinks import send
url, topic, dsn, points = sys.argv[1:]
for point in json.loads(points):
    pid = os.fork()
    if not pid:
        os.environ[VARIABLE] = point
        send(url, topic, dsn, point)
        os._exit(0)
    print(point, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def alert(name: str) -> Alert:
    return Alert("new-error", {"id": name, "group": "g", "dead_at": 1_700_000_000_000_000})


def send(url: str, topic: str, dsn: str, name: str) -> None:
    sinks = AlertSinks(url, topic, AlertTable(dsn, "public.told"))
    sinks.send(f"stream {topic} {name}", [alert(name)])


def in_table(dsn: str) -> list[str]:
    return sorted(str(name) for (name,) in rows(dsn, "SELECT id FROM told"))


def in_topic(broker: str, topic: str) -> list[str]:
    return sorted(json.loads(one.body)["id"] for _partition, one in sent(broker, topic))


def test_an_alert_is_there_once_though_its_sender_died_at_any_step(
    broker: str, topic: str, client: txmq.Client, database: str
) -> None:
    client.call("topic.create", name=topic, partitions=1)
    for _ in range(2):
        AlertTable(database, "public.told").prepare()
    died = run_script(SENDERS, broker, topic, database, json.dumps(list(POINTS)))
    assert died.splitlines() == [f"{point} -9" for point in POINTS]
    assert in_table(database) == sorted(point for point, (row, _sent) in POINTS.items() if row)
    assert in_topic(broker, topic) == sorted(one for one, (_row, told) in POINTS.items() if told)
    # Even if no letter is open any more that would make an alert again.
    AlertSinks(broker, topic, AlertTable(database, "public.told")).resume(topic)
    assert in_topic(broker, topic) == in_table(database)
    for point in POINTS:
        send(broker, topic, database, point)
    assert in_table(database) == in_topic(broker, topic) == sorted(POINTS)
    assert client.call("tx.list")["transactions"] == []
    assert AlertTable(database, "public.told").unsent_jobs(topic) == []


def test_a_batch_with_fewer_alerts_in_its_second_run_sends_those_of_the_first(
    broker: str, topic: str, client: txmq.Client, database: str
) -> None:
    """A letter was closed meanwhile; another one is the first of its kind then."""
    client.call("topic.create", name=topic, partitions=1)
    table = AlertTable(database, "told")
    table.prepare()
    table.add([alert("a"), alert("b")], "stream q 1")
    AlertSinks(broker, topic, table).send("stream q 1", [alert("b"), alert("c")])
    assert in_topic(broker, topic) == ["a", "b", "c"]
    assert in_table(database) == ["a", "b", "c"]
    assert table.unsent_jobs("q") == []


def test_two_watches_make_a_table_at_the_same_time(database: str) -> None:
    AlertTable(database, "other").prepare()
    table, like = AlertTable(database, "told"), "CREATE TABLE told (LIKE other INCLUDING ALL)"
    with (
        ThreadPoolExecutor(1) as pool,
        closing(connect(database, application_name="tests")) as connection,
    ):
        with connection.cursor() as cursor:
            cursor.execute(f"BEGIN; {like}")
            preparing = pool.submit(table.prepare)
            wait_until(lambda: rows(database, WAITING), what="the second one waits")
            cursor.execute("COMMIT")
        preparing.result(PATIENCE_S)
    assert table.add([alert("a")], "stream q 1") == [alert("a")]


def test_a_crash_of_postgresql_while_alerts_are_added_is_survived(
    crashable_postgres: OwnServer, crashable_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "DATABASE_PATIENCE_S", PATIENCE_S)
    table = AlertTable(crashable_database, "told")
    table.prepare()
    alerts = [alert("a"), alert("b"), alert("c")]
    with (
        ThreadPoolExecutor(1) as pool,
        closing(connect(crashable_database, application_name="tests")) as connection,
    ):
        with connection.cursor() as cursor:
            cursor.execute("BEGIN; INSERT INTO told VALUES ('b', 'k', 'g', now(), '{}')")
        adding = pool.submit(table.add, alerts, "j")
        wait_until(lambda: rows(crashable_database, WAITING), what="the lock is met")
        crashable_postgres.restart("immediate")
        assert adding.result(PATIENCE_S) == alerts
    assert in_table(crashable_database) == ["a", "b", "c"]


def test_a_watch_waits_for_a_server_that_is_away_as_it_begins(
    crashable_postgres: OwnServer, crashable_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "DATABASE_PATIENCE_S", PATIENCE_S)
    table = AlertTable(crashable_database, "told")

    def begin() -> list[str]:
        table.prepare()
        return table.unsent_jobs("q")

    crashable_postgres.kill_server()
    with capture_logs() as logs, ThreadPoolExecutor(1) as pool:
        beginning = pool.submit(begin)
        wait_until(lambda: logs, what="the server was missed")
        crashable_postgres.start()
        assert beginning.result(PATIENCE_S) == []
    assert {entry["event"] for entry in logs} == {"spark.database_away"}
