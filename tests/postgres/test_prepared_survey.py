"""What stands prepared in a database: told with its age, its locks, and those who wait
for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.fixtures_postgres import Databases
from tests.postgres.orphans import gid_of, gids, leave, login_role, sweep
from tests.postgres.support import LOG, backend, new_token, producer, rows, waiting
from txmq.testing.postgres import OwnServer, PostgresServer
from txmq.tx.postgres.prepared_list import Lock, Prepared, holds, standing, whole_xid
from txmq.tx.postgres.session import Connection, connect
from txmq.tx.xid import Branch

FOREIGN = "131075_Z3RyaWQ=_YnF1YWw="


@pytest.fixture
def shop(database: str) -> Iterator[str]:
    """A database with a table of two rows."""
    rows(
        database,
        "CREATE TABLE stock (item int PRIMARY KEY, n int); INSERT INTO stock VALUES (1, 5), (2, 5)",
    )
    yield database
    sweep(database)


@pytest.fixture
def looking(shop: str) -> Iterator[Connection]:
    with closing(connect(shop, application_name="doctor")) as connection:
        yield connection


def found(connection: Connection) -> list[Prepared]:
    return [one for one in standing(connection) if one.here]


def test_nothing_stands_in_a_quiet_database(looking: Connection) -> None:
    assert found(looking) == []
    assert holds(looking, []) == {}


def test_a_branch_of_ours_is_told_from_a_foreign_one(shop: str, looking: Connection) -> None:
    token = new_token()
    ours = gid_of(LOG, token, 2)
    xids = [leave(shop, gid, "UPDATE stock SET n = n - 1 WHERE item = 1") for gid in (ours,)]
    xids.append(leave(shop, FOREIGN, "INSERT INTO stock VALUES (3, 0)"))
    first, second = found(looking)
    assert [first.gid, second.gid] == [ours, FOREIGN]
    assert first.branch == Branch("orders", LOG.hex[:12], token, 2)
    assert second.branch is None
    assert [first.xid, second.xid] == xids
    assert first.owner == looking.info.user
    assert 0 <= second.age_s <= first.age_s < 60
    assert first.horizon >= second.horizon >= 1


def test_the_horizon_moves_away_with_each_transaction(shop: str, looking: Connection) -> None:
    leave(shop, gid_of(LOG, new_token()), "DELETE FROM stock WHERE item = 2")
    before = found(looking)[0].horizon
    for _ in range(5):
        rows(shop, "SELECT pg_current_xact_id()")
    assert found(looking)[0].horizon >= before + 5


def test_locks_are_told_by_relation_and_mode(shop: str, looking: Connection) -> None:
    leave(
        shop,
        gid_of(LOG, new_token()),
        "LOCK TABLE stock IN SHARE MODE",
        "SELECT pg_advisory_xact_lock(7)",
    )
    [one] = found(looking)
    hold = holds(looking, [one])[one.gid]
    assert set(hold.locks) == {Lock("stock", "ShareLock"), Lock("advisory", "ExclusiveLock")}
    assert hold.blocked == ()


def test_a_transaction_with_savepoints_tells_its_locks_too(shop: str, looking: Connection) -> None:
    leave(
        shop,
        gid_of(LOG, new_token()),
        "SAVEPOINT a",
        "UPDATE stock SET n = 0 WHERE item = 1",
        "RELEASE a",
    )
    [one] = found(looking)
    assert Lock("stock", "RowExclusiveLock") in holds(looking, [one])[one.gid].locks


def test_those_who_wait_are_told_with_the_row_and_those_behind_them(
    postgres: PostgresServer, shop: str, looking: Connection
) -> None:
    gid = gid_of(LOG, new_token())
    leave(shop, gid, "UPDATE stock SET n = 0 WHERE item = 1")
    leave(shop, FOREIGN, "UPDATE stock SET n = 0 WHERE item = 2")
    with (
        closing(producer(shop)) as first,
        closing(producer(shop)) as second,
        closing(producer(shop)) as third,
    ):
        statements = (
            "UPDATE stock SET n = 1 WHERE item = 1",
            "LOCK TABLE stock",
            "SELECT * FROM stock",
        )
        connections = (first, second, third)
        pids = [backend(connection) for connection in connections]
        threads = [waiting(postgres, *pair) for pair in zip(connections, statements, strict=True)]
        told = holds(looking, found(looking))
        for pid, thread in reversed([*zip(pids, threads, strict=True)]):
            rows(shop, "SELECT pg_terminate_backend(%s, 5000)", pid)
            thread.join()
    by_pid = {one.pid: one for one in told[gid].blocked}
    assert list(by_pid) == pids
    row, table, reader = by_pid.values()
    assert (row.on, row.behind) == ("stock (0,1)", ())
    assert (table.on, table.mode, table.behind) == ("stock", "AccessExclusiveLock", ())
    assert (reader.on, reader.mode) == ("stock", "AccessShareLock")
    assert pids[1] in reader.behind
    assert told[gid].rows == ("stock (0,1)",)
    assert all(0 <= one.waits_s < 60 for one in by_pid.values())
    assert pids[0] not in [one.pid for one in told[FOREIGN].blocked]
    assert told[FOREIGN].rows == ()


def test_who_waits_for_another_session_is_not_blamed_on_a_branch(
    postgres: PostgresServer, shop: str, looking: Connection
) -> None:
    gid = gid_of(LOG, new_token())
    leave(shop, gid, "UPDATE stock SET n = 0 WHERE item = 1")
    with (
        closing(producer(shop)) as holder,
        closing(producer(shop)) as waiter,
        holder.cursor() as cursor,
    ):
        cursor.execute("UPDATE stock SET n = 1 WHERE item = 2")
        thread = waiting(postgres, waiter, "UPDATE stock SET n = 2 WHERE item = 2")
        assert holds(looking, found(looking))[gid].blocked == ()
        rows(shop, "SELECT pg_terminate_backend(%s, 5000)", backend(waiter))
        thread.join()


def test_a_branch_of_another_database_is_told_as_not_here(
    postgres: PostgresServer, databases: Databases, looking: Connection
) -> None:
    name = databases.take()
    other = postgres.dsn(name)
    gid = gid_of(LOG, new_token())
    try:
        leave(other, gid, "CREATE TABLE t ()")
        assert gids(other) == [gid]
        [one] = [one for one in standing(looking) if one.gid == gid]
        assert (one.here, one.database) == (False, name)
    finally:
        sweep(other)
        databases.give_back(name)


def test_the_owner_is_who_prepared_it(shop: str, looking: Connection) -> None:
    with login_role(shop, "clerk") as (role, dsn):
        leave(dsn, gid_of(LOG, new_token()), "CREATE TABLE clerks ()")
        assert [one.owner for one in found(looking)] == [role]


def test_what_survives_a_crash_is_told_like_before(
    crashable_postgres: OwnServer, crashable_database: str
) -> None:
    gid = gid_of(LOG, new_token())
    rows(crashable_database, "CREATE TABLE stock (n int)")
    xid = leave(crashable_database, gid, "LOCK TABLE stock", "INSERT INTO stock VALUES (1)")
    crashable_postgres.restart("immediate")
    with closing(connect(crashable_database, application_name="doctor")) as looking:
        [one] = found(looking)
        assert (one.gid, one.xid) == (gid, xid)
        assert Lock("stock", "AccessExclusiveLock") in holds(looking, [one])[gid].locks
    sweep(crashable_database)


@pytest.mark.parametrize(
    ("xid", "near", "whole"),
    [
        (700, 700, 700),  # nothing has ended since it began
        (705, 700, 705),  # it began after all that has ended
        (3, (1 << 32) + 10, (1 << 32) + 3),
        ((1 << 32) - 5, (1 << 32) + 10, (1 << 32) - 5),
        (2, (1 << 33) - 4, (1 << 33) + 2),
    ],
)
def test_a_transaction_id_is_the_one_closest_to_the_present(
    xid: int, near: int, whole: int
) -> None:
    assert whole_xid(xid, near) == whole
