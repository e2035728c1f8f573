"""Messages in transactions that somebody else commits, against real servers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from typing import Any

import psycopg
import psycopg2
import pytest
from psycopg2 import extensions, extras
from psycopg2.pool import SimpleConnectionPool

import txmq
import txmq.psycopg
from tests.client.proxy import Proxy
from tests.client.real import RealBroker
from tests.client.world import ApplicationError, World, fail
from tests.tx.postgres.business_table import run
from txmq.client.blocking.client import Client
from txmq.errors import (
    BrokerUnavailable,
    ClientClosed,
    InDoubt,
    LocalProtocolError,
    TransactionAborted,
    TransactionEnded,
)
from txmq.model.message import Message
from txmq.postgres import EnlistConnection
from txmq.testing.processes import run_script
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.wire.data_requests import Opcode

# Of a transaction that is committed by `commit()`; True: it is committed there.
CRASHPOINTS = {
    "tx.before_group": False,
    "tx.after_group": False,
    "tx.after_token": False,
    "tx.before_commit": False,
    "tx.after_commit": True,
    "tx.after_decide": True,
}
# Between hooks: the process is killed by itself.
BETWEEN_HOOKS = {"before_commit": False, "commit": True}
WORKERS = """
import json, os, signal, sys, psycopg2, txmq
from txmq.crashpoints import VARIABLE
from txmq.postgres import EnlistConnection
url, dsn, topic, points = *sys.argv[1:4], json.loads(sys.argv[4])
hits = []
for point in points:
    pid = os.fork()
    if pid:
        hits.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL)
        continue
    client = txmq.connect(url, service="killed", timeout=120)
    own = "." in point
    if own:
        os.environ[VARIABLE] = point
    connection = psycopg2.connect(dsn, connection_factory=EnlistConnection if own else None)
    tx = client.enlist(connection, hooks=not own, check_after=0.1)
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO orders (id) VALUES (%s)", (point,))
    tx.send(topic, point.encode(), key=point)
    for step in ("commit",) if own else ("before_commit", "commit", "after_commit"):
        getattr(connection if step == "commit" else tx, step)()
        if step == point:
            os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)
print(sum(hits))
"""


@pytest.fixture
def connection(world: World) -> Iterator[EnlistConnection]:
    with closing(psycopg2.connect(world.dsn, connection_factory=EnlistConnection)) as connection:
        yield connection


def agreed(world: World) -> set[str]:
    """Return the rows once everything is decided, which the messages have to equal."""
    wait_until(world.settled)
    assert world.orders() == world.messages()
    return world.orders()


def test_a_bare_commit_takes_the_messages_along(world: World, connection: EnlistConnection) -> None:
    for order in ("o-1", "o-2"):
        tx = world.client.enlist(connection)
        world.insert(order, connection)
        tx.send(world.topic, order.encode())
        connection.commit()
        tx.wait_published(PATIENCE_S)
    with connection:
        world.insert("o-3", connection)
        world.client.enlist(connection).send(world.topic, b"o-3")
    world.client.enlist(connection)
    connection.commit()  # nothing to send, and nothing is sent
    world.insert("o-4", connection)
    world.client.enlist(connection).send(world.topic, b"o-4")
    connection.rollback()
    with suppress(ApplicationError), connection:
        world.insert("o-5", connection)
        world.client.enlist(connection).send(world.topic, b"o-5")
        fail()
    connection.commit()
    assert agreed(world) == {"o-1", "o-2", "o-3"}


def test_messages_without_rows_are_sent_as_well(world: World, connection: EnlistConnection) -> None:
    tx = world.client.enlist(connection)
    tx.send(world.topic, b"alone")
    connection.commit()
    tx.wait_published(PATIENCE_S)
    assert world.messages() == {"alone"}


def test_one_transaction_has_one_set_of_messages(
    world: World, connection: EnlistConnection
) -> None:
    tx = world.client.enlist(connection, timeout=3.0)
    assert world.client.enlist(connection) is tx
    assert world.client.enlist(connection, timeout=3.0) is tx
    with pytest.raises(LocalProtocolError, match="options"):
        world.client.enlist(connection, timeout=4.0)
    with txmq.connect(world.broker.url) as other, pytest.raises(LocalProtocolError, match="client"):
        other.enlist(connection)
    with pytest.raises(LocalProtocolError, match="serves transaction"):
        world.client.transaction(connection).__enter__()
    with pytest.raises(LocalProtocolError, match="no block"):
        tx.__enter__()
    connection.commit()
    assert world.client.enlist(connection) is not tx
    connection.rollback()
    with world.client.transaction(connection), pytest.raises(LocalProtocolError, match="serves"):
        world.client.enlist(connection)


@pytest.mark.parametrize("connect_to", [psycopg2.connect, psycopg.connect])
def test_a_connection_whose_commit_would_leave_the_messages_is_refused(
    world: World, connect_to: Callable[[str], Any]
) -> None:
    with closing(connect_to(world.dsn)) as connection:
        world.insert("o-1", connection)
        with pytest.raises(LocalProtocolError, match="takes no messages along") as refusal:
            world.client.enlist(connection).send(world.topic, b"o-1")
        assert "hooks=True" in str(refusal.value.hint)
        tx = world.client.enlist(connection, hooks=True)  # and the connection is as it was
        tx.send(world.topic, b"o-1")
        tx.commit_with(connection.commit)
    assert agreed(world) == {"o-1"}


@pytest.mark.parametrize("factory", [None, EnlistConnection])
def test_a_hook_that_lies_publishes_nothing(world: World, factory: Any) -> None:
    """A statement fails between the hook and COMMIT, and its error is swallowed."""
    with closing(psycopg2.connect(world.dsn, connection_factory=factory)) as connection:
        tx = world.client.enlist(connection, hooks=factory is None)
        world.insert("o-1", connection)
        tx.send(world.topic, b"o-1")
        tx.before_commit()
        with suppress(psycopg2.Error):
            run(connection, "SELECT 1 / 0")
        if factory is None:
            connection.commit()  # the server answers ROLLBACK, and nothing is raised
            tx.after_commit()
            with pytest.raises(TransactionAborted):
                tx.wait_published(PATIENCE_S)
        else:
            with pytest.raises(TransactionAborted):
                connection.commit()
    assert agreed(world) == set()


@pytest.mark.parametrize("said", ["after_commit", "after_rollback", None])
@pytest.mark.parametrize("committed", [True, False])
def test_the_row_decides_whatever_the_hooks_say(
    world: World, said: str | None, *, committed: bool
) -> None:
    tx = world.client.enlist(world.connection, hooks=True, check_after=0.1)
    world.insert("o-1")
    tx.send(world.topic, b"o-1")
    tx.before_commit()
    if committed:
        world.connection.commit()
    else:
        world.connection.rollback()
    if said is not None:
        getattr(tx, said)()
    assert agreed(world) == ({"o-1"} if committed else set())


@pytest.mark.parametrize("hook", [False, True])
def test_a_commit_without_its_hook_is_noticed(world: World, *, hook: bool) -> None:
    tx = world.client.enlist(world.connection, hooks=True)
    world.insert("o-1")
    tx.send(world.topic, b"o-1")
    world.connection.commit()
    following = tx.before_commit if hook else partial(world.insert, "o-2")
    with pytest.raises(TransactionEnded):
        following()
    tx = world.client.enlist(world.connection, hooks=True)
    tx.send(world.topic, b"o-1")
    with pytest.raises(TransactionEnded):
        tx.after_commit()
    assert (world.orders(), world.messages()) == ({"o-1"}, set())


def test_an_answer_that_is_lost_is_asked_for(world: World, connection: EnlistConnection) -> None:
    tx = world.client.enlist(connection)
    world.insert("o-1", connection)
    tx.send(world.topic, b"o-1")
    tx.commit_with(lambda: commit_and_lose(connection))
    tx.wait_published(PATIENCE_S)
    assert agreed(world) == {"o-1"}


def test_an_answer_that_nobody_has_leaves_it_in_doubt(
    world: World, connection: EnlistConnection, connect: Callable[..., Client]
) -> None:
    with Proxy(world.broker.url) as proxy:
        client = connect(proxy.url, timeout=1.0)  # within which it asks
        client.send_async(world.topic, b"o-1").result()
        proxy.hold.add(Opcode.CALL)
        tx = client.enlist(connection)
        world.insert("o-1", connection)
        tx.send(world.topic, b"o-1")
        with pytest.raises(InDoubt) as raised:
            tx.commit_with(lambda: commit_and_lose(connection))
    assert raised.value.token == str(tx.token)
    wait_until(lambda: world.state(tx.token) == "PUBLISHED")


def commit_and_lose(connection: EnlistConnection) -> None:
    super(EnlistConnection, connection).commit()
    super(EnlistConnection, connection).close()
    raise psycopg2.OperationalError


def test_the_driver_s_own_error_says_why_commit_was_refused(
    world: World, connection: EnlistConnection
) -> None:
    world.client.enlist(connection).send(world.topic, b"m")
    run(connection, "INSERT INTO lines VALUES (1, 'nobody')")  # a deferred constraint
    with pytest.raises(psycopg2.errors.ForeignKeyViolation):
        connection.commit()
    run(connection, "SELECT 1")
    connection.commit()
    assert agreed(world) == set()


def test_a_hook_whose_error_is_swallowed_commits_nothing(
    world: World, connection: EnlistConnection
) -> None:
    tx = world.client.enlist(connection)
    world.insert("o-1", connection)
    tx.send(world.topic, b"o-1")
    tx.set_rollback_only("no")
    with suppress(TransactionAborted):
        connection.commit()
    connection.commit()
    assert agreed(world) == set()


def test_all_cursors_of_an_enlist_connection_are_watched(
    world: World, connection: EnlistConnection
) -> None:
    cursors = [
        connection.cursor(),
        connection.cursor(cursor_factory=extras.RealDictCursor),
        connection.cursor(None, extras.DictCursor),
    ]
    tx = world.client.enlist(connection)
    for n, cursor in enumerate(cursors):
        tx.send(world.topic, b"kept")
        cursor.execute("SAVEPOINT s")
        tx.send(world.topic, b"withdrawn")
        cursor.execute("ROLLBACK TO s")
        assert len(tx._bundle.buffer.items) == n + 1
        with pytest.raises(LocalProtocolError, match="would end"):
            cursor.execute("COMMIT")
    with connection.cursor("named", scrollable=True) as named:
        named.execute("SELECT generate_series(1, 3)")
        assert named.fetchmany(2) == [(1,), (2,)]
    connection.rollback()


def test_a_savepoint_from_before_the_first_send_takes_all_of_them_back(
    world: World, connection: EnlistConnection
) -> None:
    run(connection, "SAVEPOINT s")
    tx = world.client.enlist(connection)
    with tx.savepoint():
        tx.send(world.topic, b"withdrawn")
    run(connection, "ROLLBACK TO s")
    with suppress(ApplicationError), tx.savepoint():
        tx.send(world.topic, b"withdrawn")
        fail()
    tx.send(world.topic, b"kept")
    connection.commit()
    tx.wait_published(PATIENCE_S)
    assert world.messages() == {"kept"}


def test_an_error_before_anything_is_stored_rolls_back_too(
    world: World, connection: EnlistConnection
) -> None:
    with txmq.connect([world.broker.url, "txmq://127.0.0.1:1"], timeout=0.2) as cluster:
        world.insert("o-1", connection)
        cluster.enlist(connection, timeout=0.2).send(world.topic, b"o-1", key="k")
        with pytest.raises(BrokerUnavailable):  # whose partitions are unknown
            connection.commit()
    connection.commit()
    assert agreed(world) == set()


def test_nobody_goes_back_behind_the_token_row(world: World) -> None:
    tx = world.client.enlist(world.connection, hooks=True)
    world.insert("o-1")
    run(world.connection, "SAVEPOINT s")
    tx.send(world.topic, b"o-1")
    tx.before_commit()
    with pytest.raises(LocalProtocolError, match="would"):
        run(world.connection, "ROLLBACK TO s")
    run(world.connection, "COMMIT")
    tx.after_commit()
    tx.wait_published(PATIENCE_S)
    assert agreed(world) == {"o-1"}


def test_a_transaction_tells_what_it_will_send(world: World, connection: EnlistConnection) -> None:
    tx = world.client.enlist(connection)
    tx.send(world.topic, b"one", key="k", headers={"a": "b"})
    tx.send_many(world.topic, [b"two", b"three"], tags=["t", None])
    assert tx.pending() == [
        (world.topic, Message(b"one", "k", None, {"a": "b"})),
        (world.topic, Message(b"two", tag="t")),
        (world.topic, Message(b"three")),
    ]
    connection.rollback()


def test_a_connection_that_became_autocommit_sends_nothing(
    world: World, connection: EnlistConnection
) -> None:
    tx = world.client.enlist(connection)
    tx.send(world.topic, b"m")
    connection.autocommit = True
    with pytest.raises(TransactionEnded):
        connection.commit()
    assert world.messages() == set()


def test_none_is_no_connection(world: World) -> None:
    """Django's `connection.connection` is None until it is used."""
    nothing: Any = None
    for begin in (world.client.enlist, world.client.transaction):
        with pytest.raises(LocalProtocolError, match="None is no connection"):
            begin(nothing)


def test_a_pool_lends_no_messages_of_the_user_before(world: World) -> None:
    """Who has executed nothing has no transaction for the pool to roll back."""
    pool = SimpleConnectionPool(1, 1, world.dsn, connection_factory=EnlistConnection)
    connection = pool.getconn()
    tx = world.client.enlist(connection)
    tx.send(world.topic, b"o-1")
    assert connection.info.transaction_status == extensions.TRANSACTION_STATUS_INTRANS
    pool.putconn(connection)
    assert pool.getconn() is connection
    assert connection.info.transaction_status == extensions.TRANSACTION_STATUS_IDLE
    world.insert("o-2", connection)
    world.client.enlist(connection).send(world.topic, b"o-2")
    connection.commit()
    with pytest.raises(ClientClosed):
        tx.send(world.topic, b"o-1")
    pool.closeall()
    assert agreed(world) == {"o-2"}


def test_a_pipeline_that_came_later_is_refused_at_the_commit(world: World) -> None:
    with closing(txmq.psycopg.EnlistConnection.connect(world.dsn)) as connection:
        tx = world.client.enlist(connection)
        with connection.pipeline():
            connection.execute("INSERT INTO orders (id) VALUES ('o-1')")
            tx.send(world.topic, b"o-1")
            with pytest.raises(LocalProtocolError, match="pipeline"):
                connection.commit()
    assert agreed(world) == set()


def test_a_key_keeps_the_order_of_its_rows_whoever_is_confirmed_first(
    world: World, connection: EnlistConnection
) -> None:
    first = world.client.enlist(world.connection, hooks=True, check_after=60.0)
    world.insert("o-1")
    first.send(world.topic, b"o-1", key="k")
    first.before_commit()
    world.connection.commit()
    second = world.client.enlist(connection)
    world.insert("o-2", connection)
    second.send(world.topic, b"o-2", key="k")
    connection.commit()
    assert world.state(second.token) == "COMMITTED"  # it waits for the first
    first.after_commit()
    second.wait_published(PATIENCE_S)
    assert [found.body for found in world.stored()] == [b"o-1", b"o-2"]


@pytest.mark.parametrize("committed", [True, False])
def test_a_prepared_branch_decides_when_it_is_ended_elsewhere(
    world: World, connection: EnlistConnection, *, committed: bool
) -> None:
    connection.tpc_begin(f"enlist-{world.topic}")
    tx = world.client.enlist(connection, check_after=0.1)
    world.insert("o-1", connection)
    tx.send(world.topic, b"o-1")
    connection.tpc_prepare()
    connection.reset()  # as if this process had died: the branch stays
    assert world.state(tx.token) == "UNDECIDED"
    end = connection.tpc_commit if committed else connection.tpc_rollback
    end(f"enlist-{world.topic}")
    assert agreed(world) == ({"o-1"} if committed else set())


def test_a_transaction_that_is_over_takes_nothing_more(
    world: World, connection: EnlistConnection
) -> None:
    tx = world.client.enlist(connection)
    connection.commit()
    with pytest.raises(ClientClosed, match="enlist"):
        tx.send(world.topic, b"late")


def test_a_child_process_leaves_the_transaction_to_its_parent(
    world: World, connection: EnlistConnection
) -> None:
    tx = world.client.enlist(connection)
    world.insert("o-1", connection)
    tx.send(world.topic, b"o-1")
    child = os.fork()
    if not child:
        try:
            connection.commit()
        except LocalProtocolError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    connection.commit()
    tx.wait_published(PATIENCE_S)
    assert agreed(world) == {"o-1"}


def test_an_outbox_takes_the_messages_while_the_broker_is_away(
    world: World, connection: EnlistConnection, connect: Callable[..., Client]
) -> None:
    away = connect("txmq://127.0.0.1:1", timeout=0.2, log_id=world.client.log_id)
    world.insert("o-1", connection)
    away.enlist(connection, timeout=0.2).send(world.topic, b"o-1")
    with pytest.raises(BrokerUnavailable):
        connection.commit()
    connection.commit()
    assert agreed(world) == set()
    wait_until(lambda: fetches(world))
    world.insert("o-2", connection)
    away.enlist(connection, timeout=0.2, on_unavailable="outbox").send(world.topic, b"o-2")
    connection.commit()
    wait_until(lambda: world.messages() == {"o-2"})
    assert world.orders() == {"o-2"}


def fetches(world: World) -> bool:
    with closing(psycopg2.connect(world.dsn)) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT FROM txmq_broker WHERE log_id = %s", (str(world.client.log_id),))
        return bool(cursor.rowcount)


def test_each_broker_of_a_cluster_gets_its_messages(
    world: World, connection: EnlistConnection, also_deciding: RealBroker
) -> None:
    with txmq.connect([world.broker.url, also_deciding.url], service="orders") as cluster:
        tx = cluster.enlist(connection)
        world.insert("o-1", connection)
        keys = [str(number) for number in range(12)]
        for key in keys:
            cluster.enlist(connection).send(world.topic, key.encode(), key=key)
        connection.commit()
        tx.wait_published(PATIENCE_S)
        found = [
            {found.body.decode() for found in broker.read(world.topic)}
            for broker in (world.broker, also_deciding)
        ]
    assert all(found)
    assert sorted(found[0] | found[1]) == sorted(keys)


def test_an_ack_takes_effect_with_the_commit(world: World, connection: EnlistConnection) -> None:
    world.client.send(world.topic, b"in")
    consumer = world.client.consumer("enlisted", [world.topic], start="first")
    message = consumer.receive(timeout=PATIENCE_S)
    assert message is not None
    tx = world.client.enlist(connection)
    tx.ack(message)
    tx.send(world.topic, b"out")
    connection.commit()
    tx.wait_published(PATIENCE_S)
    following = consumer.receive(timeout=PATIENCE_S)
    assert following is not None
    assert following.body == b"out"
    consumer.close()


@pytest.mark.parametrize("committed", [True, False])
def test_a_consumer_that_dies_has_acked_what_it_has_committed(
    world: World, *, committed: bool
) -> None:
    group = f"dies-{world.topic}"
    world.client.send(world.topic, b"in")
    retry = txmq.RetryPolicy((0.01,))
    with world.client.consumer(group, [world.topic], retry=retry) as consumer:
        message = consumer.receive(timeout=PATIENCE_S)
        assert message is not None
        tx = world.client.enlist(world.connection, hooks=True, check_after=0.1)
        tx.ack(message)
        world.insert("o-1")
        tx.before_commit()
        if committed:
            world.connection.commit()
        else:
            world.connection.rollback()
        # Nobody says so: the process is gone.
    wait_until(world.settled)
    with world.client.consumer(group, [world.topic], retry=retry) as consumer:
        if committed:
            shown = world.client.call("group.show", group=group)
            assert (shown["unsettled"], shown["leased"], shown["retrying"]) == (0, 0, 0)
        else:
            again = consumer.receive(timeout=PATIENCE_S)
            assert again is not None
            consumer.ack(again)
    assert world.orders() == ({"o-1"} if committed else set())


@pytest.mark.parametrize("points", [CRASHPOINTS, BETWEEN_HOOKS], ids=["commit", "hooks"])
def test_a_service_killed_at_each_step_leaves_both_or_neither(
    world: World, points: dict[str, bool]
) -> None:
    world.client.call("topic.create", name=world.topic, partitions=1)
    hits = run_script(WORKERS, world.broker.url, world.dsn, world.topic, json.dumps(list(points)))
    assert int(hits) == len(points)
    assert agreed(world) == {point for point, committed in points.items() if committed}
