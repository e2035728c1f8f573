"""Slots: creation, inspection, removal, and their errors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
from psycopg2.extensions import make_dsn

from tests.tx.postgres.support import poor_role, rows
from txmq import emit
from txmq.errors import (
    ConfigError,
    DatabaseError,
    SlotInUse,
    SlotLost,
    SlotMissing,
    UnsupportedServer,
    WalLevelTooLow,
)
from txmq.relay import slot
from txmq.relay.slot import SlotStatus
from txmq.relay.slot_stream import SlotStream
from txmq.testing.postgres_server import OwnServer
from txmq.testing.wait import wait_until
from txmq.tx.postgres.blocking import read_server
from txmq.tx.postgres.session import Connection, connect

NAME = "txmq_relay"


@contextmanager
def connected(dsn: str) -> Iterator[Connection]:
    with closing(connect(dsn, application_name="test")) as connection:
        yield connection


@pytest.fixture
def connection(logical_database: str) -> Iterator[Connection]:
    with connected(logical_database) as connection:
        yield connection


def emit_one(dsn: str) -> None:
    with connected(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("BEGIN")
        emit(connection, "t", b"x")
        cursor.execute("COMMIT")


def looked_at(dsn: str) -> SlotStatus:
    with connected(dsn) as connection:
        found = slot.find_with_lag(connection, NAME)
    assert found is not None
    return found


def test_a_slot_is_made_and_read_and_dropped(connection: Connection, logical_database: str) -> None:
    made = slot.create(connection, NAME)
    assert (made.name, made.active_pid, made.wal_status, made.unfit) == (NAME, None, "reserved", "")
    with closing(SlotStream(logical_database, NAME)) as stream:
        assert slot.require(connection, NAME).active_pid is not None
        assert stream.source.timeline == 1
        assert stream.source.watermark_name(1) == f"{stream.source.system_id}-1-{NAME}"
    wait_until(lambda: slot.require(connection, NAME).active_pid is None, what="the slot is free")
    slot.drop(connection, NAME)
    assert slot.find(connection, NAME) is None
    assert rows(logical_database, "SELECT FROM pg_publication") == []


def test_a_slot_is_not_made_again_over_another(connection: Connection) -> None:
    slot.create(connection, NAME)
    with pytest.raises(ConfigError, match="exists already"):
        slot.create(connection, NAME)


def test_a_slot_that_is_not_there_is_not_made_by_the_way(logical_database: str) -> None:
    with pytest.raises(SlotMissing, match="txmq relay create"):
        SlotStream(logical_database, NAME)


def test_one_reads_a_slot_at_a_time(connection: Connection, logical_database: str) -> None:
    slot.create(connection, NAME)
    with closing(SlotStream(logical_database, NAME)):
        with pytest.raises(SlotInUse) as refused:
            SlotStream(logical_database, NAME)
        assert refused.value.retriable
        with pytest.raises(SlotInUse):
            slot.drop(connection, NAME)


def test_a_slot_of_another_database_is_refused(
    connection: Connection, logical_postgres: OwnServer
) -> None:
    slot.create(connection, NAME)
    with pytest.raises(SlotMissing, match="another database"):
        SlotStream(logical_postgres.dsn(), NAME)


def test_a_slot_with_another_plugin_is_refused(
    connection: Connection, logical_database: str
) -> None:
    rows(logical_database, "SELECT pg_create_logical_replication_slot(%s, 'test_decoding')", NAME)
    with pytest.raises(SlotMissing, match="test_decoding"):
        slot.require(connection, NAME)


def test_a_physical_slot_is_refused(connection: Connection, logical_database: str) -> None:
    rows(logical_database, "SELECT pg_create_physical_replication_slot(%s)", NAME)
    with pytest.raises(SlotMissing, match="physical"):
        slot.require(connection, NAME)


def test_a_slot_without_its_publication_is_refused(
    connection: Connection, logical_database: str
) -> None:
    slot.create(connection, NAME)
    rows(logical_database, f"DROP PUBLICATION {NAME}")
    with pytest.raises(SlotMissing, match="publication"):
        slot.require(connection, NAME)


def test_no_slot_without_logical_decoding(database: str) -> None:
    with connected(database) as connection, pytest.raises(WalLevelTooLow) as refused:
        slot.create(connection, NAME)
    assert refused.value.found == "replica"
    assert "wal_level = logical" in refused.value.hint


def test_no_slot_without_the_right_to_replicate(logical_database: str) -> None:
    with (
        poor_role(logical_database) as (_role, dsn),
        connected(dsn) as connection,
        pytest.raises(DatabaseError, match="REPLICATION"),
    ):
        slot.create(connection, NAME)


def test_no_reading_without_the_right_to_replicate(
    connection: Connection, logical_database: str
) -> None:
    slot.create(connection, NAME)
    with poor_role(logical_database) as (_role, dsn), pytest.raises(DatabaseError):
        SlotStream(dsn, NAME)


def test_no_slot_where_all_are_in_use(connection: Connection, logical_database: str) -> None:
    for number in range(4):
        rows(logical_database, "SELECT pg_create_physical_replication_slot(%s)", f"other_{number}")
    with pytest.raises(DatabaseError, match="max_replication_slots"):
        slot.create(connection, NAME)


@pytest.mark.parametrize("name", ["", "Upper", "a-b", "x" * 64])
def test_names_that_no_slot_can_have_are_refused(connection: Connection, name: str) -> None:
    with pytest.raises(ConfigError):
        slot.create(connection, name)


def test_an_unread_slot_keeps_log_and_has_alarms(
    connection: Connection, logical_database: str
) -> None:
    slot.create(connection, NAME)
    assert looked_at(logical_database).lag_s == 0
    began = time.monotonic()
    emit_one(logical_database)
    rows(logical_database, "SELECT pg_sleep(0.3)")
    found = looked_at(logical_database)
    assert found.lag_s is not None
    assert 0.3 <= found.lag_s <= time.monotonic() - began + 1
    assert found.retained > 0
    assert found.alarms(retained=1 << 40, lag_s=3_600) == {}
    assert set(found.alarms(retained=1, lag_s=0.1)) == {"retained", "lag"}


def test_a_slot_whose_log_is_gone_is_lost_and_said_to_be(
    connection: Connection, logical_postgres: OwnServer, logical_database: str
) -> None:
    slot.create(connection, NAME)
    with limited(logical_postgres):
        emit_one(logical_database)
        for _ in range(4):
            rows(logical_database, "SELECT pg_switch_wal()")
            rows(
                logical_database,
                "SELECT pg_logical_emit_message(false, 'filler', repeat('x', 1000000))",
            )
        rows(logical_database, "CHECKPOINT")
        found = looked_at(logical_database)
        assert found.wal_status == "lost"
        assert "lost" in found.alarms(retained=1 << 40, lag_s=60)
        with pytest.raises(SlotLost, match="had not read"):
            SlotStream(logical_database, NAME)
        with pytest.raises(ConfigError, match="exists already"):
            slot.create(connection, NAME)


@contextmanager
def limited(server: OwnServer) -> Iterator[None]:
    """The server keeps at most one mebibyte of log for slots."""
    server.execute("ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'")
    server.execute("SELECT pg_reload_conf()")
    try:
        yield
    finally:
        server.execute("ALTER SYSTEM RESET max_slot_wal_keep_size")
        server.execute("SELECT pg_reload_conf()")


def test_a_password_is_not_shown(logical_database: str) -> None:
    with pytest.raises(DatabaseError) as refused:
        SlotStream(make_dsn(logical_database, password="wrong-secret"), NAME)
    assert "secret" not in str(refused.value)


def test_a_standby_is_refused(monkeypatch: pytest.MonkeyPatch, connection: Connection) -> None:
    standby = replace(read_server(connection), in_recovery=True)
    monkeypatch.setattr("txmq.relay.slot.read_server", lambda _connection: standby)
    with pytest.raises(UnsupportedServer, match="standby"):
        slot.create(connection, NAME)
