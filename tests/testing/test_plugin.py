"""The plugin of pytest for services, and its crash kit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg2
import pytest

import txmq
from tests.document_examples import blocks
from txmq import crashpoints
from txmq.errors import LocalProtocolError
from txmq.testing.broker_thread import BrokerThread
from txmq.testing.crash_kit import POINTS, CrashKit
from txmq.testing.postgres_server import PostgresServer
from txmq.testing.wait import PATIENCE_S

ROOT = Path(__file__).parents[2]


@pytest.fixture
def broker(tmp_path: Path, database: str) -> Iterator[BrokerThread]:
    with BrokerThread(tmp_path / "data", databases={"shop": database}) as broker:
        yield broker


def buy(url: str, dsn: str) -> None:
    """A service with a bug: it stores its row before the transaction."""
    with (
        txmq.connect(url, service="shop", timeout=PATIENCE_S) as client,
        closing(psycopg2.connect(dsn)) as database,
    ):
        with closing(psycopg2.connect(dsn)) as other, other, other.cursor() as cursor:
            cursor.execute("INSERT INTO bought VALUES (1)")
        with client.transaction(database) as tx:
            tx.send("bought", b"1")


def send_plainly(url: str) -> None:
    with txmq.connect(url, timeout=PATIENCE_S) as client:
        client.send("bought", b"1")


def fail() -> None:
    raise ValueError("a bug of the service")


def passed(postgres: PostgresServer, tests: Path | str) -> int:
    """Return how many tests of a service have passed, and no other one ran."""
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:txmq", "-p", "txmq.testing.plugin",
         "-p", "no:cacheprovider", tests],
        cwd=ROOT, env=os.environ | {"TXMQ_TEST_DSN": postgres.dsn()},
        capture_output=True, check=False, text=True, timeout=4 * PATIENCE_S,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    [number] = re.findall(r"\b(\d+) passed", ran.stdout)
    return int(number)


def test_the_tests_of_the_example_services_pass(postgres: PostgresServer) -> None:
    assert passed(postgres, "examples/services") == 4


def test_the_tests_of_the_page_pass_as_they_stand(postgres: PostgresServer, tmp_path: Path) -> None:
    printed = [block for block in blocks("docs/TESTING.md") if block.language == "python"]
    for block in printed:
        (tmp_path / f"test_block_{block.number}.py").write_text(block.text)
    assert passed(postgres, tmp_path) == len(printed) == 2


def test_a_row_without_its_message_is_seen_after_a_kill(
    broker: BrokerThread, database: str
) -> None:
    with closing(psycopg2.connect(database)) as connection, connection.cursor() as cursor:
        connection.autocommit = True
        cursor.execute("CREATE TABLE bought (id int)")
        seen = []
        with txmq.connect(broker.url) as client:
            client.call("topic.create", name="bought", partitions=1)
            points = ("tx.before_commit", "tx.after_commit")
            for kill in CrashKit(broker).kills(buy, broker.url, database, points=points):
                cursor.execute("SELECT count(*) FROM bought")
                row = cursor.fetchone()
                assert row is not None
                seen.append((kill.point, row[0], len(list(client.find("bought")))))
    assert seen == [("tx.before_commit", 1, 0), ("tx.after_commit", 2, 1)]


def test_work_that_cannot_be_killed_is_refused(broker: BrokerThread) -> None:
    kit = CrashKit(broker)
    with pytest.raises(LocalProtocolError, match="reached none of the crash points"):
        list(kit.kills(send_plainly, broker.url, points=("tx.after_commit",)))
    assert kit.missed == ["tx.after_commit"]
    with pytest.raises(LocalProtocolError, match="failed by itself, with exit status 1"):
        list(kit.kills(fail, points=("tx.after_commit",)))
    with pytest.raises(LocalProtocolError, match="cannot run in another process"):
        list(kit.kills(lambda: None))


def test_every_crash_point_of_services_is_in_the_kit() -> None:
    roles = {name.partition(".")[0] for name in POINTS}
    found = {
        name
        for source in Path(crashpoints.__file__).parent.rglob("*.py")
        for name in re.findall(r'\bcrashpoint\("([a-z_.]+)"\)', source.read_text("utf-8"))
        if name.partition(".")[0] in roles
    }
    assert set(POINTS) == found


def test_what_is_due_comes_when_the_clock_is_moved(broker: BrokerThread) -> None:
    with txmq.connect(broker.url) as client, client.consumer("g", ["later"]) as consumer:
        client.send("later", b"x", delay=3_600)
        assert consumer.receive(0.05) is None
        broker.clock.advance(3_600)
        message = consumer.receive(PATIENCE_S)
        assert message is not None
        consumer.ack(message)
        with pytest.raises(LocalProtocolError, match="to let pass is -1"):
            broker.clock.advance(-1)


def test_the_plugin_imports_nothing_before_it_is_used() -> None:
    program = "import txmq.testing.plugin, sys; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    ).stdout.split()
    assert not {"twisted", "psycopg2", "pydantic", "lmdb"} & set(modules)
