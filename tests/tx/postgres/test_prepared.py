"""PREPARE TRANSACTION reports only proven success; branches end with a proven
outcome.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress

import psycopg2
import pytest

from tests.tx.postgres.business_table import assert_ready, business_rows, run
from tests.tx.postgres.prepared_branches import (
    begin_branch,
    prepared_gids,
    roll_back_all_prepared,
)
from tests.tx.postgres.support import (
    LOG,
    backend_pid,
    identity_of,
    new_token,
    poor_role,
    producer,
    rows,
    xid_of,
)
from txmq.errors import (
    DatabaseError,
    DatabaseUnavailable,
    InDoubt,
    TransactionAborted,
    TransactionEnded,
    TwoPhaseFull,
    TwoPhaseOff,
)
from txmq.faces import run as driver_run
from txmq.testing.postgres_server import PostgresServer, temporary_server
from txmq.tx.postgres.blocking import (
    commit_prepared,
    look,
    prepare,
    read_server,
    roll_back_prepared,
)
from txmq.tx.postgres.branch_finish import in_role
from txmq.tx.postgres.caller_block import SAVEPOINT, CallerBlock
from txmq.tx.postgres.drivers import driver_of
from txmq.tx.postgres.prepared import Ending, require_two_phase
from txmq.tx.postgres.prepared_list import list_prepared
from txmq.tx.postgres.session import Connection, connect
from txmq.tx.postgres.statement_watch import Sends
from txmq.tx.xid import XaBranch, branches


@pytest.fixture(params=["tpc_begin", "begun before", "BEGIN by hand"])
def connection(
    database: str, request: pytest.FixtureRequest, branch: XaBranch
) -> Iterator[Connection]:
    """An open branch with a row, for each way to begin one."""
    rows(database, "CREATE TABLE business (n int PRIMARY KEY)")
    with closing(producer(database)) as connection:
        connection.autocommit = request.param == "BEGIN by hand"
        if request.param == "begun before":
            run(connection, "SELECT 1")
        begin_branch(connection, branch)
        run(connection, "INSERT INTO business VALUES (1)")
        yield connection
        connection.close()
    roll_back_all_prepared(database)


@pytest.fixture
def branch() -> XaBranch:
    return new_branch()


def new_branch() -> XaBranch:
    return branches("tests", LOG, new_token(), 1)[0]


def test_a_prepared_branch_is_committed_or_rolled_back(
    connection: Connection, database: str, branch: XaBranch
) -> None:
    prepare(connection, branch)
    assert (prepared_gids(database), business_rows(database)) == ([branch.gid], [])
    assert_ready(connection, database)
    assert commit_prepared(connection, branch.gid, None) is Ending.DONE
    assert (prepared_gids(database), business_rows(database)) == ([], [(1,)])
    assert_ready(connection, database)
    second = new_branch()
    begin_branch(connection, second)
    run(connection, "INSERT INTO business VALUES (2)")
    prepare(connection, second)
    assert roll_back_prepared(connection, second.gid, None) is Ending.DONE
    assert (prepared_gids(database), business_rows(database)) == ([], [(1,)])
    assert_ready(connection, database)


def test_another_connection_of_the_role_ends_a_branch(
    connection: Connection, database: str, branch: XaBranch
) -> None:
    prepare(connection, branch)
    connection.close()
    with closing(connect(database, application_name="test")) as other:
        assert commit_prepared(other, branch.gid, None) is Ending.DONE
    assert business_rows(database) == [(1,)]


def test_the_servers_log_is_not_filled_with_warnings(
    connection: Connection, branch: XaBranch
) -> None:
    prepare(connection, branch)
    commit_prepared(connection, branch.gid, None)
    assert connection.notices == []


def opened(connection: Connection) -> CallerBlock:
    block = CallerBlock(driver_of(connection), new_token(), Sends(lambda: None, lambda _: None))
    driver_run(block.begin())
    return block


def test_a_branch_with_writes_has_an_xid_and_a_position_behind_them(database: str) -> None:
    rows(database, "CREATE TABLE business (n int)")
    with closing(producer(database)) as connection:
        block = opened(connection)
        run(connection, "SELECT * FROM business")
        read = look(block.driver, block)
        assert (read.xid, read.owner) == (None, connection.info.user)
        assert read.server == identity_of(database)
        run(connection, "INSERT INTO business VALUES (1)")
        work = look(block.driver, block)
        assert work.position > read.position
        driver_run(block.roll_back())
    assert work.xid is not None
    assert rows(database, "SELECT pg_xact_status(%s::text::xid8)", str(work.xid)) == [("aborted",)]


@pytest.mark.parametrize("read_only", [False, True])
def test_a_serializable_branch_that_reads_is_prepared_too(
    database: str, branch: XaBranch, *, read_only: bool
) -> None:
    with closing(producer(database)) as connection:
        connection.set_session(isolation_level="SERIALIZABLE", readonly=read_only)
        block = opened(connection)
        run(connection, "SELECT FROM pg_class")
        block.end()
        assert look(block.driver, block).xid is not None
        prepare(block.driver, branch)
        driver_run(block.close())
        assert commit_prepared(connection, branch.gid, None) is Ending.DONE


def test_the_savepoint_of_a_joined_transaction_is_released_by_the_look(database: str) -> None:
    with closing(producer(database)) as connection:
        run(connection, "SELECT 1")
        block = opened(connection)
        look(block.driver, block)
        look(block.driver, block)
        with pytest.raises(psycopg2.errors.InvalidSavepointSpecification):
            run(connection, f"RELEASE SAVEPOINT {SAVEPOINT}")


@pytest.mark.parametrize("begun", [True, False])
def test_another_transaction_than_the_blocks_is_seen(database: str, *, begun: bool) -> None:
    with closing(producer(database)) as connection, connection.cursor() as early:
        if not begun:
            early.execute("SELECT 1")
        block = opened(connection)
        early.execute("COMMIT")
        with pytest.raises(TransactionEnded):
            look(block.driver, block)
        early.execute("BEGIN; SELECT 1")
        with pytest.raises(TransactionEnded):
            look(block.driver, block)
        assert not driver_run(block.roll_back())


def test_settings_of_the_session_survive_prepare(connection: Connection, branch: XaBranch) -> None:
    run(connection, "SET lock_timeout = '7s'")
    prepare(connection, branch)
    commit_prepared(connection, branch.gid, None)
    with connection.cursor() as cursor:
        cursor.execute("SHOW lock_timeout")
        assert cursor.fetchone() == ("7s",)


def test_a_failed_statement_is_never_prepared(
    connection: Connection, database: str, branch: XaBranch
) -> None:
    with suppress(psycopg2.Error):
        run(connection, "INSERT INTO business VALUES (1)")
    with pytest.raises(TransactionAborted, match="failed earlier"):
        prepare(connection, branch)
    assert prepared_gids(database) == []


def test_a_rollback_instead_of_prepare_is_seen_even_without_the_guard(
    connection: Connection, database: str, branch: XaBranch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txmq.tx.postgres.prepared._require_open", lambda *_: None)
    with suppress(psycopg2.Error):
        run(connection, "INSERT INTO business VALUES (1)")
    with pytest.raises(TransactionAborted, match="answered ROLLBACK"):
        prepare(connection, branch)
    assert (prepared_gids(database), business_rows(database)) == ([], [])
    assert_ready(connection, database)


def test_a_branch_that_was_ended_elsewhere_is_in_doubt(database: str, branch: XaBranch) -> None:
    rows(database, "CREATE TABLE business (n int)")
    with closing(producer(database)) as connection:
        begin_branch(connection, branch)
        run(connection, "INSERT INTO business VALUES (1)")
        run(connection, "COMMIT")
        with pytest.raises(InDoubt, match="somebody ended"):
            prepare(connection, branch)


@pytest.mark.parametrize(
    ("statement", "match"),
    [
        ("CREATE TEMPORARY TABLE scratch (n int)", "temporary tables"),
        ("NOTIFY somebody", "NOTIFY"),
        ("INSERT INTO lines VALUES (7)", "23503"),
    ],
)
def test_a_transaction_that_cannot_be_prepared_is_rolled_back(
    database: str, branch: XaBranch, statement: str, match: str
) -> None:
    rows(database, "CREATE TABLE business (n int PRIMARY KEY)")
    rows(database, "CREATE TABLE lines (n int REFERENCES business DEFERRABLE INITIALLY DEFERRED)")
    with closing(producer(database)) as connection:
        begin_branch(connection, branch)
        run(connection, statement)
        with pytest.raises(TransactionAborted, match=match):
            prepare(connection, branch)
        assert prepared_gids(database) == []
        assert_ready(connection, database)


def test_a_gid_in_use_leaves_its_owner_alone(
    connection: Connection, database: str, branch: XaBranch
) -> None:
    prepare(connection, branch)
    with closing(producer(database)) as other:
        begin_branch(other, branch)
        run(other, "INSERT INTO business VALUES (2)")
        with pytest.raises(TransactionAborted, match="42710"):
            prepare(other, branch)
        assert_ready(other, database)
    assert prepared_gids(database) == [branch.gid]


def test_a_lost_connection_proves_nothing(
    connection: Connection, postgres: PostgresServer, branch: XaBranch
) -> None:
    pid = backend_pid(connection)
    postgres.execute(f"SELECT pg_terminate_backend({pid}, 5000)")
    with pytest.raises(InDoubt) as caught:
        prepare(connection, branch)
    assert caught.value.token == str(branch.token)
    with pytest.raises(TransactionAborted, match="lost before"):
        prepare(connection, branch)


def test_a_check_that_fails_after_prepare_leaves_the_branch_in_doubt(
    connection: Connection, database: str, branch: XaBranch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "txmq.tx.postgres.drivers.psycopg2_driver._PREPARE",
        "PREPARE TRANSACTION %(gid)s; BEGIN; SELECT 1/0",
    )
    with pytest.raises(InDoubt):
        prepare(connection, branch)
    assert prepared_gids(database) == [branch.gid]
    assert_ready(connection, database)


def test_a_missing_branch_ended_as_its_transaction_status_says(
    connection: Connection, database: str, branch: XaBranch
) -> None:
    xid = xid_of(connection)
    prepare(connection, branch)
    rows(database, f"COMMIT PREPARED '{branch.gid}'")
    assert commit_prepared(connection, branch.gid, xid) is Ending.FOUND
    assert roll_back_prepared(connection, branch.gid, xid) is Ending.OTHERWISE
    assert roll_back_prepared(connection, branch.gid, None) is Ending.UNKNOWN
    second = new_branch()
    begin_branch(connection, second)
    run(connection, "INSERT INTO business VALUES (2)")
    xid = xid_of(connection)
    prepare(connection, second)
    rows(database, f"ROLLBACK PREPARED '{second.gid}'")
    assert commit_prepared(connection, second.gid, xid) is Ending.OTHERWISE
    assert roll_back_prepared(connection, second.gid, xid) is Ending.FOUND
    assert_ready(connection, database)


def test_a_running_transaction_is_not_reported_as_ended(database: str, branch: XaBranch) -> None:
    with closing(producer(database)) as connection, closing(producer(database)) as other:
        begin_branch(connection, branch)
        run(connection, "CREATE TABLE business (n int)")
        xid = xid_of(connection)
        assert commit_prepared(other, branch.gid, xid) is Ending.UNKNOWN


def test_a_database_out_of_reach_leaves_the_branch_as_it_is(
    connection: Connection, database: str, postgres: PostgresServer, branch: XaBranch
) -> None:
    prepare(connection, branch)
    postgres.execute(f"SELECT pg_terminate_backend({backend_pid(connection)}, 5000)")
    with pytest.raises(DatabaseUnavailable):
        commit_prepared(connection, branch.gid, None)
    assert prepared_gids(database) == [branch.gid]


def test_a_server_without_prepared_transactions_is_reported() -> None:
    with temporary_server(fsync=False, settings={"max_prepared_transactions": "0"}) as server:
        with closing(server.connect()) as connection, pytest.raises(TwoPhaseOff, match="restart"):
            require_two_phase(read_server(connection))
        with closing(producer(server.dsn())) as connection:
            assert isinstance(attempt(connection), TwoPhaseOff)


def test_a_server_without_a_free_prepared_slot(crashable_database: str) -> None:
    with closing(producer(crashable_database)) as connection:
        places = read_server(connection).max_prepared_transactions
        connection.rollback()
        assert [attempt(connection) for _ in range(places)] == [None] * places
        refused = attempt(connection)
        roll_back_all_prepared(crashable_database)
        assert isinstance(refused, TwoPhaseFull)
        assert (refused.retriable, refused.outcome) == (True, "not done")
        assert attempt(connection) is None
        roll_back_all_prepared(crashable_database)


def attempt(connection: Connection) -> DatabaseError | None:
    """Prepare one more branch, and return the error of a refusal."""
    branch = new_branch()
    begin_branch(connection, branch)
    run(connection, "SELECT pg_current_xact_id()")
    try:
        prepare(connection, branch)
    except DatabaseError as refused:
        return refused
    return None


def test_a_member_of_the_owners_role_ends_a_branch_in_that_role(
    database: str, branch: XaBranch
) -> None:
    with poor_role(database) as (member, dsn), poor_role(database, "owner") as (owner, owners_dsn):
        with closing(producer(owners_dsn)) as connection:
            begin_branch(connection, branch)
            run(connection, "SELECT pg_current_xact_id()")
            prepare(connection, branch)
        with closing(connect(dsn, application_name="test")) as recoverer:
            [found] = [one for one in list_prepared(recoverer) if one.here]
            assert found.owner == owner
            with pytest.raises(DatabaseError), in_role(recoverer, owner):
                pass
            rows(database, f"GRANT {owner} TO {member}")
            with pytest.raises(DatabaseError):
                commit_prepared(recoverer, found.gid, found.xid)
            with in_role(recoverer, owner):
                assert commit_prepared(recoverer, found.gid, found.xid) is Ending.DONE
            assert roll_back_prepared(recoverer, found.gid, found.xid) is Ending.OTHERWISE
