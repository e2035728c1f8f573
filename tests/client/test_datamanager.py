"""Messages in transactions of the package `transaction`, beside other managers."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Any

import psycopg2
import pytest
import transaction
from transaction.interfaces import IDataManagerSavepoint, ISavepointDataManager, NoTransaction
from zope.interface.verify import verifyObject

from tests.client.proxy import Proxy
from tests.client.real import RealBroker
from tests.client.scripted_member import fresh
from txmq.client.blocking.client import Client
from txmq.client.datamanager import join
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import ClientClosed, ConfigError
from txmq.errors.xa import XaRefused, XaUnavailable
from txmq.model.actions import AckAction
from txmq.testing.forked import run_source
from txmq.testing.processes import running
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.wire.data_requests import Opcode

Connect = Callable[..., Client]
ROOT = Path(__file__).parents[2]
VOTED = """
import signal, sys, transaction, txmq
from txmq.client.datamanager import join

class Last:  # of all managers, asked for its vote when the messages are prepared
    transaction_manager = transaction.manager
    def sortKey(self): return "~"
    def tpc_begin(self, current): ...
    commit = abort = tpc_finish = tpc_abort = tpc_begin
    def tpc_vote(self, current):
        print(messages.token.hex, flush=True)
        signal.pause()

client = txmq.connect(sys.argv[1], service="orders", timeout=120)
transaction.begin()
messages = join(client, transaction.manager)
messages.send("t", b"voted")
transaction.get().join(Last())
transaction.commit()
"""


class Refused(Exception):
    """The error of a data manager that votes no."""


class Other:
    """Another data manager, which votes no at a chosen step."""

    def __init__(self, manager: Any, key: str, fails: str = "") -> None:
        self.transaction_manager, self._key, self._fails = manager, key, fails
        self.calls: list[str] = []

    def sortKey(self) -> str:
        return self._key

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self._fails:
            raise Refused

    def __getattr__(self, name: str) -> Any:
        if name not in ("abort", "tpc_begin", "commit", "tpc_vote", "tpc_finish", "tpc_abort"):
            raise AttributeError(name)
        return lambda _current: self._called(name)


class ConnectionDataManager:
    """A psycopg2 connection as a minimal data manager of two phases."""

    def __init__(self, manager: Any, connection: Any) -> None:
        self.transaction_manager, self._connection = manager, connection
        self.xid = connection.xid(7, new_token().hex, "rows")
        connection.tpc_begin(self.xid)

    def sortKey(self) -> str:
        return "psycopg2"

    def tpc_begin(self, current: object) -> None: ...
    def commit(self, current: object) -> None: ...

    def tpc_vote(self, current: object) -> None:
        self._connection.tpc_prepare()

    def tpc_finish(self, current: object) -> None:
        self._connection.tpc_commit()

    def tpc_abort(self, current: object) -> None:
        self._connection.tpc_rollback()

    def abort(self, current: object) -> None: ...


@pytest.fixture(params=["thread", "explicit"])
def manager(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Both kinds of managers, each in a transaction."""
    manager = transaction.ThreadTransactionManager() if request.param == "thread" else None
    manager = manager or transaction.TransactionManager(explicit=True)
    manager.begin()
    yield manager
    with suppress(NoTransaction):
        manager.abort()


@pytest.fixture
def client(real: RealBroker, connect: Connect) -> Iterator[Client]:
    """A client of its own service; rolls back what a test leaves prepared."""
    client = connect(real.url, service=fresh("service"))
    yield client
    for xid in client.xa_resource().recover():
        client.xa_resource().rollback(xid)


@pytest.fixture
def topic(client: Client) -> str:
    name = fresh("t")
    client.call("topic.create", name=name, partitions=1)
    return name


@pytest.fixture
def table(shared_database: str) -> Iterator[Any]:
    """A connection to a database with a table `here`, whose constraints are
    deferred.
    """
    with closing(psycopg2.connect(shared_database)) as connection:
        with connection, connection.cursor() as cursor:
            cursor.execute("CREATE TABLE here (id text, UNIQUE (id) DEFERRABLE INITIALLY DEFERRED)")
        yield connection
        connection.reset()
        with connection, connection.cursor() as cursor:
            cursor.execute("DROP TABLE here")


def bodies(broker: RealBroker, topic: str) -> list[bytes]:
    return [found.body for found in broker.read(topic)]


def prepared(client: Client) -> int:
    return len(client.xa_resource().recover())


def test_messages_are_published_with_the_transaction(
    real: RealBroker, client: Client, topic: str, manager: Any
) -> None:
    messages = join(client, manager)
    messages.send(topic, b"1", key="k")
    messages.send_many(topic, [b"2", b"3"], ["k", "k"])
    assert join(client, manager) is messages
    other = Other(manager, "a")
    manager.get().join(other)
    manager.commit()
    messages.wait_published(PATIENCE_S)
    assert bodies(real, topic) == [b"1", b"2", b"3"]
    assert [receipt.offset for receipt in messages.receipts()] == [0, 1, 2]
    assert other.calls == ["tpc_begin", "commit", "tpc_vote", "tpc_finish"]
    with pytest.raises(ClientClosed):
        messages.send(topic, b"late")


def test_an_aborted_transaction_sends_nothing(
    real: RealBroker, client: Client, topic: str, manager: Any
) -> None:
    messages = join(client, manager)
    messages.send(topic, b"1")
    manager.abort()
    with pytest.raises(ClientClosed):
        messages.send(topic, b"late")
    manager.begin()
    join(client, manager).send(topic, b"2")
    manager.commit()
    assert bodies(real, topic) == [b"2"]


@pytest.mark.parametrize("key", ["a", "~"], ids=["before", "after"])
@pytest.mark.parametrize("fails", ["tpc_begin", "commit", "tpc_vote"])
def test_another_manager_s_no_rolls_the_messages_back(
    real: RealBroker, client: Client, topic: str, manager: Any, key: str, fails: str
) -> None:
    join(client, manager).send(topic, b"1")
    manager.get().join(Other(manager, key, fails))
    with pytest.raises(Refused):
        manager.commit()
    assert (bodies(real, topic), prepared(client)) == ([], 0)


def test_messages_that_were_committed_are_not_rolled_back_by_a_failed_end(
    real: RealBroker, client: Client, topic: str, manager: Any
) -> None:
    messages = join(client, manager)
    messages.send(topic, b"1")
    manager.get().join(Other(manager, "~", "tpc_finish"))
    with pytest.raises(Refused):
        manager.commit()
    manager.abort()
    messages.wait_published(PATIENCE_S)
    assert bodies(real, topic) == [b"1"]


def test_the_broker_s_no_rolls_the_others_back(client: Client, topic: str, manager: Any) -> None:
    messages = join(client, manager)
    messages.send(topic, b"1")
    messages.act(AckAction("nobody", "m", 1, topic, 0, 0, 1))
    other = Other(manager, "~")
    manager.get().join(other)
    with pytest.raises(XaRefused):
        manager.commit()
    assert "tpc_finish" not in other.calls
    assert other.calls[-1] == "tpc_abort"
    assert prepared(client) == 0


def test_a_savepoint_withdraws_what_came_after_it(
    real: RealBroker, client: Client, topic: str, manager: Any
) -> None:
    messages = join(client, manager)
    messages.send(topic, b"1")
    savepoint = manager.savepoint()
    messages.send(topic, b"2")
    savepoint.rollback()
    messages.send(topic, b"3")
    manager.commit()
    assert bodies(real, topic) == [b"1", b"3"]


def test_a_manager_that_joined_after_a_savepoint_is_dropped_by_it(
    real: RealBroker, client: Client, topic: str, manager: Any
) -> None:
    savepoint = manager.savepoint()
    messages = join(client, manager)
    messages.send(topic, b"1")
    savepoint.rollback()
    with pytest.raises(ClientClosed):  # it would be sent by nobody
        messages.send(topic, b"2")
    join(client, manager).send(topic, b"3")
    manager.commit()
    assert bodies(real, topic) == [b"3"]


def test_nothing_to_send_leaves_no_trace(client: Client, manager: Any) -> None:
    messages = join(client, manager)
    manager.commit()
    assert client.call("tx.list", state="undecided", limit=10_000)["transactions"] == []
    assert messages.receipts() == []


def test_a_lost_vote_is_a_no_for_good(
    real: RealBroker, client: Client, connect: Connect, topic: str
) -> None:
    manager = transaction.TransactionManager(explicit=True)
    with Proxy(real.url) as proxy:
        through = connect(proxy.url, service=client.service, retries=0)
        manager.begin()
        join(through, manager).send(topic, b"1")
        proxy.lose[Opcode.GROUP] = 1
        with pytest.raises(XaUnavailable):
            manager.commit()
    assert (bodies(real, topic), prepared(client)) == ([], 0)


def test_a_lost_decision_is_sent_again(
    real: RealBroker, client: Client, connect: Connect, topic: str
) -> None:
    manager = transaction.TransactionManager(explicit=True)
    with Proxy(real.url) as proxy:
        manager.begin()
        join(connect(proxy.url, service=client.service), manager).send(topic, b"1")
        proxy.lose[Opcode.DECIDE] = 2
        manager.commit()
        wait_until(lambda: bodies(real, topic) == [b"1"])


def test_rows_of_a_database_and_messages_are_one_transaction(
    real: RealBroker, client: Client, topic: str, manager: Any, table: Any
) -> None:
    manager.abort()
    committed = []
    for order, refused in (
        ("a", False),
        ("b", True),
        ("c", False),
        ("a", True),
    ):  # the second a fails in its vote
        manager.begin()
        rows = ConnectionDataManager(manager, table)
        manager.get().join(rows)
        join(client, manager).send(topic, order.encode())
        with table.cursor() as cursor:
            cursor.execute("INSERT INTO here VALUES (%s)", (order,))
        if order == "b":
            manager.get().join(Other(manager, "~", "tpc_vote"))
        with pytest.raises((Refused, psycopg2.IntegrityError)) if refused else nullcontext():
            manager.commit()
        if not refused:
            committed.append(order)
        with suppress(NoTransaction):
            manager.abort()
    with table, table.cursor() as cursor:
        cursor.execute("SELECT id FROM here ORDER BY id")
        assert [order for (order,) in cursor.fetchall()] == committed == ["a", "c"]
    assert (bodies(real, topic), prepared(client)) == ([b"a", b"c"], 0)


def test_it_is_a_data_manager_as_the_package_wants_it(
    client: Client, topic: str, manager: Any
) -> None:
    messages = join(client, manager)
    verifyObject(ISavepointDataManager, messages, tentative=True)
    verifyObject(IDataManagerSavepoint, messages.savepoint(), tentative=True)
    assert messages.transaction_manager is manager
    assert "txmq:" < messages.sortKey() < "~"


def test_messages_need_a_transaction_and_an_owner(
    client: Client, real: RealBroker, connect: Connect
) -> None:
    manager = transaction.TransactionManager(explicit=True)
    with pytest.raises(NoTransaction):
        join(client, manager)
    manager.begin()
    with pytest.raises(ConfigError, match="owner"):
        join(connect(real.url, service=None), manager)


def test_a_process_that_dies_after_the_votes_leaves_it_to_an_operator(
    own_broker: RealBroker, connect: Connect, tmp_path: Path
) -> None:
    client = connect(own_broker.url)
    client.call("topic.create", name="t", partitions=1)
    with running(tmp_path, VOTED, own_broker.url, command=run_source) as process:
        token = process.first_line()
        process.terminate(signal.SIGKILL)
    [row] = client.call("xa.list", kind="foreign", owner="orders")["transactions"]
    assert (row["token"], row["state"], row["messages"]) == (token, "UNDECIDED", 1)
    assert bodies(own_broker, "t") == []
    client.call(
        "tx.decide", token=token, outcome="COMMIT", operator="ann", reason="the rows are there"
    )
    assert bodies(own_broker, "t") == [b"voted"]
    [row] = client.call("xa.list", heuristic=True)["transactions"]
    assert row["heuristics"][0]["operator"] == "ann"
