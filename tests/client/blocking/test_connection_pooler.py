"""Transactions behind a connection pooler (docs/FAULTS.md 61).

No state may depend on the database session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from uuid import uuid4

import psycopg2
import pytest
from psycopg2.extensions import parse_dsn

from tests.client.kept_sessions import asked
from tests.client.ledgers import TABLES, Ledgers
from tests.client.real import RealBroker
from tests.client.real_consumers import drain
from tests.client.scripted_member import fresh
from tests.client.world import ApplicationError, World, make_tables
from tests.fixtures_postgres import Databases, cut_off, wait_for_replay
from tests.tx.postgres.connection_pooler import Pooler
from tests.tx.postgres.support import producer
from txmq.client.blocking.client import Client
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import DatabaseUnavailable, TransactionAborted
from txmq.model.message import COMMIT, ROLLBACK, UNKNOWN, Message, ReceivedMessage
from txmq.testing.postgres_server import OwnServer, PostgresServer
from txmq.testing.wait import wait_until
from txmq.tx.postgres.blocking import insert_token, read_server
from txmq.tx.postgres.resolver import Check, TokenResolver
from txmq.tx.postgres.session import Connection
from txmq.tx.postgres.session import connect as connect_to

Connect = Callable[..., Client]


@pytest.fixture
def pool(shared_database: str) -> Iterator[Pooler]:
    with Pooler(shared_database) as pooler:
        yield pooler


def test_the_pool_gives_each_transaction_another_connection(pool: Pooler) -> None:
    with closing(psycopg2.connect(pool.dsn)) as connection, connection.cursor() as cursor:
        backends = []
        for _ in range(4):
            cursor.execute("SELECT pg_backend_pid()")
            backends += cursor.fetchall()
            cursor.execute("SELECT pg_backend_pid()")
            assert cursor.fetchall() == backends[-1:]
            connection.commit()
    assert (len(set(backends)), backends[0]) == (3, backends[3])


@pytest.mark.parametrize("autocommit", [False, True])
def test_transactions_with_messages(
    deciding: RealBroker, connect: Connect, pool: Pooler, *, autocommit: bool
) -> None:
    make_tables(pool.dsn)
    world = World(pool.dsn, deciding, connect(deciding.url))
    world.connection.autocommit = autocommit
    for number in range(8):
        try:
            with world.client.transaction(world.connection) as tx:
                world.insert(f"o-{number}")
                with tx.savepoint():
                    tx.send(world.topic, f"o-{number}".encode(), key="k")
                if number % 4 == 3:
                    tx.set_rollback_only("it is the fourth")
        except TransactionAborted:
            assert number % 4 == 3
    wait_until(lambda: world.settled() and len(world.messages()) == 6, what="all is decided")
    assert (
        world.messages()
        == world.orders()
        == {f"o-{number}" for number in range(8) if number % 4 != 3}
    )
    assert len(set(pool.served)) == 3
    world.connection.close()


def test_after_a_switch_over_a_transaction_names_the_server_that_runs_it(
    crashable_postgres: OwnServer,
    crashable_database: str,
    standby: OwnServer,
    tmp_path: Path,
    connect: Connect,
) -> None:
    broker = RealBroker(tmp_path / "broker", [crashable_database])
    with Pooler(crashable_database) as pooler:
        make_tables(pooler.dsn)
        world = World(pooler.dsn, broker, connect(broker.url))

        def order(name: str) -> int:
            """Return the timeline that the bundle names."""
            with world.client.transaction(world.connection) as tx:
                world.insert(name)
                tx.send(world.topic, name.encode())
            shown = world.client.call("tx.show", token=tx.token.hex)
            return int(shown["decider"][2])

        before = order("before")
        wait_for_replay(crashable_postgres, standby)
        cut_off(crashable_postgres, standby)
        standby.execute("SELECT pg_promote()")
        pooler.switch_over(standby.dsn(parse_dsn(crashable_database)["dbname"]))
        with pytest.raises(DatabaseUnavailable, match="switched over") as raised:
            order("refused")
        assert raised.value.retriable
        assert order("after") == before + 1
        assert world.orders() == {"before", "after"}
        wait_until(
            lambda: world.messages() == world.orders() and world.settled(),
            what="all is decided",
        )
        world.connection.close()
    broker.stop()


def test_transactions_over_two_databases(
    postgres: PostgresServer, databases: Databases, real: RealBroker, connect: Connect
) -> None:
    names = [databases.borrow(), databases.borrow()]
    with ExitStack() as stack:
        pools = [stack.enter_context(Pooler(postgres.dsn(name))) for name in names]
        for name in names:
            asked(postgres.dsn(name), TABLES)
        ledgers = Ledgers([pooler.dsn for pooler in pools], real, connect(real.url))
        ledgers.connect()
        ledgers.topic = fresh("pooled")
        for number in range(6):
            ledgers.begin(f"o-{number}").__exit__(None, None, None)
        ledgers.begin("never").__exit__(ApplicationError, ApplicationError(), None)
        wait_until(
            lambda: ledgers.agree(*(f"o-{number}" for number in range(6))),
            what="all agree",
        )
        assert all(len(set(pooler.served)) == 3 for pooler in pools)
        ledgers.close()
    for name in names:
        databases.give_back(name)


def test_a_resolver_behind_a_pool(shared_database: str, pool: Pooler) -> None:
    log_id, committed, open_, unknown = uuid4(), new_token(), new_token(), new_token()
    with closing(connect_to(shared_database, application_name="test")) as connection:
        identity = read_server(connection).identity
    with closing(producer(pool.dsn)) as one, closing(producer(pool.dsn)) as other:
        insert_token(one, committed, [log_id])
        one.commit()
        insert_token(other, open_, [log_id])
        resolver = TokenResolver(pool.dsn)
        checks = [Check(token, log_id, identity, None, 1) for token in (committed, open_, unknown)]
        assert [answer.verdict for answer in resolver.resolve(checks)] == [
            COMMIT,
            UNKNOWN,
            ROLLBACK,
        ]
        other.commit()
        assert [answer.verdict for answer in resolver.resolve(checks)] == [COMMIT, COMMIT, ROLLBACK]
        resolver.close()


def test_handlers_with_an_inbox(real: RealBroker, connect: Connect, pool: Pooler) -> None:
    asked(pool.dsn, "DROP TABLE IF EXISTS effects")
    asked(pool.dsn, "CREATE TABLE effects (body text UNIQUE)")
    client, topic = connect(real.url), fresh("pooled")
    client.send_batch(topic, [Message(b"%d" % number, f"k{number}") for number in range(30)])

    def handle(message: ReceivedMessage, connection: Connection) -> None:
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO effects VALUES (%s)", (message.body.decode(),))

    with client.consumer(fresh("g"), [topic]) as consumer:
        drain(client, consumer, handle, inbox=lambda: psycopg2.connect(pool.dsn), workers=2)
        assert (consumer.stats.acked, consumer.stats.nacked, consumer.stats.retried) == (30, 0, 0)
    assert asked(pool.dsn, "SELECT count(*) FROM effects") == [(30,)]
