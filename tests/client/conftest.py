"""A scripted broker for each test of the client, and clients that are closed at its
end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import txmq
from tests.client.ledgers import Ledgers
from tests.client.reactor_thread import InReactor, make_in_reactor, running_reactor
from tests.client.real import RealBroker
from tests.client.scripted_broker import FakeBroker
from tests.client.world import World, make_tables
from tests.fixtures_postgres import create_database
from txmq.client.blocking.client import Client
from txmq.client.blocking.connections.connection import Connection
from txmq.client.blocking.consumer.consumer import Consumer
from txmq.testing.postgres_server import OwnServer, PostgresServer
from txmq.testing.wait import PATIENCE_S


@pytest.fixture
def fake() -> Iterator[FakeBroker]:
    with FakeBroker() as broker:
        yield broker


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    """`txmq.connect` for the length of the test, and patient."""
    with ExitStack() as stack:
        settings = {"service": "orders", "timeout": PATIENCE_S, "delivery_timeout": PATIENCE_S}

        def connected(url: str, **options: Any) -> Client:
            return stack.enter_context(txmq.connect(url, **{**settings, **options}))

        yield connected


@pytest.fixture(scope="session")
def shared_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    """The real broker, for tests that use topics of their own and do it no harm."""
    broker = RealBroker(tmp_path_factory.mktemp("broker"))
    yield broker
    broker.stop()


@pytest.fixture
def real(shared_broker: RealBroker) -> RealBroker:
    return shared_broker


@pytest.fixture
def client(real: RealBroker) -> Iterator[Client]:
    with txmq.connect(real.url, service="tests", timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[RealBroker]:
    """A real broker that the test may kill."""
    broker = RealBroker(tmp_path / "own")
    yield broker
    broker.stop()


@pytest.fixture(scope="session")
def shared_database(postgres: PostgresServer) -> Iterator[str]:
    """The DSN of a database with txmq's tables, for tests that tidy up."""
    name = create_database(postgres)
    yield postgres.dsn(name)
    postgres.drop_database(name)


@pytest.fixture(scope="session")
def deciding(
    tmp_path_factory: pytest.TempPathFactory, shared_database: str
) -> Iterator[RealBroker]:
    """A real broker that may ask the shared database. A test that kills it starts it
    again.
    """
    broker = RealBroker(tmp_path_factory.mktemp("deciding"), [shared_database])
    yield broker
    broker.stop()


@pytest.fixture
def world(
    shared_database: str, deciding: RealBroker, connect: Callable[..., Client]
) -> Iterator[World]:
    """A service with its tables, and its connection, in the shared database."""
    make_tables(shared_database)
    world = World(shared_database, deciding, connect(deciding.url))
    yield world
    world.connection.close()


@pytest.fixture(scope="session")
def also_deciding(
    tmp_path_factory: pytest.TempPathFactory, shared_database: str
) -> Iterator[RealBroker]:
    """Another broker on the same database."""
    broker = RealBroker(tmp_path_factory.mktemp("also_deciding"), [shared_database])
    yield broker
    broker.stop()


@pytest.fixture(scope="module")
def reactor() -> Iterator[Any]:
    with running_reactor() as reactor:
        yield reactor


@pytest.fixture
def in_reactor(reactor: Any) -> InReactor:
    return make_in_reactor(reactor)


@contextmanager
def made(*servers: PostgresServer) -> Iterator[list[str]]:
    """A database on each of the servers, for the length of the block."""
    names = [server.create_database() for server in servers]
    yield [server.dsn(name) for server, name in zip(servers, names, strict=True)]
    for server, name in zip(servers, names, strict=True):
        server.drop_database(name)


@contextmanager
def opened(dsns: list[str], broker: RealBroker, client: Client) -> Iterator[Ledgers]:
    ledgers = Ledgers(dsns, broker, client)
    ledgers.reset()
    yield ledgers
    ledgers.recover()
    ledgers.close()


@pytest.fixture(scope="module")
def two_servers(postgres: PostgresServer, crashable_postgres: OwnServer) -> Iterator[list[str]]:
    """The DSNs of two databases."""
    with made(postgres, crashable_postgres) as dsns:
        yield dsns


@pytest.fixture(scope="module")
def one_server(postgres: PostgresServer) -> Iterator[list[str]]:
    """The DSNs of two databases."""
    with made(postgres, postgres) as dsns:
        yield dsns


@pytest.fixture
def ledgers(
    two_servers: list[str], shared_broker: RealBroker, connect: Callable[..., Client]
) -> Iterator[Ledgers]:
    """Databases of two servers."""
    with opened(two_servers, shared_broker, connect(shared_broker.url)) as ledgers:
        yield ledgers


@pytest.fixture(params=["one_server", "two_servers"])
def either(
    request: pytest.FixtureRequest, shared_broker: RealBroker, connect: Callable[..., Client]
) -> Iterator[Ledgers]:
    """Databases of one server, then of two."""
    with opened(
        request.getfixturevalue(request.param), shared_broker, connect(shared_broker.url)
    ) as ledgers:
        yield ledgers


@pytest.fixture
def dialled(client: Client, monkeypatch: pytest.MonkeyPatch) -> list[Connection]:
    """The connections that consumers have made, to be broken."""
    connections: list[Connection] = []
    dial = client._core.open_connection

    def remembered(deadline: float) -> Connection:
        connections.append(dial(deadline))
        return connections[-1]

    monkeypatch.setattr(client._core, "open_connection", remembered)
    return connections


@pytest.fixture
def joined(client: Client) -> Iterator[Callable[..., Consumer]]:
    """Consumers that leave at the end of the test."""
    made: list[Consumer] = []

    def join(group: str, topic: str, **options: Any) -> Consumer:
        made.append(client.consumer(group, [topic], **options))
        return made[-1]

    yield join
    for consumer in made:
        consumer.close()
