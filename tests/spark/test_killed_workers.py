"""Python workers killed in the middle of their tasks."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import txmq
from tests.client.proxy import Proxy
from tests.spark.consuming import let_die
from tests.spark.stream_driver import texts
from tests.spark.test_watching import CENTURY, alerts
from txmq.client.protocol.address import parse_url
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.tx.postgres.session import connect
from txmq.wire.data_requests import Opcode
from txmq_spark.commands import command_line, stream_commands
from txmq_spark.database.mapping import BusinessTable, Mapping
from txmq_spark.reconcile import ReconcileOptions, reconciled

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MESSAGES = 20
WORKER = b"pyspark.daemon"


@pytest.fixture
def proxy(broker: str) -> Iterator[Proxy]:
    with Proxy(broker) as proxy:
        yield proxy


@contextmanager
def killed_while(
    waits: Callable[[], bool], port: int, release: Callable[[], None]
) -> Iterator[list[int]]:
    """Kill the workers of Spark that are connected to a port of this machine, as soon
    as one `waits` there; then `release` the others. Yield a list for their ids.
    """
    killed = list[int]()

    def kill() -> None:
        try:
            wait_until(waits, what="a task waits")
            killed.extend(workers_at(port))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        finally:
            release()

    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill)
        yield killed
        killing.result(PATIENCE_S)


@contextmanager
def killed_reading(proxy: Proxy) -> Iterator[list[int]]:
    """Kill workers that wait for messages of the log."""
    [(_host, port)] = parse_url(proxy.url)
    proxy.hold.add(Opcode.READ)
    with killed_while(lambda: proxy.held > 0, port, proxy.hold.clear) as killed:
        yield killed


def workers_at(port: int) -> list[int]:
    """Return the workers of Spark that are connected to a port of this machine."""
    sockets = set()
    for line in Path("/proc/net/tcp").read_text("ascii").splitlines()[1:]:
        _number, _here, there, _state, *_more, inode = line.split()[:10]
        if int(there.partition(":")[2], 16) == port:
            sockets.add(f"socket:[{inode}]")
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if WORKER in (place / "cmdline").read_bytes() and sockets & {
                str(one.readlink()) for one in (place / "fd").iterdir()
            }:
                found.append(int(place.name))
    return found


def test_a_read_whose_workers_are_killed_has_each_message_once(
    spark: SparkSession, proxy: Proxy, topic: str, client: txmq.Client
) -> None:
    client.call("topic.create", name=topic, partitions=2)
    client.send_many(topic, texts(*range(MESSAGES)))
    rows = spark.read.format("txmq").options(url=proxy.url, topic=topic, columns="body").load()
    with killed_reading(proxy) as killed:
        found = rows.collect()
    assert killed
    assert Counter(bytes(row["body"]) for row in found) == Counter(texts(*range(MESSAGES)))


def test_a_reconciliation_whose_workers_are_killed_makes_the_same_plan(
    spark: SparkSession,
    proxy: Proxy,
    broker: str,
    topic: str,
    client: txmq.Client,
    database: str,
    tmp_path: Path,
) -> None:
    """In the log, and in COPY of a table."""
    client.call("topic.create", name=topic, partitions=2)
    bodies = texts(*range(MESSAGES))
    client.send_many(topic, bodies, keys=[f"k{n % 7}" for n in range(MESSAGES)])
    let_die(client, topic, topic, bodies[3:9], "concurrent")
    mapping = Mapping(tables=(BusinessTable(name="slow", key="id"),))
    options = ReconcileOptions(broker, (topic,), database, mapping=mapping)
    copying = (
        "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query ~ '^COPY'"
        " AND datname = current_database()"
    )
    with (
        closing(connect(database, application_name="tests")) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute(
            "CREATE TABLE orders AS SELECT 'k' || n AS id FROM generate_series(2, 5) n;"
            # A COPY of it stops behind a row, as long as somebody has the lock.
            " CREATE VIEW slow AS SELECT id FROM orders"
            " WHERE id < 'k4' OR pg_advisory_xact_lock(18) IS NOT NULL"
        )
        with reconciled(spark, options) as found:
            calm = found.manifest
        cursor.execute("SELECT pg_advisory_lock(18)")

        def waits() -> bool:
            cursor.execute(copying)
            return cursor.rowcount > 0

        def release() -> None:
            cursor.execute("SELECT pg_advisory_unlock(18)")

        port = connection.info.port
        with killed_reading(proxy) as readers, killed_while(waits, port, release) as copiers:
            disturbed = options._replace(url=proxy.url)
            with reconciled(spark, disturbed) as found:
                found.write(str(tmp_path / "disturbed"))
    assert readers
    assert copiers
    assert sum(calm.letters[topic].values()) == len(bodies[3:9])
    assert found.manifest == calm


def test_a_watch_whose_workers_are_killed_tells_the_same_alerts(
    spark: SparkSession,
    proxy: Proxy,
    broker: str,
    topic: str,
    client: txmq.Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While they count the log, in a batch with letters."""
    monkeypatch.setattr(stream_commands, "job_session", lambda: nullcontext(spark))
    client.send_many(topic, texts(*range(MESSAGES)))
    let_die(client, topic, topic, texts(*range(8)), "concurrent")

    def told(url: str, name: str) -> list[tuple[str, int]]:
        client.call("topic.create", name=f"{topic}-{name}", partitions=1)
        arguments = ["watch", "--broker", url, "--group", topic, "--alerts", f"{topic}-{name}"]
        arguments += ["--checkpoint", str(tmp_path / name), "--flood", "3", "--share", "30"]
        assert command_line.main([*arguments, "--window", CENTURY]) == 0
        return alerts(broker, f"{topic}-{name}")

    calm = told(broker, "calm")
    assert [kind for kind, _offset in calm] == ["flood", "new-error"]
    with killed_reading(proxy) as killed:
        assert told(proxy.url, "disturbed") == calm
    assert killed
