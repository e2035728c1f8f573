"""on_unavailable="outbox": work goes on without the broker.

All messages appear once, and in key order.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any
from uuid import UUID, uuid4

import psycopg2
import pytest

from tests.client.kept_sessions import asked
from tests.client.proxy import Proxy
from tests.client.real import RealBroker
from tests.client.world import ApplicationError, World, fail, make_tables
from tests.fixtures_postgres import create_database
from txmq.client.blocking.client import Client
from txmq.client.blocking.transaction.outbox_publication import publish_row
from txmq.client.protocol.awaited import outbox
from txmq.client.protocol.awaited.bundle import StoringBundle
from txmq.client.protocol.transaction.buffer import Buffer
from txmq.client.protocol.transaction.options import TransactionOptions
from txmq.client.protocol.transaction.outbox_entries import outbox_entries
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import (
    BrokerUnavailable,
    ConfigError,
    DatabaseConflict,
    LocalProtocolError,
    LogChanged,
    MessageTooLarge,
    TxmqError,
)
from txmq.model.message import Message
from txmq.testing.postgres_server import PostgresServer
from txmq.testing.processes import running
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.tx.outbox_entry import order_key, pack_entries
from txmq.tx.postgres.outbox import OutboxRow
from txmq.wire.data_requests import Opcode

Connect = Callable[..., Client]
SOON: TransactionOptions = {"on_unavailable": "outbox", "timeout": 0.3}
DIRECT: TransactionOptions = {"timeout": 0.3}


@pytest.fixture(scope="module")
def own_database(postgres: PostgresServer) -> Iterator[str]:
    """The DSN of a database for these tests alone: a transaction that others have left
    open, or prepared, would keep the outbox's floor where it is.
    """
    name = create_database(postgres)
    yield postgres.dsn(name)
    postgres.drop_database(name)


@pytest.fixture(scope="module")
def absent(tmp_path_factory: pytest.TempPathFactory, own_database: str) -> Iterator[RealBroker]:
    """A broker that tests stop and start again; each test leaves it running."""
    broker = RealBroker(tmp_path_factory.mktemp("absent"), [own_database])
    yield broker
    broker.stop()


@pytest.fixture
def present(tmp_path: Path, own_database: str) -> Iterator[RealBroker]:
    """Another broker that may ask the database."""
    broker = RealBroker(tmp_path / "present", [own_database])
    yield broker
    broker.stop()


@pytest.fixture
def connect(connect: Connect) -> Connect:
    """Clients that soon take a broker for away, as most of them here are to."""
    return partial(connect, timeout=3.0)


@pytest.fixture
def world(own_database: str, absent: RealBroker, connect: Connect) -> Iterator[World]:
    make_tables(own_database)
    world = World(own_database, absent, connect(absent.url, timeout=1.0))
    wait_until(lambda: is_registered(world))
    wait_until(lambda: not waiting(world), what="rows of earlier tests are gone")
    yield world
    world.connection.close()
    if not absent.runs():
        absent.start()


def is_registered(world: World) -> bool:
    return bool(query(world, "SELECT FROM txmq_broker WHERE log_id = %s", world.client.log_id))


def query(world: World, statement: str, *values: object) -> list[Any]:
    with closing(psycopg2.connect(world.dsn)) as connection, connection.cursor() as cursor:
        cursor.execute(statement, tuple(map(str, values)))
        return list(cursor.fetchall())


def waiting(world: World) -> int:
    """Return the number of transactions in the outbox."""
    return len(query(world, "SELECT FROM txmq_outbox WHERE log_id = %s", world.client.log_id))


def place(world: World, number: str, client: Client | None = None, *, timeout: float = 0.3) -> Any:
    """Place an order with a message; return its transaction."""
    options: TransactionOptions = {**SOON, "timeout": timeout}
    with (client or world.client).transaction(world.connection, **options) as tx:
        world.insert(number)
        tx.send(world.topic, number.encode(), key="k")
    return tx


def bodies(world: World) -> list[str]:
    return [found.body.decode() for found in world.stored()]


def test_while_the_broker_is_there_nothing_waits(world: World) -> None:
    place(world, "o-1", timeout=PATIENCE_S).wait_published(PATIENCE_S)
    assert (bodies(world), waiting(world)) == (["o-1"], 0)


def test_orders_of_an_outage_appear_once_and_in_order_when_the_broker_is_back(world: World) -> None:
    place(world, "o-0", timeout=PATIENCE_S).wait_published(PATIENCE_S)
    world.broker.kill()
    placed, began = [place(world, "o-1")], time.monotonic()
    placed += [place(world, f"o-{n}", timeout=PATIENCE_S) for n in range(2, 6)]
    assert time.monotonic() - began < PATIENCE_S  # only the first of them waits for the broker
    assert world.orders() == {f"o-{n}" for n in range(6)}
    assert waiting(world) == 5
    with suppress(ApplicationError), world.client.transaction(world.connection, **SOON) as tx:
        tx.send(world.topic, b"never", key="k")
        fail()
    world.broker.start()
    placed[-1].wait_published(PATIENCE_S)
    assert bodies(world) == [f"o-{n}" for n in range(6)]
    assert placed[0].receipts() == []
    wait_until(lambda: not waiting(world), what="the rows are deleted")
    shown = world.client.call("tx.show", token=placed[0].token.hex)
    assert (shown["state"], shown["by"], shown["service"]) == ("PUBLISHED", "producer", "orders")
    place(world, "o-6", timeout=PATIENCE_S).wait_published(PATIENCE_S)
    assert bodies(world)[-1] == "o-6"


@pytest.mark.parametrize("point", ["outbox.after_publish", "outbox.after_delete"])
def test_a_broker_that_dies_while_it_fetches_sends_nothing_twice(world: World, point: str) -> None:
    place(world, "o-0", timeout=PATIENCE_S).wait_published(PATIENCE_S)
    world.broker.kill()
    placed = [place(world, f"o-{n}") for n in range(1, 4)]
    world.broker.start(crash_at=point)
    wait_until(world.broker.died)
    assert waiting(world) == (3 if point == "outbox.after_publish" else 0)
    world.broker.start()
    placed[-1].wait_published(PATIENCE_S)
    wait_until(lambda: not waiting(world))
    assert bodies(world) == [f"o-{n}" for n in range(4)]


def test_a_bundle_that_was_stored_but_not_confirmed_does_not_count_beside_the_outbox(
    world: World, connect: Connect
) -> None:
    with Proxy(world.broker.url) as proxy:
        client = connect(proxy.url)
        client.send(world.topic, b"first", key="k")
        proxy.hold.add(Opcode.GROUP)
        tx = client.transaction(world.connection, on_unavailable="outbox", timeout=2.0)
        first = tx.token
        with tx:
            world.insert("o-1")
            tx.send(world.topic, b"o-1", key="k")
        assert tx.token != first
        tx.wait_published(PATIENCE_S)
        wait_until(
            lambda: world.client.call("tx.show", token=first.hex)["state"] == "ROLLED_BACK",
        )
    assert bodies(world) == ["first", "o-1"]
    states = dict(
        query(
            world, "SELECT tok::text, state FROM txmq_token WHERE tok IN (%s, %s)", first, tx.token
        )
    )
    assert states[str(first)] == "R"
    assert states[str(tx.token)] in "CD"


def test_of_two_brokers_only_the_one_that_is_away_has_to_fetch(
    world: World, present: RealBroker, connect: Connect
) -> None:
    there = connect(present.url)
    world.client.send(world.topic, b"first", key="k")
    world.broker.kill()
    with there.transaction(world.connection, on_unavailable="outbox", timeout=2.0) as tx:
        world.insert("o-1")
        tx.send(world.topic, b"o-1", key="k")
        tx.at(world.client).send_many(world.topic, [b"o-1", b"o-2"], ["k", None])
    assert waiting(world) == 1
    wait_until(lambda: [found.body for found in present.read(world.topic)] == [b"o-1"])
    world.broker.start()
    tx.wait_published(PATIENCE_S)
    assert sorted(bodies(world)) == ["first", "o-1", "o-2"]


def test_everything_about_a_message_survives_the_wait(world: World) -> None:
    sent = [
        Message(b"0", "k", "t", {"h": "1"}),
        Message(b"1", "k"),
        Message(b"2"),
    ]
    log_id = world.client.log_id
    world.broker.kill()
    with world.client.transaction(world.connection, **SOON) as tx:
        for message in sent:
            tx.send(
                world.topic, message.body, key=message.key, tag=message.tag, headers=message.headers
            )
        tx.send(world.topic, b"there", partition=3)
    world.broker.start()
    assert world.client.log_id == log_id
    tx.wait_published(PATIENCE_S)
    with world.client.consumer("readers", [world.topic], start="first") as consumer:
        got = [consumer.receive(PATIENCE_S) for _ in range(4)]
    found = {m.body: (m.key, m.tag, dict(m.headers)) for m in got if m is not None}
    assert found == {
        b"0": ("k", "t", {"h": "1"}),
        b"1": ("k", None, {}),
        b"2": (None, None, {}),
        b"there": (None, None, {}),
    }
    [there] = [m for m in got if m is not None and m.body == b"there"]
    assert there.partition == 3
    assert {m.message_id.split("-")[0] for m in got if m is not None} == {tx.token.hex}


def test_a_client_that_never_reached_its_broker_takes_the_only_one_of_the_database(
    world: World, connect: Connect
) -> None:
    log_id = world.client.log_id
    asked(world.dsn, f"UPDATE txmq_broker SET forgotten_at = now() WHERE log_id <> '{log_id}'")
    world.broker.kill()
    client = connect(world.broker.url, timeout=0.2)
    place(world, "o-1", client)
    place(world, "o-2", client)
    assert (world.orders(), waiting(world)) == ({"o-1", "o-2"}, 2)
    world.broker.start()
    wait_until(lambda: bodies(world) == ["o-1", "o-2"])
    assert client.log_id == log_id


def test_a_log_that_is_met_while_the_readers_of_the_outbox_are_read_is_the_log(
    world: World, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another thread of the client: the only reader is another broker."""
    client, known, calls = connect(world.broker.url), StoringBundle.log_id, count()

    async def away_once(bundle: StoringBundle[Any]) -> UUID:
        if next(calls) == 0:
            raise BrokerUnavailable("away for a moment")
        return await known(bundle)

    async def readers(_driver: object) -> list[UUID]:
        assert client.log_id == world.client.log_id
        return [uuid4()]

    monkeypatch.setattr(StoringBundle, "log_id", away_once)
    monkeypatch.setattr(outbox, "read_readers", readers)
    place(world, "o-1", client)
    assert world.orders() == {"o-1"}
    wait_until(lambda: bodies(world) == ["o-1"])


@pytest.mark.parametrize("brokers", [0, 2])
def test_without_a_single_broker_in_its_database_a_client_needs_the_id_of_the_log(
    world: World, connect: Connect, brokers: int
) -> None:
    log_id, other = world.client.log_id, uuid4()
    world.broker.kill()
    asked(world.dsn, f"UPDATE txmq_broker SET forgotten_at = now() WHERE log_id <> '{log_id}'")
    if brokers:
        asked(
            world.dsn,
            f"INSERT INTO txmq_broker (log_id, name, reported_at) VALUES ('{other}', 'b', now())",
        )
    else:
        asked(world.dsn, "UPDATE txmq_broker SET forgotten_at = now()")
    wanted = rf"{brokers} brokers work on this database.*log_id=.*txmq schema brokers DSN"
    with pytest.raises(BrokerUnavailable, match=wanted):
        place(world, "o-1", connect(world.broker.url, timeout=0.2))
    asked(world.dsn, f"DELETE FROM txmq_broker WHERE log_id = '{other}'")
    asked(world.dsn, f"UPDATE txmq_broker SET forgotten_at = NULL WHERE log_id = '{log_id}'")
    place(world, "o-2", connect(world.broker.url, log_id=log_id)).token  # noqa: B018
    assert (world.orders(), waiting(world)) == ({"o-2"}, 1)
    world.broker.start()
    wait_until(lambda: bodies(world) == ["o-2"])
    with pytest.raises(LogChanged):
        connect(world.broker.url, log_id=uuid4()).send(world.topic, b"x")
    connect(world.broker.url, log_id=str(log_id)).send(world.topic, b"x")


def test_messages_in_an_outbox_without_a_reader_are_refused(
    world: World, own_broker: RealBroker, connect: Connect
) -> None:
    client = connect(own_broker.url)
    client.send(world.topic, b"x")
    own_broker.kill()
    with pytest.raises(BrokerUnavailable, match="reads this outbox"):
        place(world, "o-1", client)
    client.close(0.1)
    assert world.orders() == set()


def test_an_ack_cannot_wait(world: World) -> None:
    world.client.send(world.topic, b"question")
    with world.client.consumer("askers", [world.topic], start="first") as consumer:
        message = consumer.receive(PATIENCE_S)
        world.broker.kill()
        tx = world.client.transaction(world.connection, **SOON)
        tx.__enter__()
        tx.ack(message)
        with pytest.raises(BrokerUnavailable, match="acks cannot wait"):
            tx.__exit__(None, None, None)
        world.broker.start()
    world.client.close(0.1)


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_snapshot_that_may_hide_the_outbox_is_refused(world: World, level: str) -> None:
    world.connection.set_session(isolation_level=level)
    with pytest.raises(LocalProtocolError, match="READ COMMITTED"):
        place(world, "o-1")
    assert world.orders() == set()


def test_what_cannot_be_queued_is_refused_before_anything_is_committed(
    world: World, connect: Connect
) -> None:
    log_id = world.client.log_id
    choosy = connect(
        world.broker.url, log_id=log_id, partitioner=lambda _topic, _key, _partitions: 0
    )
    world.broker.kill()
    with pytest.raises(BrokerUnavailable, match="partitioner"):
        place(world, "o-1", choosy)
    tx = world.client.transaction(world.connection, **SOON)
    tx.__enter__()
    tx.send_many(world.topic, [b"x"] * 5_000)
    with pytest.raises(MessageTooLarge, match="4096 messages"):
        tx.__exit__(None, None, None)
    assert (world.orders(), waiting(world)) == (set(), 0)
    with pytest.raises(ConfigError, match="there is no policy 'pray'"):
        world.client.transaction(world.connection, on_unavailable="pray")  # type: ignore[call-overload]
    with pytest.raises(LocalProtocolError, match="outbox"):
        world.client.transaction(on_unavailable="outbox")
    world.broker.start()


COUNTERS = """
DROP TABLE IF EXISTS counters;
CREATE TABLE counters (key text PRIMARY KEY, n int NOT NULL);
INSERT INTO counters SELECT 'k-' || k, 0 FROM generate_series(0, 3) k
"""


def count_up(
    world: World, client: Client, number: int, over: Event, options: TransactionOptions
) -> None:
    """Send increasing numbers of a key, taken under its row lock."""
    with closing(psycopg2.connect(world.dsn)) as connection:
        n = number
        while not over.is_set():
            n += 1
            key = f"k-{n % 4}"
            with (
                suppress(TxmqError),
                client.transaction(connection, **options) as tx,
                connection.cursor() as cursor,
            ):
                cursor.execute("UPDATE counters SET n = n + 1 WHERE key = %s RETURNING n", (key,))
                [(count,)] = cursor.fetchall()
                tx.send(world.topic, str(count).encode(), key=key)


@contextmanager
def counting(
    world: World, threads: int, others: Sequence[tuple[Client, TransactionOptions]] = ()
) -> Iterator[None]:
    """Run `count_up` in so many threads, and one for each of the others, during the
    block.
    """
    over = Event()
    members = [(world.client, SOON)] * threads + list(others)
    counters = [
        Thread(target=count_up, args=(world, client, n, over, options))
        for n, (client, options) in enumerate(members)
    ]
    for counter in counters:
        counter.start()
    try:
        yield
    finally:
        over.set()
        for counter in counters:
            counter.join()


def test_messages_of_a_key_keep_the_order_of_its_row_while_the_broker_comes_and_goes(
    world: World,
) -> None:
    make_counters(world)
    for _ in range(2):
        with counting(world, threads=4):
            has_grown(world, 40)
            world.broker.kill()
            has_grown(world, 40)
            world.broker.start()
            has_grown(world, 40)
        wait_until(lambda: world.settled() and not waiting(world))
    require_row_order(world)


def test_transactions_with_and_without_the_outbox_keep_the_order_of_a_row(
    world: World, connect: Connect
) -> None:
    make_counters(world)
    others = [(connect(world.broker.url, timeout=1.0), DIRECT) for _ in range(3)]
    for _ in range(4):
        with counting(world, threads=3, others=others):
            has_grown(world, 40)
            world.broker.kill()
            has_grown(world, 20)
            world.broker.start()
            has_grown(world, 100)
        wait_until(lambda: world.settled() and not waiting(world))
    require_row_order(world)


def make_counters(world: World) -> None:
    with (
        closing(psycopg2.connect(world.dsn)) as connection,
        connection,
        connection.cursor() as cursor,
    ):
        cursor.execute(COUNTERS)


def require_row_order(world: World) -> None:
    """Require all counted numbers of each key, in order."""
    counted = dict(query(world, "SELECT key, n FROM counters"))
    found: dict[str, list[int]] = {key: [] for key in counted}
    for message in world.stored():
        found[str(message.key)].append(int(message.body))
    assert found == {key: list(range(1, n + 1)) for key, n in counted.items()}


def has_grown(world: World, more: int) -> None:
    """Wait until so many more transactions have committed."""

    def committed() -> int:
        [(total,)] = query(world, "SELECT sum(n) FROM counters")
        return int(total)

    least = committed() + more
    wait_until(lambda: committed() >= least)


def put_damaged_row(world: World, keys: str = "{}") -> int:
    """Put a row into the outbox that cannot be published, and return its number."""
    [(seq,)] = query_and_commit(
        world,
        "INSERT INTO txmq_outbox (log_id, tok, service, messages, keys, content)"
        " VALUES (%s, %s, '', 1, %s, 'x') RETURNING seq",
        world.client.log_id,
        UUID(int=0),
        keys,
    )
    return int(seq)


def keys_of(world: World, key: str) -> str:
    """Return the keys of a row with a message of that key."""
    return f"{{{order_key(world.topic, key)}}}"


def test_a_transaction_without_the_outbox_queues_behind_rows_with_its_keys(world: World) -> None:
    broken = put_damaged_row(world, keys=keys_of(world, "k"))
    place(world, "o-1")
    direct = place_directly(world, "o-2", "k")
    place_directly(world, "o-3", "other").wait_published(PATIENCE_S)
    assert (waiting(world), bodies(world)) == (3, ["o-3"])
    query_and_commit(world, "DELETE FROM txmq_outbox WHERE seq = %s RETURNING 1", broken)
    direct.wait_published(PATIENCE_S)
    assert sorted(bodies(world)) == ["o-1", "o-2", "o-3"]
    assert [body for body in bodies(world) if body != "o-3"] == ["o-1", "o-2"]
    wait_until(lambda: not waiting(world))
    place_directly(world, "o-4", "k").wait_published(PATIENCE_S)
    assert world.orders() == {"o-1", "o-2", "o-3", "o-4"}


def test_an_xa_transaction_cannot_overtake_rows_with_its_keys(world: World) -> None:
    broken = put_damaged_row(world)
    place(world, "o-1")
    with pytest.raises(BrokerUnavailable, match="wait for the broker"):
        place_in_two_phases(world, "o-2", "k")
    place_in_two_phases(world, "o-3", "other").wait_published(PATIENCE_S)
    query_and_commit(world, "DELETE FROM txmq_outbox WHERE seq = %s RETURNING 1", broken)
    wait_until(lambda: not waiting(world))
    place_in_two_phases(world, "o-4", "k").wait_published(PATIENCE_S)
    assert [body for body in bodies(world) if body != "o-3"] == ["o-1", "o-4"]
    assert world.orders() == {"o-1", "o-3", "o-4"}


def place_in_two_phases(world: World, number: str, key: str) -> Any:
    with world.client.xa(world.connection) as tx:
        world.insert(number)
        tx.send(world.topic, number.encode(), key=key)
    return tx


def test_a_transaction_without_the_outbox_fails_while_the_broker_is_away(world: World) -> None:
    place_directly(world, "o-0", "k")
    world.broker.kill()
    place(world, "o-1")
    for _ in range(2):
        with pytest.raises(BrokerUnavailable):
            place_directly(world, "o-2", "k", timeout=0.5)
    world.broker.start()
    wait_until(lambda: not waiting(world))
    place_directly(world, "o-3", "k").wait_published(PATIENCE_S)
    assert bodies(world) == ["o-0", "o-1", "o-3"]


def test_an_ack_cannot_queue_behind_rows_with_the_keys_of_its_transaction(world: World) -> None:
    world.client.send(world.topic, b"question")
    broken = put_damaged_row(world, keys=keys_of(world, "k"))
    with world.client.consumer("askers", [world.topic], start="first") as consumer:
        message = consumer.receive(PATIENCE_S)
        tx = world.client.transaction(world.connection, **DIRECT)
        tx.__enter__()
        tx.ack(message)
        tx.send(world.topic, b"answer", key="k")
        with pytest.raises(BrokerUnavailable, match="acks cannot wait"):
            tx.__exit__(None, None, None)
    query_and_commit(world, "DELETE FROM txmq_outbox WHERE seq = %s RETURNING 1", broken)


def test_a_row_that_came_and_went_unseen_is_a_conflict(world: World) -> None:
    """It may have been published behind the bundle, and deleted before the look."""
    scan_without_an_index(world)
    put_and_drain(world)
    place_directly(world, "o-1", "k")
    put_and_drain(world)
    with pytest.raises(DatabaseConflict, match="run the transaction again"):
        place_directly(world, "o-2", "k")
    place_directly(world, "o-3", "k").wait_published(PATIENCE_S)
    assert bodies(world) == ["o-1", "o-3"]
    assert world.orders() == {"o-1", "o-3"}


def test_an_outbox_that_is_always_in_use_is_one_conflict(world: World) -> None:
    """As where another service sends by SQL, and its rows come and go between ours."""
    put_and_drain(world)
    place_directly(world, "o-1", "k")
    put_and_drain(world)
    with pytest.raises(DatabaseConflict):
        place_directly(world, "o-2", "k")
    for number in range(3, 6):
        place_directly(world, f"o-{number}", "k").wait_published(PATIENCE_S)
        put_and_drain(world)
    assert bodies(world) == ["o-1", "o-3", "o-4", "o-5"]


def scan_without_an_index(world: World) -> None:
    """Have plans read the empty outbox from end to end, as after an autovacuum."""
    with closing(psycopg2.connect(world.dsn)) as connection, connection.cursor() as cursor:
        connection.autocommit = True
        cursor.execute("VACUUM (ANALYZE) txmq_outbox")
        cursor.execute(
            "EXPLAIN SELECT FROM txmq_outbox WHERE log_id = %s AND seq >= 1 ORDER BY seq LIMIT 9",
            (str(world.client.log_id),),
        )
        assert "Seq Scan" in str(cursor.fetchall())


def put_and_drain(world: World) -> None:
    """Let a row come and go; wait until it has raised the floor of the outbox."""
    broken = put_damaged_row(world)
    query_and_commit(world, "DELETE FROM txmq_outbox WHERE seq = %s RETURNING 1", broken)
    above = "SELECT FROM txmq_outbox_floor WHERE log_id = %s AND seq > %s"
    wait_until(lambda: bool(query(world, above, world.client.log_id, broken)))


def place_directly(world: World, number: str, key: str, *, timeout: float = PATIENCE_S) -> Any:
    """Place an order without the outbox; return its transaction."""
    with world.client.transaction(world.connection, timeout=timeout) as tx:
        world.insert(number)
        tx.send(world.topic, number.encode(), key=key)
    return tx


def test_a_row_that_is_damaged_holds_up_those_of_its_keys_and_no_others(world: World) -> None:
    broken = put_damaged_row(world, keys=keys_of(world, "k"))
    tx = place(world, "o-1")
    with world.client.transaction(world.connection, **SOON) as other:
        other.send(world.topic, b"o-2", key="other")
    other.wait_published(PATIENCE_S)
    wait_until(lambda: f"row {broken}: " in alarm(world, "outbox.stuck"))
    assert (bodies(world), waiting(world)) == (["o-2"], 2)
    query_and_commit(world, "DELETE FROM txmq_outbox WHERE seq = %s RETURNING 1", broken)
    tx.wait_published(PATIENCE_S)


def test_a_topic_of_the_broker_s_own_is_refused_before_it_is_written(world: World) -> None:
    with (
        pytest.raises(LocalProtocolError, match="is the broker's own"),
        world.client.transaction(world.connection, **SOON) as tx,
    ):
        tx.send("_txmq.audit", b"forged")
    assert waiting(world) == 0


def alarm(world: World, name: str) -> str:
    """Return the text of an alarm; "" where it is not raised."""
    raised = world.client.call("broker.alarms")["alarms"]
    return next((str(one["text"]) for one in raised if one["name"] == name), "")


def query_and_commit(world: World, statement: str, *values: object) -> list[Any]:
    with (
        closing(psycopg2.connect(world.dsn)) as connection,
        connection,
        connection.cursor() as cursor,
    ):
        cursor.execute(statement, tuple(map(str, values)))
        return list(cursor.fetchall())


def test_a_resolver_of_its_own_fetches_what_the_broker_cannot_reach(
    world: World, tmp_path: Path, connect: Connect
) -> None:
    remote = RealBroker(tmp_path / "remote", ["host=127.0.0.1 port=1 connect_timeout=1"])
    settings = tmp_path / "resolver.toml"
    settings.write_text(f"[[resolver]]\nname = 'shop'\ndsn = {json.dumps(world.dsn)}\n")
    with running(
        tmp_path, "resolver", "--config", str(settings), "--every", "0.05", "--broker", remote.url
    ) as resolver:
        world.client = connect(remote.url, timeout=1.0)
        assert resolver.first_line() == "ready shop"
        wait_until(lambda: is_registered(world))
        remote.kill()
        placed = [place(world, f"o-{n}") for n in range(3)]
        remote.start()
        placed[-1].wait_published(PATIENCE_S)
        wait_until(lambda: not waiting(world))
        world.broker = remote
        assert bodies(world) == ["o-0", "o-1", "o-2"]
        assert resolver.terminate() == 0
    remote.stop()


def test_a_row_is_published_once_however_its_topic_grows(
    real: RealBroker, connect: Connect
) -> None:
    client, topic = connect(real.url), f"grown-{uuid4().hex[:8]}"
    client.call("topic.create", name=topic, partitions=2)
    client.send(topic, b"first", key="k")  # so that it knows the shape of then
    buffer, token = Buffer(client._core.topics), new_token()
    buffer.add(topic, Message(b"waited", "k"), 1, None)
    row = OutboxRow(
        1,
        token,
        "orders",
        [order_key(topic, "k")],
        pack_entries(outbox_entries(buffer.items, client._core.topics, token)[0]),
    )
    client.call("topic.grow", name=topic, partitions=16)
    publish_row(client._core, row)
    client.call("topic.grow", name=topic, partitions=32)
    for _ in range(2):
        client._core.topics.refresh(topic)
        publish_row(client._core, row)
    assert sorted(found.body for found in real.read(topic)) == [b"first", b"waited"]
