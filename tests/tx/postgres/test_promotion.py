"""Faults 49, 53 and 94: a promoted standby decides, the server left behind does not,
and numbers of the outbox that come again name other rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from uuid import UUID, uuid4

import pytest

from tests.fixtures_postgres import create_database, cut_off, wait_for_replay
from tests.tx.postgres.support import identity_of, producer
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import TokenFenced
from txmq.model.message import COMMIT, ROLLBACK, UNKNOWN
from txmq.testing.postgres_server import OwnServer
from txmq.tx.postgres.blocking import enqueue, fetch, insert_token
from txmq.tx.postgres.identity import ServerIdentity
from txmq.tx.postgres.outbox import NewOutboxRow, SetAside
from txmq.tx.postgres.resolver import Answer, Check, TokenResolver
from txmq.tx.postgres.session import connect

LOG = uuid4()


@pytest.fixture
def name(crashable_postgres: OwnServer) -> Iterator[str]:
    """The name of a database with the tables of txmq."""
    made = create_database(crashable_postgres)
    yield made
    crashable_postgres.drop_database(made)


def commit(dsn: str, token: UUID) -> None:
    with closing(producer(dsn)) as connection:
        insert_token(connection, token, [LOG])
        connection.commit()


def ask(dsn: str, decider: ServerIdentity, *tokens: UUID) -> list[Answer]:
    resolver = TokenResolver(dsn)
    try:
        return resolver.resolve([Check(token, LOG, decider, None, 1) for token in tokens])
    finally:
        resolver.close()


def test_a_promoted_standby_decides_by_its_own_rows(
    crashable_postgres: OwnServer, name: str, standby: OwnServer
) -> None:
    primary, old, new = crashable_postgres, crashable_postgres.dsn(name), standby.dsn(name)
    before = identity_of(old)
    replicated, lost, after = new_token(), new_token(), new_token()
    commit(old, replicated)
    wait_for_replay(primary, standby)
    assert [answer.verdict for answer in ask(new, before, replicated, lost)] == [UNKNOWN, UNKNOWN]
    cut_off(primary, standby)
    commit(old, lost)  # acknowledged, and gone with the failover
    standby.execute("SELECT pg_promote()")
    promoted = identity_of(new)
    assert promoted == before._replace(timeline=before.timeline + 1)
    assert [answer.verdict for answer in ask(new, before, replicated, lost)] == [COMMIT, ROLLBACK]
    with closing(producer(new)) as late, pytest.raises(TokenFenced):
        insert_token(late, lost, [LOG])
    commit(new, after)
    [behind] = ask(old, promoted, after)
    assert behind.verdict is UNKNOWN
    assert "behind the transaction's" in behind.reason
    assert [answer.verdict for answer in ask(new, promoted, after)] == [COMMIT]


def put_rows(dsn: str, count: int) -> None:
    """Commit transactions whose messages wait in the outbox."""
    with closing(producer(dsn)) as connection:
        for _ in range(count):
            enqueue(connection, [NewOutboxRow(LOG, new_token(), None, "s", 1, [1], b"x")])
            connection.commit()


def test_a_row_of_a_promoted_standby_outlives_the_published_one_with_its_number(
    crashable_postgres: OwnServer, name: str, standby: OwnServer
) -> None:
    primary, old, new = crashable_postgres, crashable_postgres.dsn(name), standby.dsn(name)
    put_rows(old, 1)
    wait_for_replay(primary, standby)
    cut_off(primary, standby)
    put_rows(old, 80)  # a sequence is logged 32 numbers ahead
    with closing(connect(old, application_name="test")) as connection:
        published = [row.published for row in fetch(connection, LOG, [], SetAside())]
    standby.execute("SELECT pg_promote()")
    put_rows(new, 1)
    with closing(connect(new, application_name="test")) as connection:
        [row] = fetch(connection, LOG, published, SetAside())
        assert row.seq in [other.seq for other in published]
        assert row.published not in published
        assert fetch(connection, LOG, [row.published], SetAside()) == []
