"""What no synchronous standby has confirmed counts for nothing: a failover to one would
lose it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing

import pytest
from psycopg2 import extensions

from tests.tx.postgres.prepared_branches import prepared_gids, roll_back_all_prepared
from tests.tx.postgres.support import LOG, backend_pid, new_token, producer, rows, wait_for_backend
from tests.tx.postgres.test_prepared import new_branch, opened
from tests.tx.postgres.test_resolver import set_standby, without_standby  # noqa: F401  # a fixture
from txmq.testing.postgres_server import OwnServer
from txmq.testing.wait import wait_until
from txmq.tx.postgres import bounds
from txmq.tx.postgres.blocking import enqueue, look, prepare
from txmq.tx.postgres.outbox import NewOutboxRow, OutboxRow, SetAside
from txmq.tx.postgres.prepared import NotReplicated
from txmq.tx.postgres.resolver import ResolverPolicy, TokenResolver
from txmq.tx.postgres.session import Connection

WEAK = "-c synchronous_commit=local -c client_min_messages=error"


def cancelled(server: OwnServer, connection: Connection, call: Callable[[], object]) -> object:
    """Make a call that waits for a standby, cancel the wait, and return the result."""
    results = list[object]()

    def run() -> None:
        try:
            results.append(call())
        except NotReplicated as error:
            results.append(error)

    waiting, pid = threading.Thread(target=run), backend_pid(connection)
    waiting.start()
    wait_for_backend(server, pid, "wait_event = 'SyncRep'")
    server.execute(f"SELECT pg_cancel_backend({pid})")
    waiting.join()
    [result] = results
    return result


@pytest.mark.usefixtures("without_standby")
def test_a_prepare_that_no_standby_has_confirmed_is_told(
    crashable_postgres: OwnServer, crashable_database: str
) -> None:
    """Whatever the session's settings are, which would hide or skip the wait."""
    weak, branch = extensions.make_dsn(crashable_database, options=WEAK), new_branch()
    with closing(producer(weak)) as connection:
        block = opened(connection)
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO probe VALUES (2)")
        block.end()
        look(connection, block)
        error = cancelled(crashable_postgres, connection, lambda: prepare(connection, branch))
        assert isinstance(error, NotReplicated)
        assert prepared_gids(crashable_database) == [branch.gid]
        assert rows(weak, "SHOW synchronous_commit") == [("local",)]
    set_standby(crashable_postgres, "TO DEFAULT")
    roll_back_all_prepared(crashable_database)


@pytest.mark.usefixtures("without_standby")
def test_rows_of_the_outbox_that_no_standby_has_confirmed_wait(
    crashable_postgres: OwnServer, crashable_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "STATEMENT_S", 0.2)
    monkeypatch.setattr(bounds, "CANCELLED_WITHIN_S", 1.0)
    token = new_token()
    with (
        closing(producer(crashable_database)) as connection,
        closing(
            TokenResolver(crashable_database, policy=ResolverPolicy(first_pause_s=0.01))
        ) as resolver,
    ):
        wait_until(lambda: resolver.fetch(LOG, [], SetAside()) == [], what="an answer")
        enqueue(connection, [NewOutboxRow(LOG, token, None, "shop", 1, [1], b"x")])
        cancelled(crashable_postgres, connection, connection.commit)

        def refused() -> bool:
            assert resolver.fetch(LOG, [], SetAside()) is None
            return "no synchronous standby has confirmed" in resolver.trouble

        wait_until(refused, what="the reason")
        assert rows(crashable_database, "SELECT tok::text FROM txmq_outbox") == [(str(token),)]
        set_standby(crashable_postgres, "TO DEFAULT")
        found = list[OutboxRow]()

        def fetched() -> bool:
            found.extend(resolver.fetch(LOG, [], SetAside()) or ())
            return bool(found)

        wait_until(fetched, what="the row")
        assert found[0].token == token
