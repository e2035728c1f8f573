"""Faults 49 and 53: a promoted standby decides, and the server left behind does not."""

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
from txmq.tx.postgres.identity import ServerIdentity
from txmq.tx.postgres.resolver import Answer, Check, TokenResolver
from txmq.tx.postgres.tokens import insert_token

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
        return resolver.resolve([Check(token, LOG, decider) for token in tokens])
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
