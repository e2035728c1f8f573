"""A hundred thousand messages as one decision, with readers at the same time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from uuid import uuid4

import pytest

from tests.client.real import RealBroker
from tests.client.scripted_broker import FakeBroker
from tests.client.world import World, make_tables
from txmq.client.blocking.client import Client
from txmq.client.blocking.transaction.transaction import Transaction
from txmq.errors import TransactionAborted
from txmq.model.actions import ReplayAction
from txmq.model.bundle import BundleReceipt, BundleState
from txmq.testing.wait import PATIENCE_S
from txmq.wire.bundle import pack_bundle_receipt

Connect = Callable[..., Client]
MESSAGES, PARTITIONS = 100_000, 4


@pytest.fixture
def topics(deciding: RealBroker, connect: Connect) -> tuple[str, str]:
    client, names = connect(deciding.url), (f"a{uuid4().hex}", f"b{uuid4().hex}")
    for name in names:
        client.call("topic.create", name=name, partitions=PARTITIONS)
    return names


@contextmanager
def watched(client: Client, topics: tuple[str, str]) -> Iterator[list[int]]:
    """Return what readers see at the ends of both topics during the block."""
    over, seen = Event(), list[int]()

    def look() -> None:
        last = False
        while not last:
            last = over.is_set()  # and once more, so that the end is seen
            seen.extend(sum(client.call("topic.show", name=topic)["ends"]) for topic in topics)

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        try:
            yield seen
        finally:
            over.set()
            looking.result(PATIENCE_S)


def send(tx: Transaction, topics: tuple[str, str]) -> None:
    each = MESSAGES // 2
    for topic in topics:
        numbers = range(each)
        tx.send_many(topic, [b"%d" % n for n in numbers], [f"k{n}" for n in numbers])


def whole(broker: RealBroker, topics: tuple[str, str], seen: list[int]) -> None:
    """Require that nothing was seen before all of it, each message once and in
    order.
    """
    each = MESSAGES // 2
    assert set(seen) == {0, each}
    assert seen == sorted(seen)
    for topic in topics:
        found = broker.read(topic)
        assert Counter(message.body for message in found) == Counter(b"%d" % n for n in range(each))
        assert len({message.partition for message in found}) == PARTITIONS


@pytest.mark.timeout(300)
def test_rows_and_a_hundred_thousand_messages_exist_together(
    shared_database: str, deciding: RealBroker, connect: Connect, topics: tuple[str, str]
) -> None:
    make_tables(shared_database)
    world = World(shared_database, deciding, connect(deciding.url, timeout=PATIENCE_S))
    with watched(connect(deciding.url), topics) as seen:
        with world.client.transaction(
            world.connection, timeout=PATIENCE_S, check_after=PATIENCE_S
        ) as tx:
            world.insert("o-1")
            send(tx, topics)
        tx.wait_published(PATIENCE_S)
    world.connection.close()
    whole(deciding, topics, seen)


@pytest.mark.timeout(300)
def test_a_local_transaction_may_have_as_many(
    deciding: RealBroker, connect: Connect, topics: tuple[str, str]
) -> None:
    with watched(connect(deciding.url), topics) as seen:
        with connect(deciding.url, timeout=PATIENCE_S).transaction(timeout=PATIENCE_S) as tx:
            send(tx, topics)
        tx.wait_published(PATIENCE_S)
    whole(deciding, topics, seen)


def test_what_the_broker_rolled_back_while_it_was_sent_is_aborted(
    shared_database: str, fake: FakeBroker, deciding: RealBroker, connect: Connect
) -> None:
    make_tables(shared_database)
    world = World(shared_database, deciding, connect(fake.url))
    fake.others = lambda _frame: pack_bundle_receipt(BundleReceipt(BundleState.ROLLED_BACK, 0))
    tx = world.client.transaction(world.connection)
    tx.__enter__()
    world.insert("o-1")
    tx.act(ReplayAction("group", "orders", 0, 9))
    with pytest.raises(TransactionAborted, match="rolled back"):
        tx.__exit__(None, None, None)
    assert world.orders() == set()
    world.connection.close()
