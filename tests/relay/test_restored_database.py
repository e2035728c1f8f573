"""A relay whose database is a copy from before, its slot and timeline included."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.client.real import RealBroker
from tests.fixtures_postgres import create_database, memory_or_disk
from tests.relay.test_relay import alarms, arrived, bodies, emitted, texts
from tests.system.emit_worker import SLOT, running_relay
from txmq.client.blocking.client import Client
from txmq.relay import slot
from txmq.testing.postgres_server import LOGICAL, PREFIX, OwnServer
from txmq.testing.wait import wait_until
from txmq.tx.postgres.session import connect as connect_database

TOPIC = "orders"
# More log than the messages of a test: behind it LSNs are given again.
FILLER = "SELECT pg_logical_emit_message(false, 'filler', repeat('x', 1000000))"


class RestoredDatabase:
    """A server with a slot, and a backup of its files from before the broker's last
    message.
    """

    def __init__(self, broker: RealBroker) -> None:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=memory_or_disk()))
        self.server = OwnServer(directory, fsync=False, settings=LOGICAL, temporary=True)
        self._broker, self._directory = broker, directory

    def start(self) -> RestoredDatabase:
        self.server.start()
        self.dsn = self.server.dsn(create_database(self.server))
        self.create_slot(SLOT)
        self._relay("one", 1)
        self._copy("data", "backup")
        self._relay("two", 2)
        return self

    def restore(self) -> None:
        self._copy("backup", "data")

    def create_slot(self, name: str) -> slot.SlotStatus:
        with closing(connect_database(self.dsn, application_name="test")) as connection:
            return slot.create(connection, name)

    def drop_slot(self, name: str) -> None:
        with closing(connect_database(self.dsn, application_name="test")) as connection:
            slot.drop(connection, name)

    def _relay(self, body: str, count: int) -> None:
        emitted(self.dsn, TOPIC, body)
        with running_relay(self._broker.url, self.dsn):
            arrived(self._broker, TOPIC, count)

    def _copy(self, source: str, target: str) -> None:
        self.server.kill_server()
        shutil.rmtree(self._directory / target, ignore_errors=True)
        subprocess.run(["cp", "-a", self._directory / source, self._directory / target], check=True)
        self.server.start()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[RealBroker]:
    running = RealBroker(tmp_path / "broker")
    yield running
    running.stop()


@pytest.fixture
def restored(broker: RealBroker) -> Iterator[RestoredDatabase]:
    database = RestoredDatabase(broker)
    with database.server:
        database.start().restore()
        yield database


def test_a_slot_made_beside_a_rewound_one_tells_what_nobody_has_sent(
    broker: RealBroker, restored: RestoredDatabase, connect: Callable[..., Client]
) -> None:
    client = connect(broker.url)
    emitted(restored.dsn, TOPIC, "missed")
    with running_relay(broker.url, restored.dsn):
        wait_until(lambda: alarms(client) == {"relay.rewound": "critical"}, what="the alarm")
        assert f"--replaces {SLOT}" in texts(client)
    made = restored.create_slot("another")
    assert made.origin is not None
    assert made.origin.replaces == (SLOT,)
    emitted(restored.dsn, TOPIC, "new")
    with running_relay(broker.url, restored.dsn, slot="another"):
        assert bodies(arrived(broker, TOPIC, 3)) == ["one", "two", "new"]
        wait_until(lambda: alarms(client).get("relay.missed") == "critical", what="the alarm")


def test_a_log_that_was_written_anew_is_not_taken_for_the_old_one(
    broker: RealBroker, restored: RestoredDatabase, connect: Callable[..., Client]
) -> None:
    client = connect(broker.url)
    emitted(restored.dsn, TOPIC, "missed")
    restored.server.execute(FILLER)
    emitted(restored.dsn, TOPIC, "behind what the broker has")
    with running_relay(broker.url, restored.dsn):
        wait_until(lambda: alarms(client) == {"relay.rewound": "critical"}, what="the alarm")
        wait_until(lambda: "is not in the database's log" in texts(client), what="the reason")
    assert bodies(broker.read(TOPIC)) == ["one", "two"]
