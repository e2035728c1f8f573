"""One transaction over two databases and the broker: rows in both and messages, or nothing anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg2
import pytest
from psycopg2 import extensions

import txmq.twisted
from tests.client.consuming import fresh
from tests.client.fake import FakeBroker
from tests.client.ledgers import DEADLINE_S, Ledgers, asked, run
from tests.client.proxy import Proxy
from tests.client.real import RealBroker
from tests.client.telling import WAIT_S, Tell
from tests.client.world import Broken, fail
from txmq.client import branch, home, xa
from txmq.client.blocking import Client
from txmq.client.permits import Wanted, permits
from txmq.client.share import Share
from txmq.errors import (
    BrokerUnavailable,
    ConfigError,
    DatabaseConflict,
    DatabaseUnavailable,
    HeuristicMixed,
    InDoubt,
    LocalProtocolError,
    TransactionAborted,
    TwoPhaseFull,
    TwoPhaseOff,
)
from txmq.testing.postgres import OwnServer, PostgresServer
from txmq.testing.wait import wait_until
from txmq.tx.postgres.identity import Server, server_of
from txmq.tx.postgres.prepared import prepare
from txmq.tx.xid import Branch
from txmq.wire.headers import Opcode

Connect = Callable[..., Client]
DIES_IN_PREPARE = """
CREATE OR REPLACE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER dies AFTER INSERT ON lines DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION die()
"""


@pytest.fixture(scope="module")
def two_servers(postgres: PostgresServer, crashable_postgres: OwnServer) -> Iterator[list[str]]:
    """The DSNs of two databases."""
    with made(postgres, crashable_postgres) as dsns:
        yield dsns


@pytest.fixture(scope="module")
def one_server(postgres: PostgresServer) -> Iterator[list[str]]:
    """The DSNs of two databases."""
    with made(postgres, postgres) as dsns:
        yield dsns


@contextmanager
def made(*servers: PostgresServer) -> Iterator[list[str]]:
    """A database on each of the servers, for the length of the block."""
    names = [server.create_database() for server in servers]
    yield [server.dsn(name) for server, name in zip(servers, names, strict=True)]
    for server, name in zip(servers, names, strict=True):
        server.drop_database(name)


@contextmanager
def opened(dsns: list[str], broker: RealBroker, client: Client) -> Iterator[Ledgers]:
    ledgers = Ledgers(dsns, broker, client)
    ledgers.reset()
    yield ledgers
    ledgers.recover()
    ledgers.close()


@pytest.fixture
def ledgers(two_servers: list[str], shared_broker: RealBroker, connect: Connect) -> Iterator[Ledgers]:
    """Databases of two servers."""
    with opened(two_servers, shared_broker, connect(shared_broker.url)) as ledgers:
        yield ledgers


@pytest.fixture(params=["one_server", "two_servers"])
def either(request: pytest.FixtureRequest, shared_broker: RealBroker, connect: Connect) -> Iterator[Ledgers]:
    """Databases of one server, then of two."""
    with opened(request.getfixturevalue(request.param), shared_broker, connect(shared_broker.url)) as ledgers:
        yield ledgers


def before_the_decision(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Something happens when all have voted."""

    def asked(*args: Any) -> home.Verdict:
        happens()
        return home.ask(*args)

    monkeypatch.setattr(xa, "ask", asked)


def after_the_decision(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Something happens when it is decided, before the branches know."""

    def asked(*args: Any) -> home.Verdict:
        verdict = home.ask(*args)
        happens()
        return verdict

    monkeypatch.setattr(xa, "ask", asked)


def test_rows_in_both_databases_and_messages_exist_together(either: Ledgers) -> None:
    ledgers = either
    with ledgers.client.xa(*ledgers.connections) as tx:
        ledgers.write("o-1")
        tx.send(ledgers.topic, b"o-1", key="o-1")
        assert ledgers.messages() == set()
    assert ledgers.rows() == [{"o-1"}, {"o-1"}]
    tx.wait_published()
    assert ledgers.agree("o-1")
    assert tx.unfinished == ()
    shown = ledgers.client.call("tx.show", token=tx.token.hex)
    assert (shown["state"], shown["by"]) == ("PUBLISHED", "producer orders")
    assert shown["decider"] == ["home", ledgers.client.log_id.hex, tx.token.hex]
    assert [one[0] for one in shown["participants"]] == ["postgres", "postgres"]
    for (_, _, _, database, owner, gid, xid), connection in zip(
        shown["participants"], ledgers.connections, strict=True
    ):
        assert (database, owner) == (connection.info.dbname, connection.info.user)
        name = Branch.parse(gid)
        assert name is not None
        assert (name.node, name.token, name.is_of(ledgers.client.log_id)) == ("orders", tx.token, True)
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_xact_status(%s::text::xid8)", (str(xid),))
            assert cursor.fetchone() == ("committed",)


def test_connections_serve_one_transaction_after_the_other_and_keep_their_settings(either: Ledgers) -> None:
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
    tx.wait_published()
    assert ledgers.agree(*(f"o-{n}" for n in range(4)))


@pytest.mark.parametrize("how", ["autocommit", "begun before"])
def test_connections_in_another_state_take_part_as_well(ledgers: Ledgers, how: str) -> None:
    for connection in ledgers.connections:
        connection.autocommit = how == "autocommit"
        run(connection, "SELECT 1")
    tx = ledgers.begin("o-1")
    assert ledgers.rows() == [set(), set()]
    tx.__exit__(None, None, None)
    with suppress(Broken), ledgers.client.xa(*ledgers.connections):
        ledgers.write("o-2")
        fail()
    tx.wait_published()
    assert ledgers.agree("o-1")
    assert [connection.autocommit for connection in ledgers.connections] == [how == "autocommit"] * 2


def test_a_block_that_raises_leaves_nothing(ledgers: Ledgers) -> None:
    with suppress(Broken), ledgers.client.xa(*ledgers.connections) as tx:
        ledgers.write("o-1")
        tx.send(ledgers.topic, b"o-1")
        fail()
    assert ledgers.agree()
    ledgers.write("o-2")
    for connection in ledgers.connections:
        connection.commit()
    assert ledgers.rows() == [{"o-2"}, {"o-2"}]


def test_nobody_can_tear_a_branch_out_by_mistake(ledgers: Ledgers) -> None:
    with ledgers.client.xa(*ledgers.connections):
        ledgers.write("o-1")
        for torn in (ledgers.last.commit, ledgers.last.rollback):
            with pytest.raises(psycopg2.ProgrammingError, match="two-phase"):
                torn()
    assert ledgers.rows() == [{"o-1"}, {"o-1"}]


def test_what_somebody_committed_by_hand_in_the_block_is_in_doubt_and_the_rest_rolled_back(ledgers: Ledgers) -> None:
    tx = ledgers.begin("o-1")
    run(ledgers.last, "COMMIT")
    with pytest.raises(InDoubt, match="somebody ended branch 2"):
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


def test_a_branch_that_cannot_be_prepared_takes_the_others_back(either: Ledgers) -> None:
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
        assert {third.status, *(connection.status for connection in ledgers.connections)} == {extensions.STATUS_READY}
    third.close()


def test_messages_alone_are_a_transaction_too(ledgers: Ledgers) -> None:
    with ledgers.client.xa(*ledgers.connections) as tx:
        tx.send(ledgers.topic, b"lonely")
    tx.wait_published()
    assert ledgers.messages() == {"lonely"}
    assert ledgers.rows() == [set(), set()]


def test_two_databases_without_messages_are_one_decision(ledgers: Ledgers) -> None:
    with ledgers.client.xa(*ledgers.connections) as tx:
        ledgers.write("o-1")
    tx.wait_published()
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


def test_a_savepoint_takes_back_rows_everywhere_and_messages(ledgers: Ledgers) -> None:
    with ledgers.client.xa(*ledgers.connections) as tx:
        with tx.savepoint():
            ledgers.write("o-1")
            tx.send(ledgers.topic, b"o-1")
        with suppress(Broken), tx.savepoint():
            ledgers.write("o-2")
            tx.send(ledgers.topic, b"o-2")
            fail()
        with suppress(psycopg2.Error), tx.savepoint():
            ledgers.write("o-3", ledgers.connections[0])
            ledgers.write("o-1", ledgers.last)
    tx.wait_published()
    assert ledgers.agree("o-1")


def test_an_ack_is_part_of_it(ledgers: Ledgers) -> None:
    source, group = fresh("source"), fresh("g")
    ledgers.client.send(source, b"in")
    with ledgers.client.consumer(group, topics=[source]) as consumer:
        message = consumer.receive(DEADLINE_S)
        tx = ledgers.begin("o-1")
        tx.ack(message)
        tx.__exit__(None, None, None)
        tx.wait_published()
    shown = ledgers.client.call("group.show", group=group)
    assert sum(position["lag"] for position in shown["positions"]) == 0


def test_a_broker_that_is_gone_stops_it_before_anything_is_prepared(
    ledgers: Ledgers, fake: FakeBroker, connect: Connect
) -> None:
    url = fake.url
    tx = ledgers.begin("o-1", connect(url), timeout=0.3)
    fake.close()
    with pytest.raises(BrokerUnavailable) as caught:
        tx.__exit__(None, None, None)
    assert (caught.value.outcome, caught.value.retriable) == ("not done", True)
    assert (ledgers.rows(), ledgers.prepared()) == ([set(), set()], [])
    with pytest.raises(BrokerUnavailable):
        connect(url, timeout=0.3).xa(*ledgers.connections).__enter__()


def test_a_group_that_is_not_confirmed_rolls_back_what_is_prepared(ledgers: Ledgers, connect: Connect) -> None:
    with Proxy(ledgers.broker.url) as proxy:
        client = connect(proxy.url)
        client.send(ledgers.topic, b"first")
        proxy.hold.add(Opcode.GROUP)
        tx = ledgers.begin("o-1", client, timeout=0.3)
        with pytest.raises(BrokerUnavailable, match="rolled back") as caught:
            tx.__exit__(None, None, None)
        assert caught.value.outcome == "not done"
    assert ledgers.state(tx) == "ROLLED_BACK"
    assert (ledgers.rows(), ledgers.messages(), ledgers.prepared()) == ([set(), set()], {"first"}, [])


@pytest.mark.parametrize("lost", [Opcode.GROUP, Opcode.DECIDE])
def test_a_lost_answer_changes_nothing(ledgers: Ledgers, connect: Connect, lost: Opcode) -> None:
    with Proxy(ledgers.broker.url) as proxy:
        client = connect(proxy.url)
        tx = ledgers.begin("o-1", client)
        proxy.lose[lost] = 1
        tx.__exit__(None, None, None)
        tx.wait_published()
    assert ledgers.agree("o-1")


def test_without_an_answer_to_the_decision_nothing_is_touched(either: Ledgers, connect: Connect) -> None:
    ledgers = either
    with Proxy(ledgers.broker.url) as proxy:
        client = connect(proxy.url, timeout=0.5)
        client.send(ledgers.topic, b"first")
        proxy.hold |= {Opcode.DECIDE, Opcode.CALL}
        tx = ledgers.begin("o-1", client)
        with pytest.raises(InDoubt) as caught:
            tx.__exit__(None, None, None)
    assert caught.value.token == str(tx.token)
    assert sorted(tx.unfinished) == sorted(ledgers.prepared())
    assert len(tx.unfinished) == 2
    ledgers.write("o-2")  # the connections are free
    for connection in ledgers.connections:
        connection.commit()
    ledgers.recover()
    ledgers.await_published("first", "o-1")
    assert ledgers.rows() == [{"o-1", "o-2"}, {"o-1", "o-2"}]


def test_without_an_answer_to_the_rollback_what_is_prepared_stays(
    ledgers: Ledgers, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy(ledgers.broker.url) as proxy:
        client = connect(proxy.url, timeout=0.5)
        client.send(ledgers.topic, b"first")
        tx = ledgers.begin("o-1", client)
        run(ledgers.last, "INSERT INTO lines VALUES ('no such order')")
        before_the_decision(monkeypatch, lambda: proxy.hold.add(Opcode.CALL))
        with pytest.raises(InDoubt):
            tx.__exit__(None, None, None)
    assert list(tx.unfinished) == ledgers.prepared()
    assert len(tx.unfinished) == 1
    ledgers.recover()
    assert (ledgers.rows(), ledgers.messages(), ledgers.prepared()) == ([set(), set()], {"first"}, [])


def test_a_home_broker_that_was_killed_is_asked_again(
    ledgers: Ledgers, own_broker: RealBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed() -> None:
        own_broker.kill()
        own_broker.start()

    client = connect(own_broker.url, timeout=DEADLINE_S)
    before_the_decision(monkeypatch, killed)
    tx = ledgers.begin("o-1", client)
    tx.__exit__(None, None, None)
    tx.wait_published(DEADLINE_S)
    assert ledgers.rows() == [{"o-1"}, {"o-1"}]
    assert [found.body for found in own_broker.read(ledgers.topic)] == [b"o-1"]


def test_a_rollback_that_somebody_was_quicker_with_is_followed(
    ledgers: Ledgers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tx = ledgers.begin("o-1")
    decided = {"token": tx.token.hex, "outcome": "ROLLBACK", "operator": "me", "reason": "it hangs"}
    before_the_decision(monkeypatch, lambda: ledgers.client.call("tx.decide", **decided))
    with pytest.raises(TransactionAborted, match="home broker"):
        tx.__exit__(None, None, None)
    assert ledgers.agree()


def test_a_commit_that_somebody_was_quicker_with_is_followed_too_and_what_cannot_follow_is_told(
    ledgers: Ledgers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tx = ledgers.begin("o-1")
    run(ledgers.last, "INSERT INTO lines VALUES ('no such order')")
    decided = {"token": tx.token.hex, "outcome": "COMMIT", "operator": "me", "reason": "a mistake"}
    before_the_decision(monkeypatch, lambda: ledgers.client.call("tx.decide", **decided))
    with pytest.raises(HeuristicMixed) as caught:
        tx.__exit__(None, None, None)
    assert (caught.value.decision, len(caught.value.branches)) == ("COMMIT", 1)
    assert ledgers.rows() == [{"o-1"}, set()]
    assert ledgers.prepared() == []


def test_a_database_that_is_lost_after_the_decision_is_left_to_recovery(
    either: Ledgers, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledgers = either
    after_the_decision(monkeypatch, lambda: ledgers.cut(1))
    tx = ledgers.begin("o-1")
    tx.__exit__(None, None, None)
    assert ledgers.rows() == [{"o-1"}, set()]
    assert list(tx.unfinished) == ledgers.prepared()
    tx.wait_published()
    ledgers.recover()
    assert ledgers.agree("o-1")


def test_a_connection_that_is_lost_in_prepare_rolls_everything_back(
    ledgers: Ledgers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(connection: Any, name: Branch) -> None:
        prepare(connection, name)
        if name.number == 2:
            raise InDoubt("the connection broke", token=str(name.token))

    monkeypatch.setattr(branch, "prepare", lost)
    tx = ledgers.begin("o-1")
    with pytest.raises(TransactionAborted, match="the connection broke; the transaction was rolled back"):
        tx.__exit__(None, None, None)
    assert ledgers.agree()


def test_a_backend_that_dies_in_prepare_rolls_everything_back(ledgers: Ledgers) -> None:
    asked(ledgers.dsns[1], DIES_IN_PREPARE)
    tx = ledgers.begin("o-1")
    run(ledgers.last, "INSERT INTO lines VALUES ('o-1')")
    with pytest.raises(TransactionAborted, match="sent and not answered; the transaction was rolled back"):
        tx.__exit__(None, None, None)
    assert [name.number for name in map(Branch.parse, tx.unfinished) if name is not None] == [2]
    assert ledgers.agree()


def test_a_connection_that_is_lost_before_prepare_rolls_everything_back(ledgers: Ledgers) -> None:
    tx = ledgers.begin("o-1")
    ledgers.cut(1)
    with pytest.raises(DatabaseUnavailable):
        tx.__exit__(None, None, None)
    assert ledgers.agree()


def test_a_branch_that_a_hand_rolled_back_is_told_and_journalled(
    ledgers: Ledgers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tx = ledgers.begin("o-1")
    gid = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"

    def by_hand() -> None:
        [(found,)] = asked(ledgers.dsns[1], gid)
        asked(ledgers.dsns[1], f"ROLLBACK PREPARED '{found}'")

    after_the_decision(monkeypatch, by_hand)
    with pytest.raises(HeuristicMixed) as caught:
        tx.__exit__(None, None, None)
    assert (caught.value.decision, caught.value.outcome) == ("COMMIT", "unknown")
    assert ledgers.rows() == [{"o-1"}, set()]
    found = ledgers.client.call("xa.list", heuristic=True, owner="orders")["transactions"]
    [entry] = [one for row in found if row["token"] == tx.token.hex for one in row["heuristics"]]
    assert (entry["branch"], entry["decided"], entry["found"]) == (*caught.value.branches, "COMMIT", "rolled back")
    assert entry["operator"] == "orders"


def test_a_branch_that_recovery_was_quicker_with_is_done(ledgers: Ledgers, monkeypatch: pytest.MonkeyPatch) -> None:
    after_the_decision(monkeypatch, ledgers.recover)
    tx = ledgers.begin("o-1")
    tx.__exit__(None, None, None)
    tx.wait_published()
    assert ledgers.agree("o-1")
    assert tx.unfinished == ()


def test_an_interrupt_while_branches_are_prepared_rolls_back(ledgers: Ledgers, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(connection: Any, name: Branch) -> None:
        prepare(connection, name)
        if name.number == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(branch, "prepare", interrupted)
    tx = ledgers.begin("o-1")
    with pytest.raises(KeyboardInterrupt):
        tx.__exit__(None, None, None)
    assert ledgers.state(tx) == "ROLLED_BACK"
    assert ledgers.agree()


def test_a_server_that_prepares_nothing_is_refused_at_the_beginning(
    ledgers: Ledgers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def switched_off(connection: Any) -> Server:
        return server_of(connection)._replace(max_prepared_transactions=64 * (connection is not ledgers.last))

    monkeypatch.setattr(branch, "server_of", switched_off)
    with pytest.raises(TwoPhaseOff, match="max_prepared_transactions"):
        ledgers.client.xa(*ledgers.connections).__enter__()
    ledgers.write("o-1")
    for connection in ledgers.connections:
        connection.commit()


def test_a_server_without_a_place_for_one_more_rolls_everything_back(
    ledgers: Ledgers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(connection: Any, name: Branch) -> None:
        if name.number == 2:
            connection.tpc_rollback()
            raise TwoPhaseFull("53200")
        prepare(connection, name)

    monkeypatch.setattr(branch, "prepare", full)
    tx = ledgers.begin("o-1")
    with pytest.raises(TwoPhaseFull):
        tx.__exit__(None, None, None)
    assert ledgers.agree()


def test_who_finds_all_places_taken_waits_for_one_and_is_rolled_back_in_the_end(ledgers: Ledgers) -> None:
    tx = ledgers.begin("o-1", timeout=0.2)
    for one in tx._branches:
        one.look()
    places = {server: Wanted(room, room) for server, (_, room) in tx._places().items()}
    with permits().held(places, 0.0), pytest.raises(TwoPhaseFull, match="room"):
        tx.__exit__(None, None, None)
    assert ledgers.agree()
    ledgers.begin("o-2").__exit__(None, None, None)
    ledgers.await_published("o-2")
    assert ledgers.agree("o-2")


def test_a_second_broker_copies_the_decision(ledgers: Ledgers, also_deciding: RealBroker, connect: Connect) -> None:
    there = connect(also_deciding.url)
    tx = ledgers.begin("o-1")
    tx.at(there).send(ledgers.topic, b"there", key="k")
    tx.__exit__(None, None, None)
    tx.wait_published()
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
    told = {"token": aborted.token.hex}
    wait_until(lambda: there.call("tx.show", **told)["state"] == "ROLLED_BACK", DEADLINE_S)
    assert ledgers.agree("o-1")


def test_the_messages_of_a_key_are_in_the_order_of_its_rows_at_every_broker(
    ledgers: Ledgers, also_deciding: RealBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, late = connect(also_deciding.url), []
    tell = Share.tell
    with monkeypatch.context() as patched:
        patched.setattr(Share, "tell", lambda share, outcome: late.append((share, outcome)))
        first = ledgers.begin("o-1")
        first.at(there).send(ledgers.topic, b"o-1", key="k")
        first.__exit__(None, None, None)
    second = ledgers.begin("o-2")
    second.at(there).send(ledgers.topic, b"o-2", key="k")
    second.__exit__(None, None, None)
    shown = {"token": second.token.hex}
    wait_until(lambda: there.call("tx.show", **shown)["state"] == "COMMITTED", DEADLINE_S)
    assert also_deciding.read(ledgers.topic) == []
    for share, outcome in late:
        tell(share, outcome)
    second.wait_published(DEADLINE_S)
    assert [found.body for found in also_deciding.read(ledgers.topic)] == [b"o-1", b"o-2"]


def test_a_second_broker_that_is_gone_rolls_everything_back(
    ledgers: Ledgers, also_deciding: RealBroker, connect: Connect
) -> None:
    with Proxy(also_deciding.url) as proxy:
        there = connect(proxy.url, timeout=0.5)
        tx = ledgers.begin("o-1", timeout=0.5)
        tx.at(there).send(ledgers.topic, b"there")
        proxy.cut()
        with pytest.raises(BrokerUnavailable):
            tx.__exit__(None, None, None)
    assert (ledgers.rows(), ledgers.messages(), ledgers.prepared()) == ([set(), set()], set(), [])
    wait_until(lambda: not ledgers.undecided(), DEADLINE_S)


def test_what_makes_no_sense_is_refused(ledgers: Ledgers) -> None:
    first, last = ledgers.connections
    with pytest.raises(LocalProtocolError, match="each of them once"):
        ledgers.client.xa(first, last, first)
    with pytest.raises(LocalProtocolError, match="has connections"):
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


def test_the_node_is_the_services_or_as_it_is_told(ledgers: Ledgers, connect: Connect) -> None:
    nobody = connect(ledgers.broker.url, service=None)
    begun = (nobody.xa(*ledgers.connections), ledgers.client.xa(*ledgers.connections, node="shop-7"))
    for tx, node in zip(begun, ("txmq", "shop-7"), strict=True):
        with tx:
            ledgers.write(node)
        shown = ledgers.client.call("tx.show", token=tx.token.hex)
        name = Branch.parse(shown["participants"][0][5])
        assert name is not None
        assert name.node == node


def test_the_twisted_face_has_it_too(ledgers: Ledgers, reactor: Any, tell: Tell) -> None:
    client = txmq.twisted.connect(reactor, ledgers.broker.url, service="orders", timeout=WAIT_S)

    async def story() -> None:
        async with client.xa(*ledgers.connections) as tx:
            await tx.run(ledgers.write, "o-1")
            tx.send(ledgers.topic, b"o-1")
        await tx.wait_published()
        assert tx.unfinished == ()
        await client.close()

    tell(story)
    assert ledgers.agree("o-1")
