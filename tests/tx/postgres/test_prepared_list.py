"""The list of prepared transactions, with their ages, locks and waiting sessions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.fixtures_postgres import Databases
from tests.tx.postgres.prepared_branches import (
    gid_of,
    leave_prepared,
    login_role,
    prepared_gids,
    roll_back_all_prepared,
)
from tests.tx.postgres.support import LOG, backend_pid, blocked_thread, new_token, producer, rows
from txmq.testing.postgres_server import OwnServer, PostgresServer
from txmq.tx.postgres.prepared_list import (
    Lock,
    PreparedTransaction,
    list_prepared,
    read_held_locks,
    whole_xid,
)
from txmq.tx.postgres.session import Connection, connect
from txmq.tx.xid import XaBranch

FOREIGN = "131075_Z3RyaWQ=_YnF1YWw="


@pytest.fixture
def stock(database: str) -> Iterator[str]:
    """A database with a table of two rows."""
    rows(
        database,
        "CREATE TABLE stock (item int PRIMARY KEY, n int); INSERT INTO stock VALUES (1, 5), (2, 5)",
    )
    yield database
    roll_back_all_prepared(database)


@pytest.fixture
def looking(stock: str) -> Iterator[Connection]:
    with closing(connect(stock, application_name="doctor")) as connection:
        yield connection


def found(connection: Connection) -> list[PreparedTransaction]:
    return [one for one in list_prepared(connection) if one.here]


def test_a_quiet_database_has_no_prepared_branches(looking: Connection) -> None:
    assert found(looking) == []
    assert read_held_locks(looking, []) == {}


def test_a_branch_of_txmq_is_distinguished_from_a_foreign_one(
    stock: str, looking: Connection
) -> None:
    token = new_token()
    ours = gid_of(LOG, token, 2)
    xids = [
        leave_prepared(stock, gid, "UPDATE stock SET n = n - 1 WHERE item = 1") for gid in (ours,)
    ]
    xids.append(leave_prepared(stock, FOREIGN, "INSERT INTO stock VALUES (3, 0)"))
    first, second = found(looking)
    assert [first.gid, second.gid] == [ours, FOREIGN]
    assert first.branch == XaBranch("orders", LOG.hex[:12], token, 2)
    assert second.branch is None
    assert [first.xid, second.xid] == xids
    assert first.owner == looking.info.user
    assert 0 <= second.age_s <= first.age_s < 3_600
    assert first.horizon >= second.horizon >= 1


def test_the_age_in_transactions_grows_with_each_transaction(
    stock: str, looking: Connection
) -> None:
    leave_prepared(stock, gid_of(LOG, new_token()), "DELETE FROM stock WHERE item = 2")
    before = found(looking)[0].horizon
    for _ in range(5):
        rows(stock, "SELECT pg_current_xact_id()")
    assert found(looking)[0].horizon >= before + 5


def test_locks_are_reported_by_relation_and_mode(stock: str, looking: Connection) -> None:
    leave_prepared(
        stock,
        gid_of(LOG, new_token()),
        "LOCK TABLE stock IN SHARE MODE",
        "SELECT pg_advisory_xact_lock(7)",
    )
    [one] = found(looking)
    hold = read_held_locks(looking, [one])[one.gid]
    assert set(hold.locks) == {Lock("stock", "ShareLock"), Lock("advisory", "ExclusiveLock")}
    assert hold.blocked == ()


def test_a_transaction_with_savepoints_has_its_locks_reported(
    stock: str, looking: Connection
) -> None:
    leave_prepared(
        stock,
        gid_of(LOG, new_token()),
        "SAVEPOINT a",
        "UPDATE stock SET n = 0 WHERE item = 1",
        "RELEASE a",
    )
    [one] = found(looking)
    assert Lock("stock", "RowExclusiveLock") in read_held_locks(looking, [one])[one.gid].locks


def test_waiting_sessions_are_reported_with_the_row_and_the_sessions_behind_them(
    postgres: PostgresServer, stock: str, looking: Connection
) -> None:
    gid = gid_of(LOG, new_token())
    leave_prepared(stock, gid, "UPDATE stock SET n = 0 WHERE item = 1")
    leave_prepared(stock, FOREIGN, "UPDATE stock SET n = 0 WHERE item = 2")
    with (
        closing(producer(stock)) as first,
        closing(producer(stock)) as second,
        closing(producer(stock)) as third,
    ):
        statements = (
            "UPDATE stock SET n = 1 WHERE item = 1",
            "LOCK TABLE stock",
            "SELECT * FROM stock",
        )
        connections = (first, second, third)
        pids = [backend_pid(connection) for connection in connections]
        threads = [
            blocked_thread(postgres, *pair) for pair in zip(connections, statements, strict=True)
        ]
        all_holds = read_held_locks(looking, found(looking))
        for pid, thread in reversed([*zip(pids, threads, strict=True)]):
            rows(stock, "SELECT pg_terminate_backend(%s, 5000)", pid)
            thread.join()
    by_pid = {one.pid: one for one in all_holds[gid].blocked}
    assert list(by_pid) == pids
    row, table, reader = by_pid.values()
    assert (row.on, row.behind) == ("stock (0,1)", ())
    assert (table.on, table.mode, table.behind) == ("stock", "AccessExclusiveLock", ())
    assert (reader.on, reader.mode) == ("stock", "AccessShareLock")
    assert pids[1] in reader.behind
    assert all_holds[gid].rows == ("stock (0,1)",)
    assert all(0 <= one.waits_s < 3_600 for one in by_pid.values())
    assert pids[0] not in [one.pid for one in all_holds[FOREIGN].blocked]
    assert all_holds[FOREIGN].rows == ()


def test_a_session_that_waits_for_another_session_is_not_blocked_by_a_branch(
    postgres: PostgresServer, stock: str, looking: Connection
) -> None:
    gid = gid_of(LOG, new_token())
    leave_prepared(stock, gid, "UPDATE stock SET n = 0 WHERE item = 1")
    with (
        closing(producer(stock)) as holder,
        closing(producer(stock)) as waiter,
        holder.cursor() as cursor,
    ):
        cursor.execute("UPDATE stock SET n = 1 WHERE item = 2")
        thread = blocked_thread(postgres, waiter, "UPDATE stock SET n = 2 WHERE item = 2")
        assert read_held_locks(looking, found(looking))[gid].blocked == ()
        rows(stock, "SELECT pg_terminate_backend(%s, 5000)", backend_pid(waiter))
        thread.join()


def test_a_branch_of_another_database_is_reported_as_not_here(
    postgres: PostgresServer, databases: Databases, looking: Connection
) -> None:
    name = databases.borrow()
    other = postgres.dsn(name)
    gid = gid_of(LOG, new_token())
    try:
        leave_prepared(other, gid, "CREATE TABLE t ()")
        assert prepared_gids(other) == [gid]
        [one] = [one for one in list_prepared(looking) if one.gid == gid]
        assert (one.here, one.database) == (False, name)
    finally:
        roll_back_all_prepared(other)
        databases.give_back(name)


def test_the_owner_is_the_role_that_prepared_the_branch(stock: str, looking: Connection) -> None:
    with login_role(stock, "clerk") as (role, dsn):
        leave_prepared(dsn, gid_of(LOG, new_token()), "CREATE TABLE clerks ()")
        assert [one.owner for one in found(looking)] == [role]


def test_a_branch_is_reported_after_a_crash_as_before(
    crashable_postgres: OwnServer, crashable_database: str
) -> None:
    gid = gid_of(LOG, new_token())
    rows(crashable_database, "CREATE TABLE stock (n int)")
    xid = leave_prepared(
        crashable_database, gid, "LOCK TABLE stock", "INSERT INTO stock VALUES (1)"
    )
    crashable_postgres.restart("immediate")
    with closing(connect(crashable_database, application_name="doctor")) as looking:
        [one] = found(looking)
        assert (one.gid, one.xid) == (gid, xid)
        assert Lock("stock", "AccessExclusiveLock") in read_held_locks(looking, [one])[gid].locks
    roll_back_all_prepared(crashable_database)


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
