"""XA transactions over two databases and the broker: all or nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg2
import pytest
from psycopg2 import extensions

import txmq.twisted
from tests.client.ledgers import Ledgers
from tests.client.proxy import Proxy
from tests.client.reactor_thread import InReactor
from tests.client.real import RealBroker
from tests.client.scripted_member import fresh
from tests.client.world import ApplicationError, fail
from tests.tx.postgres.business_table import run
from txmq.client.blocking.client import Client
from txmq.client.blocking.transaction.broker_bundle import BrokerBundle
from txmq.errors import (
    BrokerUnavailable,
    ConfigError,
    DatabaseConflict,
    LocalProtocolError,
    TransactionAborted,
    TransactionEnded,
)
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.tx.xid import XaBranch, log_digits

Connect = Callable[..., Client]


def test_rows_in_both_databases_and_messages_exist_together(either: Ledgers) -> None:
    ledgers = either
    with ledgers.client.xa(*ledgers.connections) as tx:
        ledgers.write("o-1")
        tx.send(ledgers.topic, b"o-1", key="o-1")
        assert ledgers.messages() == set()
    assert ledgers.rows() == [{"o-1"}, {"o-1"}]
    tx.wait_published(PATIENCE_S)
    assert ledgers.agree("o-1")
    assert tx.unfinished == ()
    shown = ledgers.client.call("tx.show", token=tx.token.hex)
    assert (shown["state"], shown["by"]) == ("PUBLISHED", "producer orders")
    assert shown["decider"] == ["home", ledgers.client.log_id.hex, tx.token.hex]
    assert [one[0] for one in shown["participants"]] == ["postgres", "postgres"]
    for (_, _, _, database, owner, gid, xid, *_), connection in zip(
        shown["participants"], ledgers.connections, strict=True
    ):
        assert (database, owner) == (connection.info.dbname, connection.info.user)
        name = XaBranch.parse(gid)
        assert name is not None
        assert (name.node, name.token, name.log) == (
            "orders",
            tx.token,
            log_digits(ledgers.client.log_id),
        )
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_xact_status(%s::text::xid8)", (str(xid),))
            assert cursor.fetchone() == ("committed",)


def test_connections_serve_one_transaction_after_the_other_and_keep_their_settings(
    either: Ledgers,
) -> None:
    ledgers = either
    for connection in ledgers.connections:
        connection.set_session(isolation_level="REPEATABLE READ")
        run(connection, "SET lock_timeout = '7s'")
        connection.commit()
    for n in range(4):
        with ledgers.client.xa(*ledgers.connections) as tx:
            ledgers.write(f"o-{n}")
            tx.send(ledgers.topic, f"o-{n}".encode(), key="k")
    for connection in ledgers.connections:
        assert connection.status == extensions.STATUS_READY
        with connection, connection.cursor() as cursor:
            cursor.execute("SHOW lock_timeout; SHOW transaction_isolation")
            assert cursor.fetchone() == ("repeatable read",)
            cursor.execute("SHOW lock_timeout")
            assert cursor.fetchone() == ("7s",)
        assert connection.notices == []
    tx.wait_published(PATIENCE_S)
    assert ledgers.agree(*(f"o-{n}" for n in range(4)))


@pytest.mark.parametrize("how", ["autocommit", "begun before"])
def test_connections_in_another_state_take_part_as_well(ledgers: Ledgers, how: str) -> None:
    for connection in ledgers.connections:
        connection.autocommit = how == "autocommit"
        run(connection, "SELECT 1")
    tx = ledgers.begin("o-1")
    assert ledgers.rows() == [set(), set()]
    tx.__exit__(None, None, None)
    with suppress(ApplicationError), ledgers.client.xa(*ledgers.connections):
        ledgers.write("o-2")
        fail()
    tx.wait_published(PATIENCE_S)
    assert ledgers.agree("o-1")
    assert [connection.autocommit for connection in ledgers.connections] == [
        how == "autocommit"
    ] * 2


def test_a_block_that_raises_leaves_nothing(ledgers: Ledgers) -> None:
    with suppress(ApplicationError), ledgers.client.xa(*ledgers.connections) as tx:
        ledgers.write("o-1")
        tx.send(ledgers.topic, b"o-1")
        fail()
    assert ledgers.agree()
    ledgers.write("o-2")
    for connection in ledgers.connections:
        connection.commit()
    assert ledgers.rows() == [{"o-2"}, {"o-2"}]


def test_a_branch_cannot_be_ended_inside_the_block_by_mistake(ledgers: Ledgers) -> None:
    with ledgers.client.xa(*ledgers.connections):
        ledgers.write("o-1")
        for torn in (ledgers.last.commit, ledgers.last.rollback):
            with pytest.raises(psycopg2.ProgrammingError, match="two-phase"):
                torn()
    assert ledgers.rows() == [{"o-1"}, {"o-1"}]


def test_a_branch_committed_by_hand_in_the_block_is_reported_and_the_rest_rolled_back(
    ledgers: Ledgers,
) -> None:
    early = ledgers.last.cursor()  # its SQL is not read
    tx = ledgers.begin("o-1")
    early.execute("COMMIT")
    with pytest.raises(TransactionEnded, match="was ended inside its block"):
        tx.__exit__(None, None, None)
    assert (ledgers.rows(), ledgers.messages(), ledgers.prepared()) == ([set(), {"o-1"}], set(), [])


@pytest.mark.parametrize("number", [0, 1])
def test_a_swallowed_sql_error_rolls_everything_back(ledgers: Ledgers, number: int) -> None:
    tx = ledgers.begin("o-1")
    with suppress(psycopg2.Error):
        ledgers.write("o-1", ledgers.connections[number])
    with pytest.raises(TransactionAborted, match="failed earlier"):
        tx.__exit__(None, None, None)
    assert ledgers.agree()


def test_a_branch_that_cannot_be_prepared_rolls_the_others_back(either: Ledgers) -> None:
    ledgers = either
    tx = ledgers.begin("o-1")
    run(ledgers.last, "INSERT INTO lines VALUES ('no such order')")
    with pytest.raises(TransactionAborted, match="23503"):
        tx.__exit__(None, None, None)
    assert ledgers.state(tx) == "ROLLED_BACK"
    assert ledgers.agree()
    assert tx.unfinished == ()
    ledgers.begin("o-2").__exit__(None, None, None)
    assert ledgers.rows() == [{"o-2"}, {"o-2"}]


def test_a_serialization_conflict_may_be_tried_again(ledgers: Ledgers) -> None:
    ledgers.write("o-1")
    for connection in ledgers.connections:
        connection.commit()
    last = ledgers.last
    last.set_session(isolation_level="SERIALIZABLE")
    tx = ledgers.begin("o-2")
    run(last, "SELECT * FROM orders")
    with psycopg2.connect(ledgers.dsns[-1]) as rival:
        rival.set_session(isolation_level="SERIALIZABLE")
        run(rival, "SELECT * FROM orders; INSERT INTO orders VALUES ('o-3')")
        run(last, "SELECT * FROM orders")
    rival.close()
    with pytest.raises(DatabaseConflict) as caught:
        tx.__exit__(None, None, None)
    assert caught.value.retriable
    assert (ledgers.rows(), ledgers.prepared()) == ([{"o-1"}, {"o-1", "o-3"}], [])


def test_branches_that_only_read_or_do_nothing_are_not_prepared(ledgers: Ledgers) -> None:
    with psycopg2.connect(ledgers.dsns[0]) as third:
        with ledgers.client.xa(*ledgers.connections, third) as tx:
            run(ledgers.connections[0], "SELECT * FROM orders")
            ledgers.write("o-1", ledgers.last)
            tx.send(ledgers.topic, b"o-1")
        shown = ledgers.client.call("tx.show", token=tx.token.hex)
        assert [one[3] for one in shown["participants"]] == [ledgers.last.info.dbname]
        assert ledgers.rows() == [set(), {"o-1"}]
        assert {third.status, *(connection.status for connection in ledgers.connections)} == {
            extensions.STATUS_READY
        }
    third.close()


def test_messages_alone_are_a_transaction_too(ledgers: Ledgers) -> None:
    with ledgers.client.xa(*ledgers.connections) as tx:
        tx.send(ledgers.topic, b"lonely")
    tx.wait_published(PATIENCE_S)
    assert ledgers.messages() == {"lonely"}
    assert ledgers.rows() == [set(), set()]


def test_two_databases_without_messages_are_one_decision(ledgers: Ledgers) -> None:
    with ledgers.client.xa(*ledgers.connections) as tx:
        ledgers.write("o-1")
    tx.wait_published(PATIENCE_S)
    assert ledgers.rows() == [{"o-1"}, {"o-1"}]
    assert ledgers.state(tx) == "PUBLISHED"


def test_one_database_that_wrote_and_no_messages_are_a_plain_commit(ledgers: Ledgers) -> None:
    with ledgers.client.xa(*ledgers.connections) as tx:
        run(ledgers.connections[0], "SELECT * FROM orders")
        ledgers.write("o-1", ledgers.last)
    assert ledgers.rows() == [set(), {"o-1"}]
    assert ledgers.state(tx) == "UNKNOWN"
    with ledgers.client.xa(*ledgers.connections):
        pass
    tx = ledgers.client.xa(*ledgers.connections)
    tx.__enter__()
    ledgers.write("o-2", ledgers.last)
    run(ledgers.last, "INSERT INTO lines VALUES ('no such order')")
    with pytest.raises(TransactionAborted):
        tx.__exit__(None, None, None)
    assert ledgers.rows() == [set(), {"o-1"}]


def test_a_savepoint_withdraws_rows_everywhere_and_messages(ledgers: Ledgers) -> None:
    with ledgers.client.xa(*ledgers.connections) as tx:
        with tx.savepoint():
            ledgers.write("o-1")
            tx.send(ledgers.topic, b"o-1")
        with suppress(ApplicationError), tx.savepoint():
            ledgers.write("o-2")
            tx.send(ledgers.topic, b"o-2")
            fail()
        with suppress(psycopg2.Error), tx.savepoint():
            ledgers.write("o-3", ledgers.connections[0])
            ledgers.write("o-1", ledgers.last)
    tx.wait_published(PATIENCE_S)
    assert ledgers.agree("o-1")


def test_an_ack_is_part_of_it(ledgers: Ledgers) -> None:
    source, group = fresh("source"), fresh("g")
    ledgers.client.send(source, b"in")
    with ledgers.client.consumer(group, topics=[source]) as consumer:
        message = consumer.receive(PATIENCE_S)
        tx = ledgers.begin("o-1")
        tx.ack(message)
        tx.__exit__(None, None, None)
        tx.wait_published(PATIENCE_S)
    shown = ledgers.client.call("group.show", group=group)
    assert sum(position["unsettled"] for position in shown["positions"]) == 0


def test_a_second_broker_copies_the_decision(
    ledgers: Ledgers, also_deciding: RealBroker, connect: Connect
) -> None:
    there = connect(also_deciding.url)
    tx = ledgers.begin("o-1")
    tx.at(there).send(ledgers.topic, b"there", key="k")
    tx.__exit__(None, None, None)
    tx.wait_published(PATIENCE_S)
    assert ledgers.agree("o-1")
    assert [found.body for found in also_deciding.read(ledgers.topic)] == [b"there"]
    shown = ledgers.client.call("tx.show", token=tx.token.hex)
    assert shown["participants"][-1] == ["broker", there.log_id.hex]
    decider = there.call("tx.show", token=tx.token.hex)["decider"]
    assert decider == ["home", ledgers.client.log_id.hex, tx.token.hex]
    aborted = ledgers.begin("o-2")
    aborted.at(there).send(ledgers.topic, b"there, too", key="k")
    run(ledgers.last, "INSERT INTO lines VALUES ('no such order')")
    with pytest.raises(TransactionAborted):
        aborted.__exit__(None, None, None)
    args = {"token": aborted.token.hex}
    wait_until(lambda: there.call("tx.show", **args)["state"] == "ROLLED_BACK")
    assert ledgers.agree("o-1")


def test_the_messages_of_a_key_are_in_the_order_of_its_rows_at_every_broker(
    ledgers: Ledgers, also_deciding: RealBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, late = connect(also_deciding.url), []
    send_decision = BrokerBundle.send_decision
    with monkeypatch.context() as patched:
        patched.setattr(
            BrokerBundle, "send_decision", lambda bundle, outcome: late.append((bundle, outcome))
        )
        first = ledgers.begin("o-1")
        first.at(there).send(ledgers.topic, b"o-1", key="k")
        first.__exit__(None, None, None)
    second = ledgers.begin("o-2")
    second.at(there).send(ledgers.topic, b"o-2", key="k")
    second.__exit__(None, None, None)
    shown = {"token": second.token.hex}
    wait_until(lambda: there.call("tx.show", **shown)["state"] == "COMMITTED")
    assert also_deciding.read(ledgers.topic) == []
    for bundle, outcome in late:
        send_decision(bundle, outcome)
    second.wait_published(PATIENCE_S)
    assert [found.body for found in also_deciding.read(ledgers.topic)] == [b"o-1", b"o-2"]


def test_a_second_broker_that_is_gone_rolls_everything_back(
    ledgers: Ledgers, also_deciding: RealBroker, connect: Connect
) -> None:
    with Proxy(also_deciding.url) as proxy:
        there = connect(proxy.url, timeout=2.0)
        tx = ledgers.begin("o-1", timeout=2.0)
        tx.at(there).send(ledgers.topic, b"there")
        proxy.cut()
        with pytest.raises(BrokerUnavailable):
            tx.__exit__(None, None, None)
    assert (ledgers.rows(), ledgers.messages(), ledgers.prepared()) == ([set(), set()], set(), [])
    wait_until(lambda: not ledgers.undecided())


def test_what_makes_no_sense_is_refused(ledgers: Ledgers) -> None:
    first, last = ledgers.connections
    with pytest.raises(LocalProtocolError, match="one twice"):
        ledgers.client.xa(first, last, first)
    with pytest.raises(LocalProtocolError, match="got 0 connections"):
        ledgers.client.xa()
    with pytest.raises(LocalProtocolError, match="psycopg2"):
        ledgers.client.xa(first, "no connection").__enter__()  # type: ignore[arg-type]
    with pytest.raises(LocalProtocolError, match="node"):
        ledgers.client.xa(first, last, node="a node with spaces").__enter__()
    with pytest.raises(ConfigError, match="no option 'tiemout'"):
        ledgers.client.xa(first, last, tiemout=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="seconds"):
        ledgers.client.xa(first, last, timeout=0)
    assert {first.status, last.status} == {extensions.STATUS_READY}


def test_the_node_is_the_services_name_or_the_given_one(ledgers: Ledgers, connect: Connect) -> None:
    nobody = connect(ledgers.broker.url, service=None)
    begun = (
        nobody.xa(*ledgers.connections),
        ledgers.client.xa(*ledgers.connections, node="shop-7"),
    )
    for tx, node in zip(begun, ("txmq", "shop-7"), strict=True):
        with tx:
            ledgers.write(node)
        shown = ledgers.client.call("tx.show", token=tx.token.hex)
        name = XaBranch.parse(shown["participants"][0][5])
        assert name is not None
        assert name.node == node


def test_the_twisted_face_has_it_too(ledgers: Ledgers, reactor: Any, in_reactor: InReactor) -> None:
    client = txmq.twisted.connect(reactor, ledgers.broker.url, service="orders", timeout=PATIENCE_S)

    async def story() -> None:
        async with client.xa(*ledgers.connections) as tx:
            await tx.run(ledgers.write, "o-1")
            tx.send(ledgers.topic, b"o-1")
        await tx.wait_published(PATIENCE_S)
        assert tx.unfinished == ()
        await client.close()

    in_reactor(story)
    assert ledgers.agree("o-1")
