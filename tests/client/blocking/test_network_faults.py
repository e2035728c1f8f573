"""Networks that stop, break, crawl or lose bytes, between client, broker and PostgreSQL
(FAULTS 18, 20, 21).

Afterwards rows and messages agree, nothing was decided twice, and no transaction stays
undecided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import psycopg2
import pytest

from tests.client.real import RealBroker
from tests.client.world import World, make_tables
from txmq.client.blocking.client import Client
from txmq.client.blocking.transaction.transaction import Transaction
from txmq.client.protocol.address import parse_url
from txmq.client.protocol.awaited import postgres
from txmq.errors import BrokerUnavailable, TransactionAborted
from txmq.testing.network import FaultProxy, NetworkConditions
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.tx.postgres.commit import guarded_commit

Connect = Callable[..., Client]


class Between(World):
    """A world with links between client, broker and database.

    The test's own checks do not use these links.
    """

    def __init__(
        self, dsn: str, broker: RealBroker, direct: Client, links: dict[str, FaultProxy]
    ) -> None:
        super().__init__(dsn, broker, direct)
        self.connection.close()
        self.to_broker, self.to_database, self.resolving = (
            links[name] for name in ("broker", "database", "resolver")
        )
        self.far = psycopg2.connect(
            psycopg2.extensions.make_dsn(dsn, host="127.0.0.1", port=self.to_database.port)
        )
        self.url = f"txmq://127.0.0.1:{self.to_broker.port}"

    def heal(self) -> None:
        for link in (self.to_broker, self.to_database, self.resolving):
            link.conditions = NetworkConditions()
            link.heal()

    def book(self, client: Client, order: str, **options: Any) -> Transaction:
        """Write a row and send a message in one transaction."""
        with client.transaction(self.far, check_after=0.2, **options) as tx:
            self.insert(order, self.far)
            tx.send(self.topic, order.encode(), key=order)
        return tx

    def shown(self, order: Transaction | str) -> dict[str, Any]:
        token = order if isinstance(order, str) else order.token.hex
        return self.client.call("tx.show", token=token)

    def undecided(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = self.client.call("tx.list", state="undecided")[
            "transactions"
        ]
        return listed

    def agrees(self, *orders: str) -> None:
        """Assert that rows and messages are these orders, once each, with no
        contradiction.
        """
        wait_until(self.settled, what="decisions")
        assert self.orders() == set(orders)
        assert sorted(found.body.decode() for found in self.stored()) == sorted(orders)
        assert self.client.call("tx.list", state="conflicts")["transactions"] == []


@pytest.fixture(scope="module")
def links(shared_database: str) -> Iterator[dict[str, FaultProxy]]:
    with ExitStack() as stack:
        database, resolver = (
            stack.enter_context(FaultProxy.to_database(shared_database)[0]) for _ in range(2)
        )
        yield {"database": database, "resolver": resolver}


@pytest.fixture(scope="module")
def far_broker(
    tmp_path_factory: pytest.TempPathFactory, shared_database: str, links: dict[str, FaultProxy]
) -> Iterator[RealBroker]:
    """A broker whose resolver has a link of its own to the database."""
    dsn = psycopg2.extensions.make_dsn(
        shared_database, host="127.0.0.1", port=links["resolver"].port
    )
    broker = RealBroker(tmp_path_factory.mktemp("far"), [dsn])
    with FaultProxy(next(iter(parse_url(broker.url)))) as links["broker"]:
        yield broker
    broker.stop()


@pytest.fixture
def between(
    shared_database: str, far_broker: RealBroker, links: dict[str, FaultProxy], connect: Connect
) -> Iterator[Between]:
    make_tables(shared_database)
    between = Between(
        shared_database, far_broker, connect(far_broker.url, timeout=PATIENCE_S), links
    )
    yield between
    between.heal()
    between.far.close()


Before = Callable[[], None]


@pytest.fixture
def at_commit(monkeypatch: pytest.MonkeyPatch) -> Callable[[Before], None]:
    """Set an action that happens right before the next COMMIT."""

    def set_up(before: Before) -> None:
        async def commit(connection: Any, token: Any) -> bool:
            monkeypatch.setattr(postgres, "guarded_commit", guarded_commit)
            before()
            return await guarded_commit(connection, token)

        monkeypatch.setattr(postgres, "guarded_commit", commit)

    return set_up


def test_fault_20_without_the_broker_nothing_is_committed(
    between: Between, connect: Connect
) -> None:
    client = connect(between.url, timeout=PATIENCE_S)
    between.book(client, "before")
    between.to_broker.cut()
    with pytest.raises(BrokerUnavailable) as refused:
        between.book(client, "meanwhile", timeout=0.3)
    assert refused.value.outcome == "not done"
    between.heal()
    between.book(client, "after").wait_published(PATIENCE_S)
    between.agrees("before", "after")


def test_fault_20_a_decision_that_does_not_reach_the_broker_is_read_off_the_row(
    between: Between, connect: Connect, at_commit: Callable[[Before], None]
) -> None:
    client = connect(between.url, timeout=PATIENCE_S)
    at_commit(between.to_broker.cut)
    tx = between.book(client, "o-1")
    wait_until(lambda: between.shown(tx)["state"] == "PUBLISHED")
    assert between.shown(tx)["by"].startswith("resolver")
    between.heal()
    tx.wait_published(PATIENCE_S)  # the decision arrives after all, and is the same
    between.agrees("o-1")


@pytest.mark.parametrize("refused", [False, True], ids=["in a black hole", "refused"])
def test_fault_20_a_broker_without_the_database_decides_nothing(
    between: Between, connect: Connect, at_commit: Callable[[Before], None], *, refused: bool
) -> None:
    client = connect(between.url, timeout=PATIENCE_S)

    def part() -> None:
        between.to_broker.cut()  # so that it is the resolver's to find out
        if refused:
            between.resolving.reset(refuse=True)
        else:
            between.resolving.cut()

    at_commit(part)
    tx = between.book(client, "o-1")
    if refused:
        wait_until(lambda: between.shown(tx)["tries"] >= 2, what="checks in vain")
    else:
        wait_until(lambda: between.resolving.held, what="a question in the hole")
    assert between.shown(tx)["state"] == "UNDECIDED"
    assert between.orders() == {"o-1"}
    between.resolving.heal()
    wait_until(lambda: between.shown(tx)["state"] == "PUBLISHED")
    between.heal()
    between.agrees("o-1")


@pytest.mark.parametrize("arrives", [True, False], ids=["late", "never"])
def test_fault_20_a_commit_in_a_black_hole_is_waited_for(
    between: Between, connect: Connect, at_commit: Callable[[Before], None], *, arrives: bool
) -> None:
    client = connect(between.url, timeout=PATIENCE_S)
    at_commit(between.to_database.cut)
    with ThreadPoolExecutor() as pool:
        booking = pool.submit(between.book, client, "o-1")
        wait_until(between.undecided, what="a half message")
        wait_until(
            lambda: [tx for tx in between.undecided() if tx["tries"] >= 2],
            what="checks in vain",
        )
        [half] = between.undecided()
        assert between.orders() == set()
        if arrives:
            between.heal()
            booking.result(PATIENCE_S).wait_published(PATIENCE_S)
        else:
            between.to_database.reset()
            between.heal()
            with pytest.raises(TransactionAborted):
                booking.result(PATIENCE_S)
    assert between.shown(half["token"])["state"] == ("PUBLISHED" if arrives else "ROLLED_BACK")
    between.agrees(*(["o-1"] if arrives else []))


def test_fault_18_a_send_into_a_black_hole_is_stored_once_when_it_heals(
    between: Between, connect: Connect
) -> None:
    client = connect(between.url, timeout=PATIENCE_S)
    client.send(between.topic, b"before")
    between.to_broker.cut()
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(client.send, between.topic, b"meanwhile")
        wait_until(lambda: between.to_broker.held, what="a send in the hole")
        between.heal()
        sending.result(PATIENCE_S)
    assert sorted(found.body for found in between.stored()) == [b"before", b"meanwhile"]


def test_fault_18_on_a_half_open_connection_a_send_is_made_again_on_another(
    between: Between, connect: Connect
) -> None:
    client = connect(between.url, timeout=6.0)
    client.send(between.topic, b"before")
    between.to_broker.abandon()
    client.send(between.topic, b"after")
    assert sorted(found.body for found in between.stored()) == [b"after", b"before"]


def test_fault_18_byte_by_byte_a_conversation_goes_on(between: Between, connect: Connect) -> None:
    between.to_broker.conditions = NetworkConditions(chunk=1)
    client = connect(between.url, timeout=PATIENCE_S)
    client.send(between.topic, b"in drops" * 50)
    assert [found.body for found in between.stored()] == [b"in drops" * 50]


def test_fault_18_a_consumer_in_a_black_hole_is_missed_and_its_messages_go_to_another(
    between: Between, connect: Connect
) -> None:
    between.client.send(between.topic, b"m", partition=0)
    options: dict[str, Any] = {"session": 2.0, "lease": 4.0, "start": "first"}
    group = f"readers-of-{between.topic}"
    lost = connect(between.url, timeout=PATIENCE_S).consumer(group, [between.topic], **options)
    taken = next(iter(lost))
    between.to_broker.cut()
    with closing(between.client.consumer(group, [between.topic], **options)) as other:
        again = next(iter(other))
        assert (again.offset, again.body) == (taken.offset, taken.body)
        assert again.attempt == taken.attempt, (
            "a death alone counts for none of what was lost with it"
        )
        other.ack(again)
        wait_until(lambda: between.client.call("group.show", group=group)["unsettled"] == 0)
    between.heal()
    lost.close()
    assert between.client.call("group.show", group=group)["unsettled"] == 0


def test_fault_21_a_slow_narrow_network_that_loses_things_loses_no_message(
    between: Between, connect: Connect
) -> None:
    for link in (between.to_broker, between.to_database, between.resolving):
        link.conditions = NetworkConditions(
            delay_s=0.01, loss=0.05, resend_s=0.1, bytes_per_s=200_000.0
        )
    client = connect(between.url, timeout=PATIENCE_S, window_bytes=1 << 16)
    orders = [f"o-{n}" for n in range(3)]
    for order in orders:
        between.book(client, order, timeout=PATIENCE_S)
    sent = [
        client.send_async(between.topic + "-plain", bytes(1_024), key=str(n)) for n in range(150)
    ]
    assert (
        len(
            {
                (receipt.partition, receipt.offset)
                for receipt in (f.result(PATIENCE_S) for f in sent)
            }
        )
        == 150
    )
    between.heal()
    between.agrees(*orders)
    assert len(between.broker.read(between.topic + "-plain")) == 150
