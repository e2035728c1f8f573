"""Inboxes whose topic, broker or database is another one than before."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Literal

import pytest

import txmq
from tests.client.blocking.test_inbox_resets import all_taken, consumer_of, run, running, send
from tests.client.effects import effects, have_come, take_effect, with_effects
from tests.client.real import RealBroker
from tests.client.real_consumers import drain, is_drained, run_until, shown
from tests.client.scripted_member import fresh
from txmq.client.blocking.client import Client
from txmq.client.protocol import conversation
from txmq.errors import InboxMismatch
from txmq.model.message import Message, ReceivedMessage
from txmq.model.retry import RetryPolicy
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.tx.postgres.session import Connection

Connect = Callable[[], Connection]
RESTORED = "DELETE FROM effects; TRUNCATE txmq_inbox, txmq_inbox_recent;"


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealBroker]]:
    brokers = [RealBroker(tmp_path_factory.mktemp(f"broker-{number}")) for number in range(2)]
    yield brokers
    for broker in brokers:
        broker.stop()


@pytest.fixture
def clients(brokers: list[RealBroker]) -> Iterator[list[Client]]:
    first, second = (
        txmq.connect(broker.url, service="tests", timeout=PATIENCE_S) for broker in brokers
    )
    with first, second:
        yield [first, second]


@pytest.fixture
def client(clients: list[Client]) -> Client:
    return clients[0]


@pytest.fixture
def connect(database: str) -> Connect:
    return with_effects(database)


def execute(connect: Connect, statements: str) -> None:
    with closing(connect()) as connection, connection, connection.cursor() as cursor:
        cursor.execute(statements)


def make(client: Client, topic: str) -> None:
    client.call("topic.create", name=topic, partitions=1)


def forget_acks(client: Client, group: str, topic: str, connect: Connect, count: int) -> None:
    """Have so many messages take effect, and lose all acks but the first."""
    with consumer_of(client, group, topic) as consumer:
        members = consumer._members
        ack_many = members.ack_many

        def first_only(messages: Iterable[ReceivedMessage]) -> None:
            ack_many(message for message in messages if message.offset == 0)

        members.ack_many = first_only  # type: ignore[method-assign]
        run_until(consumer, take_effect, have_come(connect, count), inbox=connect)
        assert consumer.stats.delivered == count


def test_messages_of_a_topic_that_is_made_again_take_effect(
    client: Client, connect: Connect
) -> None:
    topic, group = fresh("t"), fresh("g")
    make(client, topic)
    send(client, topic, "a", "b")
    run(client, connect, group, topic, count=2)
    client.call("topic.delete", name=topic)
    make(client, topic)
    send(client, topic, "c", "d", "e")
    run(client, connect, group, topic, count=5)
    assert effects(connect) == ["a", "b", "c", "d", "e"]


def test_messages_of_a_broker_with_another_log_take_effect(
    clients: list[Client], connect: Connect
) -> None:
    topic, group = fresh("t"), fresh("g")
    for number, client in enumerate(clients):
        make(client, topic)
        send(client, topic, f"a{number}", f"b{number}")
        run(client, connect, group, topic, count=2 * number + 2)
    assert effects(connect) == ["a0", "a1", "b0", "b1"]


def test_a_consumer_that_comes_back_with_two_brokers_doubles_nothing(
    brokers: list[RealBroker], clients: list[Client], connect: Connect
) -> None:
    topic, group = fresh("t"), fresh("g")
    for number, client in enumerate(clients):
        make(client, topic)
        send(client, topic, f"a{number}", f"b{number}")
    forget_acks(clients[0], group, topic, connect, 2)
    urls = [broker.url for broker in brokers]
    with (
        txmq.connect(urls, service="tests", timeout=PATIENCE_S) as cluster,
        cluster.consumer(group, [topic], retry=RetryPolicy((0,), retries=50)) as consumer,
    ):
        run_until(
            consumer,
            take_effect,
            lambda: all(is_drained(shown(client, group)) for client in clients),
            inbox=connect,
        )
        assert consumer.stats.duplicates == 1
    assert effects(connect) == ["a0", "a1", "b0", "b1"]


@pytest.mark.parametrize("mode", ["concurrent", "ordered"])
def test_a_database_restored_to_before_the_first_row_gets_its_messages_again(
    client: Client, connect: Connect, mode: Literal["concurrent", "ordered"]
) -> None:
    topic, group = fresh("t"), fresh("g")
    make(client, topic)
    send(client, topic, "a", "b", "c")

    def consume() -> None:
        with client.consumer(group, [topic], mode=mode) as consumer:
            drain(client, consumer, take_effect, have_come(connect, 3), inbox=connect)

    consume()
    execute(connect, RESTORED)
    consume()
    assert effects(connect) == ["a", "b", "c"]
    assert client.call("group.show", group=group)["unsettled"] == 0


def test_a_database_restored_beside_an_idle_consumer_gets_its_messages_again(
    client: Client, connect: Connect
) -> None:
    """Also those whose neighbours were committed before."""
    topic, group = fresh("t"), fresh("g")
    make(client, topic)
    with running(client, connect, group, topic):
        send(client, topic, "a", "b", "c")
        all_taken(connect, ["a", "b", "c"])
        wait_until(
            lambda: client.call("group.show", group=group)["unsettled"] == 0, what="all acked"
        )
        execute(
            connect,
            "DELETE FROM effects WHERE body = 'b';"
            """DELETE FROM txmq_inbox_recent WHERE "offset" = 1;"""
            "UPDATE txmq_inbox SET applied = applied - '{[1,2)}';"
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()",
        )
        all_taken(connect, ["a", "b", "c"])


def test_a_restored_database_gets_also_what_is_below_a_later_reprocess(
    client: Client, connect: Connect
) -> None:
    topic, group = fresh("t"), fresh("g")
    make(client, topic)
    send(client, topic, "a", "b", "c", "d", "e")
    run(client, connect, group, topic, count=5)
    for offset, count in ((3, 7), (2, 10), (4, 11)):
        client.call("group.reset", group=group, topic=topic, to={"0": offset}, reprocess=True)
        run(client, connect, group, topic, count=count)
    execute(connect, RESTORED)
    run(client, connect, group, topic, count=5)
    assert effects(connect) == ["a", "b", "c", "d", "e"]
    for count, body in enumerate("fg", 6):
        send(client, topic, body)
        run(client, connect, group, topic, count=count)
    client.call("group.reset", group=group, topic=topic, to="first")
    send(client, topic, "h")
    run(client, connect, group, topic, count=8)
    assert effects(connect) == ["a", "b", "c", "d", "e", "f", "g", "h"]


def test_an_inbox_ahead_of_a_restored_log_is_refused_instead_of_losing_messages(
    client: Client, connect: Connect
) -> None:
    topic, group = fresh("t"), fresh("g")
    make(client, topic)
    send(client, topic, "a")
    run(client, connect, group, topic, count=1)
    execute(connect, "UPDATE txmq_inbox SET applied = '{[0,9)}'")
    send(client, topic, "b")
    with pytest.raises(InboxMismatch, match="restored to the past"):
        run(client, connect, group, topic, count=2)
    client.call("group.reset", group=group, topic=topic, to="last", reprocess=True)
    send(client, topic, "c")
    run(client, connect, group, topic, count=2)
    assert effects(connect) == ["a", "c"]


@pytest.mark.parametrize("tags", [None, ["new"]])
def test_an_inbox_of_a_restored_log_that_has_outgrown_it_is_refused(
    tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch, tags: list[str] | None
) -> None:
    """Whatever was sent since, and over more restarts of the original."""
    topic, group = fresh("t"), fresh("g")
    broker = RealBroker(tmp_path / "broker")
    data, backup = tmp_path / "broker" / "data", tmp_path / "backup"

    def client() -> Client:
        # As in a new process, which has met no boot epoch.
        monkeypatch.setattr(conversation, "_newest_epochs", {})
        return txmq.connect(broker.url, service="tests", timeout=PATIENCE_S)

    def consume(*bodies: str) -> None:
        with client() as here, here.consumer(group, [topic], tags=tags) as consumer:
            here.send_batch(topic, [Message(body.encode(), "k", tag="new") for body in bodies])
            drain(here, consumer, take_effect, inbox=connect)

    with client() as first:
        make(first, topic)
    consume("a")
    broker.stop()
    shutil.copytree(data, backup)
    broker.start()
    consume("b", "c")
    broker.kill()
    shutil.rmtree(data)
    backup.rename(data)
    broker.start()
    with pytest.raises(InboxMismatch, match=r"restored to the past.* --to 0=1 --reprocess"):
        consume("d", "e", "f", "g")
    with client() as operator:
        operator.call("group.reset", group=group, topic=topic, to={"0": 1}, reprocess=True)
    consume("h")
    broker.stop()
    assert effects(connect) == ["a", "b", "c", "d", "e", "f", "g", "h"]


def test_a_running_member_is_refused_by_a_backup_in_the_same_boot_epoch(
    tmp_path: Path, connect: Connect
) -> None:
    topic, group = fresh("t"), fresh("g")
    broker = RealBroker(tmp_path / "broker")
    data, backup = tmp_path / "broker" / "data", tmp_path / "backup"
    with txmq.connect(broker.url, service="tests", timeout=PATIENCE_S) as client:
        make(client, topic)
        broker.stop()
        shutil.copytree(data, backup)
        broker.start()
        with consumer_of(client, group, topic) as consumer, ThreadPoolExecutor() as threads:
            running = threads.submit(consumer.run, take_effect, inbox=connect)
            send(client, topic, "a", "b")
            all_taken(connect, ["a", "b"])
            broker.kill()
            shutil.rmtree(data)
            backup.rename(data)
            broker.start()
            with txmq.connect(broker.url, service="tests", timeout=PATIENCE_S) as other:
                send(other, topic, "c", "d", "e")
            with pytest.raises(InboxMismatch, match="restored to the past"):
                running.result(PATIENCE_S)
    broker.stop()
    assert effects(connect) == ["a", "b"]


def test_an_inbox_goes_on_over_restarts_of_its_broker(tmp_path: Path, connect: Connect) -> None:
    """Also for a member that joins while another one has gone on in the new run."""
    topic, group = fresh("t"), fresh("g")
    broker = RealBroker(tmp_path / "broker")
    with txmq.connect(broker.url, service="tests", timeout=PATIENCE_S) as client:
        make(client, topic)
        with running(client, connect, group, topic):
            send(client, topic, "a")
            all_taken(connect, ["a"])
            broker.kill()
            broker.start()
            send(client, topic, "b", "c")
            all_taken(connect, ["a", "b", "c"])
        for count, body in enumerate("de", 4):
            send(client, topic, body)
            run(client, connect, group, topic, count=count)
    broker.stop()
    assert effects(connect) == ["a", "b", "c", "d", "e"]
