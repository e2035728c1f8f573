"""Faults 74, 76, 78 and 82 of consumers, with processes that are frozen and killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from threading import Event, Thread
from typing import Any
from uuid import uuid4

import psycopg2
import pytest

from tests.freezing import wait_until_frozen
from tests.system.frozen_consumers import SESSION_S, TABLE, apply_once, receive_once
from txmq import Message, ReceivedMessage, connect
from txmq.client.blocking.client import Client
from txmq.errors import OffsetOutOfRange
from txmq.testing.own_broker import OwnBroker
from txmq.testing.processes import Running, whole_lines
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.wire.data_requests import Ack, AckedRange, Opcode, pack_ack, unpack_refused

pytestmark = pytest.mark.timeout(300)  # where the machine is busy
SETTINGS = "[consumers]\nlost_connection_grace_s = 0.1\n[retention]\nevery_s = 0.1\n"
Start = Callable[..., Running]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnBroker]:
    """A broker for all tests. A test that kills it starts it again."""
    with OwnBroker(tmp_path_factory.mktemp("broker"), SETTINGS) as broker:
        yield broker


@pytest.fixture
def client(broker: OwnBroker) -> Iterator[Client]:
    with connect(broker.url, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def start(tmp_path: Path, broker: OwnBroker) -> Iterator[Start]:
    """A function that starts consumers in processes of their own, which end with the
    test.
    """
    started: list[Running] = []

    def begin(main: Callable[..., None], *arguments: str) -> Running:
        running = Running(
            tmp_path / f"consumer-{len(started)}", broker.url, *arguments, command=main
        )
        started.append(running)
        return running

    yield begin
    for running in started:
        running.process.kill()  # a stopped process ends as well
        running.process.wait()


def new_name(what: str) -> str:
    return f"{what}-{uuid4().hex[:8]}"


def topic_and_group(client: Client, partitions: int = 1) -> tuple[str, str]:
    """Create a topic, and return its name and the name of a new group."""
    topic = new_name("t")
    client.call("topic.create", name=topic, partitions=partitions)
    return topic, new_name("g")


def first_line_of_stopped(running: Running) -> str:
    """Wait until the process has stopped itself, and return its first line."""
    line = running.first_line()
    wait_until_frozen(running.process.pid)
    return line


def group_view(client: Client, group: str) -> dict[str, Any]:
    return client.call("group.show", group=group)


@pytest.mark.parametrize("mode", ["concurrent", "ordered"])
def test_fault_74_an_ack_of_a_frozen_member_settles_nothing(
    client: Client, start: Start, mode: Any
) -> None:
    topic, group = topic_and_group(client)
    client.send(topic, b"x", key="k")
    slow = start(receive_once, group, topic, mode)
    assert first_line_of_stopped(slow) == "0 1"
    with client.consumer(group, [topic], mode=mode, session=SESSION_S) as other:
        message = other.receive(PATIENCE_S)
        assert message is not None
        assert group_view(client, group)["members"] == 1, (
            "its session is over, and another member has the message"
        )
        os.kill(slow.process.pid, signal.SIGCONT)
        assert slow.status() == 0
        assert whole_lines(slow.out) == ["0 1", "NotLeased", "1 1"], "the broker refuses its ack"
        assert (group_view(client, group)["unsettled"], group_view(client, group)["leased"]) == (
            1,
            1,
        )
        other.ack(message, wait=True)
    assert group_view(client, group)["unsettled"] == 0


def test_fault_74_a_frozen_handler_and_the_one_that_takes_over_have_one_effect(
    client: Client, start: Start, database: str
) -> None:
    with closing(psycopg2.connect(database)) as connection:
        connection.autocommit = True
        cursor = connection.cursor()
        cursor.execute(TABLE)
        topic, group = topic_and_group(client)
        client.send(topic, b"x", key="k")
        slow = start(apply_once, group, topic, database)
        first_line_of_stopped(slow)
        second = start(apply_once, group, topic, database)
        waits = (
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        wait_until(
            lambda: count(cursor, waits),
            what="the second handler waits for the transaction of the first",
        )
        assert count(cursor, "SELECT count(*) FROM effects") == 0
        os.kill(slow.process.pid, signal.SIGCONT)
        assert (slow.status(), second.status()) == (0, 0)
        assert whole_lines(slow.out) == ["0 1", "duplicates 0"]
        assert whole_lines(second.out) == ["duplicates 1"]
        assert count(cursor, "SELECT count(*) FROM effects") == 1
    assert group_view(client, group)["unsettled"] == 0


def count(cursor: Any, query: str) -> int:
    cursor.execute(query)
    [(found,)] = cursor.fetchall()
    return int(found)


JOINS, KEYS, EACH = 24, 8, 60


def test_fault_76_in_a_storm_of_joins_and_leaves_each_key_comes_once_and_in_order(
    client: Client,
) -> None:
    topic, group = topic_and_group(client, 16)
    done: dict[str | None, list[int]] = {f"k{key}": [] for key in range(KEYS)}

    def handle(message: ReceivedMessage) -> None:
        done[message.key].append(int(message.body))

    def join_and_leave() -> None:
        for _ in range(JOINS // 3):
            with client.consumer(group, [topic], mode="ordered", prefetch_messages=8) as consumer:
                # It leaves soon, whether anything has come or not.
                consumer.run(handle, workers=2, idle_exit=0.02)

    steady = client.consumer(group, [topic], mode="ordered", prefetch_messages=8)
    members = [Thread(target=join_and_leave) for _ in range(3)]
    staying = Thread(target=steady.run, args=(handle,), kwargs={"workers": 2})
    for thread in (staying, *members):
        thread.start()
    for number in range(EACH):
        client.send_batch(topic, [Message(b"%d" % number, f"k{key}") for key in range(KEYS)])
    for thread in members:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    wait_until(lambda: sum(map(len, done.values())) >= KEYS * EACH, what="all messages")
    steady.close()
    staying.join(PATIENCE_S)
    assert not staying.is_alive()
    assert done == {key: list(range(EACH)) for key in done}
    assert group_view(client, group)["generation"] > 2 * JOINS, "each member has joined and left"
    assert group_view(client, group)["unsettled"] == 0


def test_fault_78_messages_with_lost_acks_are_only_redelivered(
    broker: OwnBroker, client: Client
) -> None:
    topic, group = topic_and_group(client)
    client.send_batch(topic, [Message(b"%d" % number) for number in range(60)])
    lives, confirmed, last = broker.starts, set[int](), list[ReceivedMessage]()
    consumer = client.consumer(group, [topic], prefetch_messages=1_000)
    for _ in range(40):
        message = consumer.receive(PATIENCE_S)
        assert message is not None
        if message.offset % 3:
            consumer.ack(message, wait=True)
            confirmed.add(message.offset)
        else:
            last.append(message)
    broker.kill()
    consumer.ack_many(last)
    consumer.close(0.1)  # its acks that were not sent are lost with it
    broker.start()
    assert broker.starts == lives + 1
    before = group_view(client, group)["positions"][0]
    assert before["floor"] <= min(set(range(60)) - confirmed)
    again = set[int]()
    with client.consumer(group, [topic]) as other:
        while len(again) < 60 - len(confirmed):
            message = other.receive(PATIENCE_S)
            assert message is not None, f"only {sorted(again)} were delivered again"
            other.ack(message, wait=True)
            again.add(message.offset)
    assert (again & confirmed, again | confirmed) == (set(), set(range(60)))
    assert group_view(client, group)["positions"][0]["floor"] == 60


def test_fault_78_a_position_beyond_the_end_is_refused(client: Client) -> None:
    topic, group = topic_and_group(client)
    client.send(topic, b"x")
    with client.consumer(group, [topic]) as consumer:
        message = consumer.receive(PATIENCE_S)
        assert message is not None
        ahead = Ack(
            group_view(client, group)["generation"],
            group,
            consumer.member,
            (AckedRange(topic, 0, 1, 5),),
        )
        assert unpack_refused(client._core.request(Opcode.ACK, pack_ack(ahead))) == ahead.ranges
        with pytest.raises(OffsetOutOfRange):
            client.call("group.reset", group=group, topic=topic, to={"0": 5})
        assert group_view(client, group)["positions"][0]["floor"] == 0
        consumer.ack(message, wait=True)
    assert group_view(client, group)["positions"][0]["floor"] == 1


def test_fault_82_a_group_behind_retention_gets_an_alarm_with_what_it_missed(
    broker: OwnBroker, client: Client
) -> None:
    topic, group = topic_and_group(client)
    client.send_batch(topic, [Message(b"%d" % number) for number in range(10)])
    with client.consumer(group, [topic], prefetch_messages=1) as slow:
        message = slow.receive(PATIENCE_S)
        assert message is not None
        slow.ack(message, wait=True)
    client.call("topic.alter", name=topic, retention_ms=1)
    wait_until(
        lambda: client.call("topic.show", name=topic)["firsts"] == [10],
        what="all messages are too old",
    )
    client.call("topic.alter", name=topic, retention_ms=0)
    client.send(topic, b"10")
    [position] = group_view(client, group)["positions"]
    assert (position["passed"], position["floor"], position["unsettled"]) == (9, 10, 1)
    [alarm] = [
        one
        for one in client.call("broker.alarms")["alarms"]
        if one["name"] == "retention.passed_group"
    ]
    assert alarm["severity"] == "critical"
    assert "retention.passed_group" in broker.log
    with client.consumer(group, [topic]) as consumer:
        after = consumer.receive(PATIENCE_S)
        assert after is not None
        assert (after.offset, after.body) == (10, b"10")
        consumer.ack(after, wait=True)
    with pytest.raises(OffsetOutOfRange, match="10"):
        client.call("group.reset", group=group, topic=topic, to={"0": 3})


def test_a_database_restored_to_before_the_retained_messages_raises_an_alarm(
    client: Client, database: str
) -> None:
    topic, group = topic_and_group(client)
    applied: list[int] = []

    def run(until: int) -> None:
        """Apply messages until so many were applied in all."""
        enough = Event()

        def apply(message: ReceivedMessage, _connection: object) -> None:
            applied.append(message.offset)
            if len(applied) >= until:
                enough.set()

        with client.consumer(group, [topic]) as consumer:
            consumer.run(apply, inbox=lambda: psycopg2.connect(database), stop=enough)

    client.send_batch(topic, [Message(b"old") for _ in range(10)])
    run(10)
    client.call("topic.alter", name=topic, retention_ms=1)
    wait_until(
        lambda: client.call("topic.show", name=topic)["firsts"] == [10],
        what="all messages are too old",
    )
    client.call("topic.alter", name=topic, retention_ms=0)
    client.send_batch(topic, [Message(b"new") for _ in range(3)])
    run(13)
    with (
        closing(psycopg2.connect(database)) as connection,
        connection,
        connection.cursor() as cursor,
    ):
        cursor.execute(
            "UPDATE public.txmq_inbox SET applied = applied * '{[0,4)}' WHERE grp = %s", (group,)
        )
        cursor.execute("DELETE FROM public.txmq_inbox_recent WHERE grp = %s", (group,))
    run(16)
    assert applied == [*range(10), *range(10, 13), *range(10, 13)]
    assert group_view(client, group)["unsettled"] == 0
    [alarm] = [one for one in client.call("broker.alarms")["alarms"] if one["name"] == "inbox.lost"]
    assert f"messages 4 to 10 of {topic}/0" in alarm["text"]
