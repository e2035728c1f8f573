"""The token table's partitions: made ahead, filled from the default one, dropped when nobody needs them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from uuid import UUID

import pytest

from tests.postgres.support import LOG, OTHER_LOG, check_of, new_token, producer, rows
from txmq.errors import DatabaseConflict, DatabaseError
from txmq.message import Decision
from txmq.tx.postgres.partitions import AHEAD, DAY_MS, bound, create, maintain, partitions
from txmq.tx.postgres.resolver import TokenResolver
from txmq.tx.postgres.session import Connection, connect
from txmq.tx.postgres.tokens import insert_token


@pytest.fixture
def connection(database: str) -> Iterator[Connection]:
    with closing(connect(database, application_name="test")) as connection:
        yield connection


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def commit_token(dsn: str, token: UUID, log_id: UUID = LOG) -> None:
    with closing(producer(dsn)) as connection:
        insert_token(connection, token, [log_id])
        connection.commit()


def home(dsn: str, token: UUID) -> object:
    [(name,)] = rows(dsn, "SELECT tableoid::regclass::text FROM txmq_token WHERE tok = %s", str(token))
    return name


def verdict(dsn: str, token: UUID) -> Decision:
    resolver = TokenResolver(dsn)
    [answer] = resolver.resolve([check_of(dsn, token)])
    resolver.close()
    return answer.verdict


def test_the_days_from_yesterday_on_have_a_partition_each_without_gaps(connection: Connection) -> None:
    found = partitions(connection)
    assert len(found) == 3 + AHEAD
    assert [later.lower for later in found[1:]] == [earlier.upper for earlier in found[:-1]]
    assert found[0].lower is None
    assert found[0].upper < bound(now_ms() - DAY_MS + 60_000) <= found[1].upper
    assert maintain(connection, {}).created == []


def test_a_token_older_than_the_table_is_refused_by_name(database: str) -> None:
    with pytest.raises(DatabaseError, match="clock"):
        commit_token(database, new_token(now_ms() - 3 * DAY_MS))
    assert verdict(database, new_token(now_ms() - 3 * DAY_MS)) is Decision.UNKNOWN


def test_a_token_of_the_future_waits_in_the_default_partition_and_moves(database: str, connection: Connection) -> None:
    later = now_ms() + (AHEAD + 2) * DAY_MS
    here, fenced = new_token(later), new_token(later)
    commit_token(database, here)
    assert verdict(database, fenced) is Decision.ROLLBACK
    assert home(database, here) == home(database, fenced) == "txmq_token_default"
    report = maintain(connection, {}, now_ms=now_ms() + 2 * DAY_MS)
    assert home(database, here) == home(database, fenced)
    assert home(database, here) in report.created
    assert verdict(database, here) is Decision.COMMIT
    assert verdict(database, fenced) is Decision.ROLLBACK


def test_a_partition_is_dropped_when_all_its_logs_are_past_it(database: str, connection: Connection) -> None:
    token = new_token()
    commit_token(database, token)
    old = home(database, token)
    report = maintain(connection, {LOG: None, OTHER_LOG: new_token(now_ms() + DAY_MS)}, now_ms=now_ms() + 2 * DAY_MS)
    assert old in report.dropped
    assert report.put_off == {}
    assert rows(database, "SELECT FROM txmq_token WHERE tok = %s", str(token)) == []


def test_what_is_dropped_is_closed_so_that_nobody_fences_it(database: str, connection: Connection) -> None:
    token = new_token()
    commit_token(database, token)
    maintain(connection, {LOG: None}, now_ms=now_ms() + 2 * DAY_MS)
    assert verdict(database, token) is Decision.UNKNOWN
    with pytest.raises(DatabaseError, match="clock"):
        commit_token(database, new_token())


@pytest.mark.parametrize("reason", ["undecided", "silent", "young"])
def test_a_partition_that_may_be_asked_for_stays(database: str, connection: Connection, reason: str) -> None:
    token = new_token()
    commit_token(database, token, OTHER_LOG if reason == "silent" else LOG)
    old = home(database, token)
    later = now_ms() + (DAY_MS if reason == "young" else 2 * DAY_MS)
    report = maintain(connection, {LOG: token if reason == "undecided" else None}, now_ms=later)
    assert old not in report.dropped
    assert (
        report.put_off
        == {
            "undecided": {old: f"log {LOG} has the undecided transaction {token}"},
            "silent": {old: f"no report of log {OTHER_LOG}"},
            "young": {},
        }[reason]
    )


def test_maintenance_does_not_queue_behind_a_transaction(database: str, connection: Connection) -> None:
    with closing(producer(database)) as busy:
        insert_token(busy, new_token(now_ms() + (AHEAD + 2) * DAY_MS), [LOG])
        with pytest.raises(DatabaseConflict):
            create(connection, now_ms() + (AHEAD + 2) * DAY_MS, now_ms() + (AHEAD + 3) * DAY_MS)
        report = maintain(connection, {LOG: None}, now_ms=now_ms() + 2 * DAY_MS)
        assert report.created == report.dropped == []
        assert len(report.put_off) == 3  # two days to come, and the one to drop


def test_a_span_that_overlaps_is_not_made_twice(connection: Connection) -> None:
    assert create(connection, now_ms(), now_ms() + 1000) is None
