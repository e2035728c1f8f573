"""Fixtures for tests of services that use txmq: a plugin of pytest, loaded by itself.

    txmq_broker     a broker for one test, in a thread of this process
    txmq_client     a client of it
    txmq_clock      its clock, which the test moves
    txmq_database   a URL: a fresh database with txmq's tables, which that broker asks
    txmq_letters    the dead letters of a group
    txmq_crash      kills the service's own code at each step of a transaction

docs/TESTING.md shows how they are used. Nothing is imported before a test asks for it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import txmq
    from txmq.testing.broker_thread import BrokerClock, BrokerThread
    from txmq.testing.crash_kit import CrashKit
    from txmq.testing.postgres_server import PostgresServer

SERVICE = "tests"
MEMORY = Path("/dev/shm")  # a file system of the kernel's


@pytest.fixture(scope="session")
def txmq_postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server of this session: that of TXMQ_TEST_DSN, or a temporary one
    (extra `postgres`).
    """
    from txmq.testing.postgres_server import any_server  # noqa: PLC0415  # see above

    with any_server(fsync=False) as server:
        yield server


@pytest.fixture(scope="session")
def _txmq_template(txmq_postgres: PostgresServer) -> str:
    """A database with txmq's tables, to copy."""
    from contextlib import closing  # noqa: PLC0415

    from txmq.tx.postgres.schema import install  # noqa: PLC0415

    name = txmq_postgres.create_database()
    with closing(txmq_postgres.connect(name)) as connection:
        install(connection)
    return name


@pytest.fixture
def txmq_database(txmq_postgres: PostgresServer, _txmq_template: str) -> Iterator[str]:
    """The URL of a fresh database with txmq's tables, which all drivers take."""
    from txmq.testing.postgres_server import postgres_url  # noqa: PLC0415

    name = txmq_postgres.create_database(template=_txmq_template)
    yield postgres_url(txmq_postgres.dsn(name))
    txmq_postgres.drop_database(name)


@pytest.fixture
def txmq_broker(request: pytest.FixtureRequest) -> Iterator[BrokerThread]:
    """A broker for this test; it decides by `txmq_database` where that is used."""
    from txmq.testing.broker_thread import BrokerThread  # noqa: PLC0415

    databases = {}
    if "txmq_database" in request.fixturenames:
        databases["tests"] = request.getfixturevalue("txmq_database")
    with (
        tempfile.TemporaryDirectory(
            prefix="txmq-test-", dir=MEMORY if MEMORY.is_dir() else None
        ) as directory,
        BrokerThread(Path(directory) / "data", databases=databases) as broker,
    ):
        yield broker


@pytest.fixture
def txmq_clock(txmq_broker: BrokerThread) -> BrokerClock:
    """The broker's clock: `txmq_clock.advance(60)`."""
    return txmq_broker.clock


@pytest.fixture
def txmq_client(txmq_broker: BrokerThread) -> Iterator[txmq.Client]:
    """A client of the broker."""
    from txmq import connect  # noqa: PLC0415

    with connect(txmq_broker.url, service=SERVICE) as client:
        yield client


@pytest.fixture
def txmq_letters(txmq_client: txmq.Client) -> Callable[..., list[txmq.DeadLetter]]:
    """`txmq_letters("billing")`: the open dead letters of a group, with bodies."""
    return lambda group, **selection: list(
        txmq_client.letters(group, **{"bodies": True} | selection)
    )


@pytest.fixture
def txmq_crash(txmq_broker: BrokerThread) -> CrashKit:
    """Kills functions at crash points: see `txmq.testing.crash_kit`."""
    from txmq.testing.crash_kit import CrashKit  # noqa: PLC0415

    return CrashKit(txmq_broker)
