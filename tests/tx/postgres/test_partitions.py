"""Partitions of the token table: created ahead, filled from the default one, and
dropped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from uuid import UUID

import pytest

from tests.tx.postgres.support import LOG, OTHER_LOG, check_of, new_token, producer, rows
from txmq.errors import DatabaseConflict, DatabaseError
from txmq.model.message import Decision
from txmq.tx.postgres.blocking import insert_token
from txmq.tx.postgres.brokers import forget, registered, report
from txmq.tx.postgres.partitions import (
    AHEAD,
    DAY_MS,
    FRESH_MS,
    CallerTime,
    MaintenanceReport,
    bound,
    create,
    maintain,
    partitions,
)
from txmq.tx.postgres.resolver import TokenResolver
from txmq.tx.postgres.session import Connection, connect


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
    [(name,)] = rows(
        dsn, "SELECT tableoid::regclass::text FROM txmq_token WHERE tok = %s", str(token)
    )
    return name


def later(connection: Connection, days: int) -> MaintenanceReport:
    """Run maintenance as in some days, with the reports of today."""
    return maintain(connection, now_ms=now_ms() + days * DAY_MS, fresh_ms=(days + 1) * DAY_MS)


def verdict(dsn: str, token: UUID) -> Decision:
    resolver = TokenResolver(dsn)
    [answer] = resolver.resolve([check_of(dsn, token)])
    resolver.close()
    return answer.verdict


def test_the_days_from_yesterday_on_have_a_partition_each_without_gaps(
    connection: Connection,
) -> None:
    found = partitions(connection)
    assert len(found) == 3 + AHEAD
    assert [later.lower for later in found[1:]] == [earlier.upper for earlier in found[:-1]]
    assert found[0].lower is None
    assert found[0].upper < bound(now_ms() - DAY_MS + 60_000) <= found[1].upper
    assert maintain(connection).created == []


def test_a_token_older_than_the_table_is_refused_by_name(database: str) -> None:
    with pytest.raises(DatabaseError, match="clock"):
        commit_token(database, new_token(now_ms() - 3 * DAY_MS))
    assert verdict(database, new_token(now_ms() - 3 * DAY_MS)) is Decision.UNKNOWN


def test_a_token_of_the_future_waits_in_the_default_partition_and_moves(
    database: str, connection: Connection
) -> None:
    future = now_ms() + (AHEAD + 2) * DAY_MS
    here, fenced = new_token(future), new_token(future)
    commit_token(database, here)
    assert verdict(database, fenced) is Decision.ROLLBACK
    assert home(database, here) == home(database, fenced) == "txmq_token_default"
    done = later(connection, 2)
    assert home(database, here) == home(database, fenced)
    assert home(database, here) in done.created
    assert verdict(database, here) is Decision.COMMIT
    assert verdict(database, fenced) is Decision.ROLLBACK


def test_a_partition_is_dropped_when_all_its_logs_are_past_it(
    database: str, connection: Connection
) -> None:
    token = new_token()
    commit_token(database, token)
    old = home(database, token)
    report(connection, LOG, "one", None)
    report(connection, OTHER_LOG, "other", new_token(now_ms() + DAY_MS))
    done = later(connection, 2)
    assert old in done.dropped
    assert done.put_off == {}
    assert rows(database, "SELECT FROM txmq_token WHERE tok = %s", str(token)) == []


def test_no_token_of_a_dropped_partition_is_fenced(database: str, connection: Connection) -> None:
    token = new_token()
    commit_token(database, token)
    report(connection, LOG, "one", None)
    later(connection, 2)
    assert verdict(database, token) is Decision.UNKNOWN
    with pytest.raises(DatabaseError, match="clock"):
        commit_token(database, new_token())


@pytest.mark.parametrize("reason", ["undecided", "unknown", "young", "silent"])
def test_a_partition_that_a_broker_may_need_stays(
    database: str, connection: Connection, reason: str
) -> None:
    token = new_token()
    commit_token(database, token, OTHER_LOG if reason == "unknown" else LOG)
    old = home(database, token)
    report(connection, LOG, "one", token if reason == "undecided" else None)
    fresh_ms = FRESH_MS if reason == "silent" else 3 * DAY_MS
    done = maintain(
        connection, now_ms=now_ms() + (1 if reason == "young" else 2) * DAY_MS, fresh_ms=fresh_ms
    )
    assert old not in done.dropped
    if reason == "young":
        assert done.put_off == {}
        return
    reasons = {
        "undecided": f"broker one, log {LOG}, has the undecided transaction {token}",
        "unknown": f"no report of log {OTHER_LOG}",
        "silent": f"broker one, log {LOG}, has not reported since {datetime.now(UTC):%Y-%m-%d}",
    }
    [put_off] = done.put_off.values()  # the partitions after the first one stay as well
    assert put_off.startswith(reasons[reason])


def test_one_silent_broker_of_two_keeps_the_rows_of_both_until_it_is_forgotten(
    database: str, connection: Connection
) -> None:
    token = new_token()
    commit_token(database, token)
    commit_token(database, token, OTHER_LOG)
    report(connection, OTHER_LOG, "lost", None)
    rows(database, "UPDATE txmq_broker SET reported_at = now() - interval '4 hours'")
    report(connection, LOG, "one", None)
    soon = now_ms() + 60_000  # then no broker needs the partition of today
    [put_off] = maintain(connection, now_ms=soon, keep_ms=-2 * DAY_MS).put_off.values()
    assert "broker lost" in put_off
    assert "has not reported since" in put_off
    assert not forget(connection, UUID(int=5), "never heard of")
    assert forget(connection, OTHER_LOG, "its disk burnt")
    assert [(b.name, b.forgotten_reason) for b in registered(connection)] == [
        ("lost", "its disk burnt"),
        ("one", None),
    ]
    assert maintain(connection, now_ms=soon, keep_ms=-2 * DAY_MS).put_off == {}
    assert rows(database, "SELECT FROM txmq_token WHERE tok = %s", str(token)) == []


def test_a_forgotten_broker_that_reports_is_registered_again(connection: Connection) -> None:
    oldest = new_token()
    report(connection, LOG, "one", None)
    forget(connection, LOG, "thought to be lost")
    report(connection, LOG, "renamed", oldest)
    [found] = registered(connection)
    assert (found.name, found.oldest_undecided, found.waiting) == ("renamed", oldest, 0)
    assert (found.forgotten_at, found.forgotten_reason) == (None, None)


def test_maintenance_does_not_queue_behind_a_transaction(
    database: str, connection: Connection
) -> None:
    with closing(producer(database)) as busy:
        insert_token(busy, new_token(now_ms() + (AHEAD + 2) * DAY_MS), [LOG])
        with pytest.raises(DatabaseConflict):
            create(connection, now_ms() + (AHEAD + 2) * DAY_MS, now_ms() + (AHEAD + 3) * DAY_MS)
        report(connection, LOG, "one", None)
        done = later(connection, 2)
        assert done.created == done.dropped == []
        assert len(done.put_off) == 3  # two days to come, and the one to drop


def test_a_span_that_overlaps_is_not_created(connection: Connection) -> None:
    assert create(connection, now_ms(), now_ms() + 1000) is None


def test_a_server_that_is_days_ahead_at_one_upkeep_drops_and_closes_nothing(
    database: str, connection: Connection
) -> None:
    token = new_token()
    commit_token(database, token)
    before = partitions(connection)
    ahead = now_ms() + 30 * DAY_MS
    report(connection, LOG, "one", None)
    done = maintain(
        connection, now_ms=ahead, fresh_ms=31 * DAY_MS, caller=CallerTime(now_ms(), now_ms())
    )
    assert done == MaintenanceReport([], [], {})
    assert partitions(connection) == before
    commit_token(database, new_token())
    assert verdict(database, token) is Decision.COMMIT


def test_nothing_is_dropped_while_the_clocks_of_server_and_broker_are_apart(
    database: str, connection: Connection
) -> None:
    token = new_token()
    commit_token(database, token)
    report(connection, LOG, "one", None)
    by_broker = now_ms() + 5 * DAY_MS
    done = maintain(
        connection,
        now_ms=by_broker + 5 * DAY_MS,
        fresh_ms=11 * DAY_MS,
        caller=CallerTime(by_broker, by_broker),
    )
    assert done.dropped == []
    [why] = done.put_off.values()
    assert why == "the clocks of server and broker are 5 days, 0:00:00 apart"


@pytest.mark.parametrize("certain", [False, True])
def test_a_partition_stays_until_it_is_old_without_doubt(
    database: str, connection: Connection, *, certain: bool
) -> None:
    token = new_token()
    commit_token(database, token)
    old = home(database, token)
    report(connection, LOG, "one", None)
    later = now_ms() + 2 * DAY_MS
    caller = CallerTime(later, later if certain else now_ms())
    done = maintain(connection, now_ms=later, fresh_ms=3 * DAY_MS, caller=caller)
    assert (old in done.dropped) == certain


def test_what_a_wrong_clock_has_closed_is_opened_from_now_on(
    database: str, connection: Connection
) -> None:
    early = new_token()
    report(connection, LOG, "one", None)
    maintain(connection, now_ms=now_ms() + 30 * DAY_MS, fresh_ms=31 * DAY_MS)
    with pytest.raises(DatabaseError, match="clock"):
        commit_token(database, new_token())
    here = now_ms()
    maintain(connection, caller=CallerTime(here, here))
    token = new_token()
    commit_token(database, token)
    assert verdict(database, token) is Decision.COMMIT
    assert verdict(database, new_token()) is Decision.ROLLBACK
    assert verdict(database, early) is Decision.UNKNOWN, "its row may have been dropped"
    with pytest.raises(DatabaseError, match="clock"):
        commit_token(database, early)
    days = [one for one in partitions(connection) if one.upper <= bound(here + 4 * DAY_MS)]
    assert [later.lower for later in days[1:]] == [earlier.upper for earlier in days[:-1]]
    assert maintain(connection, caller=CallerTime(here, here)).put_off == {}


def test_a_report_of_a_time_to_come_keeps_rows(database: str, connection: Connection) -> None:
    token = new_token()
    commit_token(database, token)
    report(connection, LOG, "one", None)
    rows(database, "UPDATE txmq_broker SET reported_at = now() + interval '30 days'")
    [put_off] = later(connection, 2).put_off.values()
    assert "at a time to come" in put_off
