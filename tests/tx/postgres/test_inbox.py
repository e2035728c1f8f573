"""The inbox: one effect for each message, however often it is delivered and folded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.tx.postgres.support import (
    LOG,
    backend_pid,
    new_token,
    poor_role,
    producer,
    rows,
    wait_for_backend,
)
from txmq.errors import DatabaseConflict, SchemaMissing
from txmq.testing.postgres_server import PostgresServer
from txmq.tx.postgres import inbox_compaction
from txmq.tx.postgres.blocking import applied, claim, compact, guarded_commit
from txmq.tx.postgres.caller import BEGIN
from txmq.tx.postgres.inbox import AppliedRanges, Position
from txmq.tx.postgres.inbox_compaction import CompactionReport
from txmq.tx.postgres.session import Connection, connect

ON = str(LOG)
HERE = Position("billing", ON, 7, 3)


@pytest.fixture
def connection(database: str) -> Iterator[Connection]:
    with closing(producer(database)) as connection:
        yield connection


@pytest.fixture
def folder(database: str) -> Iterator[Connection]:
    with closing(connect(database, application_name="folder")) as connection:
        yield connection


def claimed(
    connection: Connection, *offsets: int, position: Position = HERE, first: str = ""
) -> set[int]:
    """Return the messages that this transaction has to apply."""
    with connection.cursor() as cursor:
        claims = claim(cursor.connection, {position: offsets}, first=first)
    assert {place for place, _offset in claims} <= {position}
    return {offset for _place, offset in claims}


def commit(connection: Connection, *offsets: int, position: Position = HERE) -> None:
    assert claimed(connection, *offsets, position=position) == set(offsets)
    connection.commit()


def recent(dsn: str) -> list[tuple[object, ...]]:
    return rows(dsn, 'SELECT "offset" FROM txmq_inbox_recent ORDER BY 1')


def test_a_message_is_applied_once_whether_folded_or_not(
    connection: Connection, folder: Connection
) -> None:
    commit(connection, 5)
    assert not claimed(connection, 5)
    connection.commit()
    assert compact(folder, "billing", ON) == CompactionReport(1, [])
    assert not claimed(connection, 5)


def test_a_busy_inbox_does_not_grow_until_autovacuum_runs(
    database: str, connection: Connection, folder: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox_compaction, "VACUUM_AFTER", 1_000)
    sizes = []
    for first in range(0, 20_000, 1_000):
        commit(connection, *range(first, first + 1_000))
        assert compact(folder, "billing", ON) == CompactionReport(1_000, [])
        sizes += rows(database, "SELECT pg_relation_size('txmq_inbox_recent')")
    assert sizes[-1] <= sizes[3]


def test_a_rollback_takes_the_claim_back(connection: Connection) -> None:
    assert claimed(connection, 5)
    connection.rollback()
    assert claimed(connection, 5)


def test_groups_topics_partitions_and_epochs_do_not_mix(
    connection: Connection, folder: Connection
) -> None:
    commit(connection, 5)
    compact(folder, "billing", ON)
    changes: tuple[dict[str, Any], ...] = (
        {"group": "mail"},
        {"log_id": str(new_token())},
        {"topic_id": 8},
        {"partition": 4},
        {"epoch": 1},
    )
    for change in changes:
        commit(connection, 5, position=HERE._replace(**change))
    assert compact(folder, "billing", ON).moved == 3


def test_a_claim_of_several_returns_only_new_messages(
    connection: Connection, folder: Connection
) -> None:
    commit(connection, 1, 2)
    compact(folder, "billing", ON)
    commit(connection, 4)
    assert claimed(connection, 5, 4, 3, 2, 1) == {3, 5}
    assert claimed(connection) == set()


def test_gaps_stay_gaps_until_they_are_filled(
    database: str, connection: Connection, folder: Connection
) -> None:
    commit(connection, 0, 1, 2, 5, 6)
    compact(folder, "billing", ON)
    commit(connection, 8)
    found = applied(connection, HERE)
    assert found == AppliedRanges(((0, 3), (5, 7), (8, 9)))
    assert [found.floor(start) for start in (0, 3, 5, 7, 8, 100)] == [3, 3, 7, 7, 9, 100]
    assert [offset for offset in range(10) if found.covers(offset)] == [0, 1, 2, 5, 6, 8]
    commit(connection, 3, 4, 7)
    compact(folder, "billing", ON)
    assert applied(connection, HERE) == AppliedRanges(((0, 9),))
    assert recent(database) == []
    assert len(rows(database, "SELECT FROM txmq_inbox")) == 1


def test_an_empty_inbox_has_its_floor_at_the_start(connection: Connection) -> None:
    assert applied(connection, HERE).floor(17) == 17


def test_begin_and_claim_share_a_round_trip(database: str, folder: Connection) -> None:
    assert claimed(folder, 5, first=BEGIN)
    assert recent(database) == []
    guarded_commit(folder, new_token())
    assert recent(database) == [(5,)]


@pytest.mark.parametrize("first_commits", [True, False])
def test_a_concurrent_duplicate_waits_for_the_first_to_end(
    postgres: PostgresServer,
    database: str,
    connection: Connection,
    first_commits: bool,  # noqa: FBT001
) -> None:
    found: list[set[int]] = []
    with closing(producer(database)) as second:
        assert claimed(connection, 5)
        waiting = threading.Thread(target=lambda: found.append(claimed(second, 5)))
        waiting.start()
        wait_for_backend(postgres, backend_pid(second), "wait_event_type = 'Lock'")
        if first_commits:
            connection.commit()
        else:
            connection.rollback()
        waiting.join()
        assert found == [set() if first_commits else {5}]


def test_repeatable_read_gets_a_retriable_conflict(database: str, connection: Connection) -> None:
    with closing(producer(database)) as second:
        second.set_session(isolation_level="REPEATABLE READ")
        rows_before(second)
        commit(connection, 5)
        with pytest.raises(DatabaseConflict) as raised:
            claimed(second, 5)
        assert raised.value.retriable
        second.rollback()
        assert not claimed(second, 5)


def rows_before(connection: Connection) -> None:
    """Take the snapshot that a REPEATABLE READ transaction keeps."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM txmq_inbox_recent")


def test_a_fold_keeps_rows_that_an_old_snapshot_cannot_see(
    database: str, connection: Connection, folder: Connection
) -> None:
    commit(connection, 1)
    with closing(producer(database)) as second:
        second.set_session(isolation_level="REPEATABLE READ")
        rows_before(second)
        commit(connection, 5)
        assert compact(folder, "billing", ON).moved == 1  # 5 is too new for `second` to know of
        assert not claimed(second, 1)
        with pytest.raises(DatabaseConflict):
            claimed(second, 5)
        second.rollback()
    assert compact(folder, "billing", ON).moved == 1


def test_a_role_without_rights_sees_the_snapshots_of_others(
    database: str, connection: Connection
) -> None:
    commit(connection, 5)
    with closing(producer(database)) as old, poor_role(database) as (role, dsn):
        old.set_session(isolation_level="REPEATABLE READ")
        rows_before(old)
        commit(connection, 6)
        rows(
            database,
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON txmq_inbox, txmq_inbox_recent TO {role}",
        )
        with closing(connect(dsn, application_name="poor")) as poor:
            assert compact(poor, "billing", ON).moved == 1
        old.rollback()


def test_a_fold_waits_for_the_handlers_of_a_position_and_gives_up(
    database: str, connection: Connection, folder: Connection
) -> None:
    elsewhere = HERE._replace(partition=4)
    commit(connection, 5)
    commit(connection, 6, position=elsewhere)
    assert claimed(connection, 7)
    assert compact(folder, "billing", ON, lock_timeout_ms=20) == CompactionReport(1, [HERE])
    connection.commit()
    assert compact(folder, "billing", ON).moved == 2


def test_a_claim_waits_for_a_fold(
    postgres: PostgresServer, database: str, connection: Connection, folder: Connection
) -> None:
    commit(connection, 5)
    found: list[set[int]] = []
    with folder.cursor() as cursor:
        cursor.execute("BEGIN")
        assert compact(folder, "billing", ON).moved == 1
        waiting = threading.Thread(target=lambda: found.append(claimed(connection, 5)))
        waiting.start()
        wait_for_backend(postgres, backend_pid(connection), "wait_event = 'advisory'")
        cursor.execute("COMMIT")
    waiting.join()
    assert found == [set()]


def test_missing_tables_are_reported_with_the_remedy(empty_database: str) -> None:
    with (
        closing(producer(empty_database)) as connection,
        pytest.raises(SchemaMissing, match="txmq schema install"),
    ):
        claimed(connection, 5)
