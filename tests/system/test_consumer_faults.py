"""Faults of consumers by their numbers (FAULTS 74, 76, 78, 82), with processes that are
frozen and killed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from threading import Thread
from typing import Any
from uuid import uuid4

import psycopg2
import pytest

from tests.system.frozen import SESSION_S, TABLE, charging, member
from txmq import Message, ReceivedMessage, connect
from txmq.client import Client
from txmq.errors import OffsetOutOfRange
from txmq.testing.broker import OwnBroker
from txmq.testing.processes import Running
from txmq.testing.wait import wait_until
from txmq.wire.headers import Ack, Acked, Opcode, pack_ack, unpack_refused

pytestmark = pytest.mark.timeout(300)  # where the machine is busy
PATIENCE_S = 60.0
SETTINGS = "[consumers]\nlost_connection_grace_s = 0.1\n[retention]\nevery_s = 0.1\n"
Start = Callable[..., Running]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnBroker]:
    """Whoever kills it starts it again."""
    with OwnBroker(tmp_path_factory.mktemp("broker"), SETTINGS) as broker:
        yield broker


@pytest.fixture
def client(broker: OwnBroker) -> Iterator[Client]:
    with connect(broker.url, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def start(tmp_path: Path, broker: OwnBroker) -> Iterator[Start]:
    """Starts consumers in processes of their own, which end with the test."""
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


def fresh(what: str) -> str:
    return f"{what}-{uuid4().hex[:8]}"


def made(client: Client, partitions: int = 1) -> tuple[str, str]:
    """A topic and the name of a group."""
    topic = fresh("t")
    client.call("topic.create", name=topic, partitions=partitions)
    return topic, fresh("g")


def frozen(running: Running) -> str:
    """What it has in hand, once it stands still."""
    line = running.first_line()
    stat = Path(f"/proc/{running.process.pid}/stat")
    wait_until(
        lambda: stat.read_text().rpartition(")")[2].split()[0] == "T",
        PATIENCE_S,
        what="it is stopped",
    )
    return line


def said(running: Running) -> list[str]:
    return running.out.read_text().splitlines()


def shown(client: Client, group: str) -> dict[str, Any]:
    return client.call("group.show", group=group)


@pytest.mark.parametrize("mode", ["concurrent", "ordered"])
def test_fault_74_an_ack_of_a_frozen_member_settles_nothing(
    client: Client, start: Start, mode: Any
) -> None:
    topic, group = made(client)
    client.send(topic, b"x", key="k")
    slow = start(member, group, topic, mode)
    assert frozen(slow) == "0 1"
    with client.consumer(group, [topic], mode=mode, session_s=SESSION_S) as other:
        message = other.receive(PATIENCE_S)
        assert message is not None
        assert shown(client, group)["members"] == 1, (
            "its session is over, another member has the message"
        )
        os.kill(slow.process.pid, signal.SIGCONT)
        assert slow.status() == 0
        assert said(slow) == ["0 1", "NotLeased", "1 1"], "its ack is refused, and it is told so"
        assert (shown(client, group)["lag"], shown(client, group)["leased"]) == (1, 1)
        other.ack(message, wait=True)
    assert shown(client, group)["lag"] == 0


def test_fault_74_a_frozen_handler_and_the_one_that_takes_over_have_one_effect(
    client: Client, start: Start, database: str
) -> None:
    with closing(psycopg2.connect(database)) as connection:
        connection.autocommit = True
        cursor = connection.cursor()
        cursor.execute(TABLE)
        topic, group = made(client)
        client.send(topic, b"x", key="k")
        slow = start(charging, group, topic, database)
        frozen(slow)
        second = start(charging, group, topic, database)
        waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        wait_until(
            lambda: count(cursor, waits),
            PATIENCE_S,
            what="the second one waits for the first one's transaction",
        )
        assert count(cursor, "SELECT count(*) FROM effects") == 0
        os.kill(slow.process.pid, signal.SIGCONT)
        assert (slow.status(), second.status()) == (0, 0)
        assert said(slow) == ["0 1", "duplicates 0"]
        assert said(second) == ["duplicates 1"]
        assert count(cursor, "SELECT count(*) FROM effects") == 1
    assert shown(client, group)["lag"] == 0


def count(cursor: Any, query: str) -> int:
    cursor.execute(query)
    [(found,)] = cursor.fetchall()
    return int(found)


JOINS, KEYS, EACH = 24, 8, 60


def test_fault_76_in_a_storm_of_joins_and_leaves_each_key_comes_once_and_in_order(
    client: Client,
) -> None:
    topic, group = made(client, 16)
    done: dict[str | None, list[int]] = {f"k{key}": [] for key in range(KEYS)}

    def handle(message: ReceivedMessage) -> None:
        done[message.key].append(int(message.body))

    def coming_and_going() -> None:
        for _ in range(JOINS // 3):
            with client.consumer(group, [topic], mode="ordered", prefetch_messages=8) as consumer:
                consumer.run(handle, threads=2, idle_exit=0.02)

    steady = client.consumer(group, [topic], mode="ordered", prefetch_messages=8)
    members = [Thread(target=coming_and_going) for _ in range(3)]
    stays = Thread(target=steady.run, args=(handle,), kwargs={"threads": 2})
    for thread in (stays, *members):
        thread.start()
    for number in range(EACH):
        client.send_batch(topic, [Message(b"%d" % number, f"k{key}") for key in range(KEYS)])
    for thread in members:
        thread.join(PATIENCE_S)
    wait_until(lambda: sum(map(len, done.values())) >= KEYS * EACH, PATIENCE_S, what="all messages")
    steady.close()
    stays.join(PATIENCE_S)
    assert done == {key: list(range(EACH)) for key in done}
    assert shown(client, group)["generation"] > 2 * JOINS, "each has come and gone"
    assert shown(client, group)["lag"] == 0


def test_fault_78_acks_that_were_lost_with_the_broker_are_only_redelivered(
    broker: OwnBroker, client: Client
) -> None:
    topic, group = made(client)
    client.send_batch(topic, [Message(b"%d" % number) for number in range(60)])
    lives, confirmed, last = broker.lives, set[int](), list[ReceivedMessage]()
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
    consumer.close(0.1)  # it dies with what it has not told
    broker.start()
    assert broker.lives == lives + 1
    before = shown(client, group)["positions"][0]
    assert before["floor"] <= min(set(range(60)) - confirmed)
    again = set[int]()
    with client.consumer(group, [topic]) as other:
        while len(again) < 60 - len(confirmed):
            message = other.receive(PATIENCE_S)
            assert message is not None, f"{sorted(again)} came again"
            other.ack(message, wait=True)
            again.add(message.offset)
    assert (again & confirmed, again | confirmed) == (set(), set(range(60)))
    assert shown(client, group)["positions"][0]["floor"] == 60


def test_fault_78_a_position_beyond_the_end_is_refused(client: Client) -> None:
    topic, group = made(client)
    client.send(topic, b"x")
    with client.consumer(group, [topic]) as consumer:
        message = consumer.receive(PATIENCE_S)
        assert message is not None
        ahead = Ack(
            shown(client, group)["generation"], group, consumer.member, (Acked(topic, 0, 1, 5),)
        )
        assert unpack_refused(client.core.request(Opcode.ACK, pack_ack(ahead))) == ahead.ranges
        with pytest.raises(OffsetOutOfRange):
            client.call("group.reset", group=group, topic=topic, to={"0": 5})
        assert shown(client, group)["positions"][0]["floor"] == 0
        consumer.ack(message, wait=True)
    assert shown(client, group)["positions"][0]["floor"] == 1


def test_fault_82_a_group_behind_retention_is_told_what_it_missed(
    broker: OwnBroker, client: Client
) -> None:
    topic, group = made(client)
    client.send_batch(topic, [Message(b"%d" % number) for number in range(10)])
    with client.consumer(group, [topic], prefetch_messages=1) as slow:
        message = slow.receive(PATIENCE_S)
        assert message is not None
        slow.ack(message, wait=True)
    client.call("topic.alter", name=topic, retention_ms=1)
    wait_until(
        lambda: client.call("topic.show", name=topic)["firsts"] == [10],
        PATIENCE_S,
        what="all is too old",
    )
    client.call("topic.alter", name=topic, retention_ms=0)
    client.send(topic, b"10")
    [position] = shown(client, group)["positions"]
    assert (position["passed"], position["floor"], position["lag"]) == (9, 10, 1)
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


def test_a_database_restored_to_before_what_is_retained_is_an_alarm_and_the_rest_comes_again(
    client: Client, database: str
) -> None:
    topic, group = made(client)
    took: list[int] = []

    def run() -> None:
        with client.consumer(group, [topic]) as consumer:
            consumer.run(
                lambda message, _connection: took.append(message.offset),
                inbox=lambda: psycopg2.connect(database),
                idle_exit=1.0,
            )

    client.send_batch(topic, [Message(b"old") for _ in range(10)])
    run()
    client.call("topic.alter", name=topic, retention_ms=1)
    wait_until(
        lambda: client.call("topic.show", name=topic)["firsts"] == [10],
        PATIENCE_S,
        what="all is too old",
    )
    client.call("topic.alter", name=topic, retention_ms=0)
    client.send_batch(topic, [Message(b"new") for _ in range(3)])
    run()
    with (
        closing(psycopg2.connect(database)) as connection,
        connection,
        connection.cursor() as cursor,
    ):
        cursor.execute(
            "UPDATE public.txmq_inbox SET applied = applied * '{[0,4)}' WHERE grp = %s", (group,)
        )
        cursor.execute("DELETE FROM public.txmq_inbox_recent WHERE grp = %s", (group,))
    run()
    assert took == [*range(10), *range(10, 13), *range(10, 13)]
    [alarm] = [one for one in client.call("broker.alarms")["alarms"] if one["name"] == "inbox.lost"]
    assert f"messages 4 to 10 of {topic}/0" in alarm["text"]
