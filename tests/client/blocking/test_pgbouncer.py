"""The blocking client through PgBouncer in transaction mode, with both drivers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import psycopg
import psycopg2
import pytest

from tests.client.kept_sessions import asked
from tests.client.real import RealBroker
from tests.client.real_consumers import drain
from tests.client.scripted_member import fresh
from tests.client.world import World, make_tables
from tests.pgbouncer import needs_pgbouncer, pgbouncer
from txmq.client.blocking.client import Client
from txmq.errors import TransactionAborted
from txmq.model.message import Message, ReceivedMessage
from txmq.psycopg import EnlistConnection
from txmq.testing.postgres_server import PostgresServer
from txmq.testing.wait import wait_until

pytestmark = needs_pgbouncer
Connect = Callable[..., Client]
DRIVERS: dict[str, Callable[[str], Any]] = {
    "psycopg2": psycopg2.connect,
    "psycopg": lambda dsn: EnlistConnection.connect(dsn, prepare_threshold=None),
}


@pytest.fixture(scope="module")
def pooled(postgres: PostgresServer, shared_database: str) -> Iterator[str]:
    """The DSN of the shared database through the pooler."""
    with pgbouncer(postgres.dsn(), size=8) as found:
        yield found.dsn(shared_database)


@pytest.fixture
def world(deciding: RealBroker, connect: Connect, pooled: str, shared_database: str) -> World:
    make_tables(shared_database)
    return World(shared_database, deciding, connect(deciding.url))


@pytest.mark.parametrize("driver", DRIVERS)
def test_transactions_with_messages(world: World, pooled: str, driver: str) -> None:
    """By a block, by the connection's own commit, and in two phases."""
    with ExitStack() as stack:
        one, other = (stack.enter_context(closing(DRIVERS[driver](pooled))) for _ in range(2))
        for number in range(4):
            try:
                with world.client.transaction(one) as tx:
                    world.insert(f"o-{number}", one)
                    with tx.savepoint():
                        tx.send(world.topic, f"o-{number}".encode(), key="k")
                    if number == 3:
                        tx.set_rollback_only("it is the last")
            except TransactionAborted:
                assert number == 3
        with world.client.xa(one, other) as tx:
            for number, connection in enumerate((one, other), 4):
                world.insert(f"o-{number}", connection)
                tx.send(world.topic, f"o-{number}".encode())
        tx = world.client.enlist(one, hooks=True)
        world.insert("o-6", one)
        tx.send(world.topic, b"o-6")
        if isinstance(one, psycopg.Connection):
            one.commit()
        else:
            tx.commit_with(one.commit)
    expected = {f"o-{number}" for number in range(7) if number != 3}
    wait_until(lambda: world.settled() and len(world.messages()) == 6)
    assert world.messages() == world.orders() == expected
    prepared = "SELECT FROM pg_prepared_xacts WHERE database = current_database()"
    assert asked(world.dsn, prepared) == []


@pytest.mark.parametrize("driver", DRIVERS)
def test_handlers_with_an_inbox(
    real: RealBroker, connect: Connect, pooled: str, shared_database: str, driver: str
) -> None:
    asked(shared_database, "DROP TABLE IF EXISTS effects")
    asked(shared_database, "CREATE TABLE effects (body text UNIQUE)")
    client, topic = connect(real.url), fresh("pooled")
    client.send_batch(topic, [Message(b"%d" % number, f"k{number}") for number in range(30)])

    def handle(message: ReceivedMessage, connection: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO effects VALUES (%s)", (message.body.decode(),))

    with client.consumer(fresh("g"), [topic]) as consumer:
        drain(client, consumer, handle, inbox=lambda: DRIVERS[driver](pooled), workers=2)
        assert (consumer.stats.acked, consumer.stats.nacked, consumer.stats.retried) == (30, 0, 0)
    assert asked(shared_database, "SELECT count(*) FROM effects") == [(30,)]
