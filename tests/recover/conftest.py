"""Two brokers for the session, two databases for each test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

from tests.client.real import RealBroker
from tests.fixtures_postgres import Databases
from tests.recover.world import RecoveryWorld
from tests.tx.postgres.prepared_branches import roll_back_all_prepared
from txmq.client.blocking.client import Client
from txmq.client.blocking.connect import connect
from txmq.testing.postgres_server import PostgresServer
from txmq.testing.wait import PATIENCE_S


@pytest.fixture(scope="session")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequence[RealBroker]]:
    """The home broker of all transactions, and another one.

    A test that stops one starts it again.
    """
    started = [RealBroker(tmp_path_factory.mktemp(name)) for name in ("home", "other")]
    yield started
    for broker in started:
        broker.stop()


@pytest.fixture(scope="session")
def clients(brokers: Sequence[RealBroker]) -> Iterator[Sequence[Client]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(connect(broker.url, service="orders", timeout=PATIENCE_S))
            for broker in brokers
        ]


@pytest.fixture
def two_dsns(postgres: PostgresServer, databases: Databases) -> Iterator[dict[str, str]]:
    """Databases `a` and `b`; their prepared branches are rolled back at the end."""
    names = {name: databases.borrow() for name in ("a", "b")}
    yield {name: postgres.dsn(database) for name, database in names.items()}
    for database in names.values():
        roll_back_all_prepared(postgres.dsn(database))
        databases.give_back(database)


@pytest.fixture
def world(
    brokers: Sequence[RealBroker], clients: Sequence[Client], two_dsns: dict[str, str]
) -> Iterator[RecoveryWorld]:
    made = RecoveryWorld(brokers, clients, two_dsns)
    yield made
    made.close()
