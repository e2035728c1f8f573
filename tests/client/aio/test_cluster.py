"""A cluster on asyncio: as the others, and one loop waits for all brokers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

import txmq.aio
from tests.client.aio.databases import DATABASES, Database
from tests.client.aio.running import run
from tests.client.kept_sessions import asked
from tests.client.real import RealBroker, bodies
from tests.client.scripted_member import fresh
from tests.client.world import ApplicationError, make_tables
from txmq.aio import Cluster
from txmq.testing.wait import PATIENCE_S

KEYS = [f"k{number}" for number in range(12)]


@asynccontextmanager
async def clustered(
    *brokers: RealBroker, partitions: int = 2
) -> AsyncIterator[tuple[Cluster, str]]:
    """A cluster of the brokers, and a topic that each of them has."""
    urls = [broker.url for broker in brokers]
    async with txmq.aio.connect(urls, service="tests", timeout=PATIENCE_S) as cluster:
        topic = fresh("t")
        for client in cluster.clients:
            await client.call("topic.create", name=topic, partitions=partitions)
        yield cluster, topic


@pytest.mark.parametrize("database", DATABASES.values(), ids=list(DATABASES))
def test_one_commit_decides_for_all_brokers(
    database: Database, shared_database: str, deciding: RealBroker, also_deciding: RealBroker
) -> None:
    make_tables(shared_database)

    async def story() -> None:
        async with clustered(deciding, also_deciding) as (cluster, topic):
            connection = await database.connect(shared_database)
            try:
                for order, fails in (("o-1", False), ("o-2", True), ("o-3", False)):
                    with suppress(ApplicationError):
                        async with cluster.transaction(connection) as tx:
                            await database.execute(
                                connection, f"INSERT INTO orders (id) VALUES ('{order}')"
                            )
                            for key in KEYS:
                                tx.send(topic, order.encode(), key=key)
                            if fails:
                                raise ApplicationError
                    if not fails:
                        await tx.wait_published(PATIENCE_S)
                        assert len(await tx.receipts()) == len(KEYS)
            finally:
                await database.close(connection)
            stored = [bodies(broker, topic) for broker in (deciding, also_deciding)]
            assert all(stored)
            assert sorted(body for one in stored for body in one) == sorted(
                [b"o-1", b"o-3"] * len(KEYS)
            )
        assert set(asked(shared_database, "SELECT id FROM orders")) == {("o-1",), ("o-3",)}

    run(story())
