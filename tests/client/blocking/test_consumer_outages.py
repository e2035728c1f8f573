"""What consumers live through: lost connections, restarts of the broker, the death of
their process.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

import txmq
from tests.client.real import RealBroker
from tests.client.real_consumers import busy_log, closing_broker, floors, receive, shown
from tests.client.scripted_member import fresh
from txmq.client.blocking.client import Client
from txmq.client.blocking.connections.connection import Connection
from txmq.client.blocking.consumer.consumer import Consumer
from txmq.errors import BrokerUnavailable, LocalProtocolError
from txmq.model.message import Message
from txmq.testing.forked import run_source
from txmq.testing.processes import running
from txmq.testing.wait import PATIENCE_S, wait_until

AT_ONCE = txmq.RetryPolicy((0,))


def test_without_a_broker_a_consumer_is_refused() -> None:
    with (
        txmq.connect("txmq://127.0.0.1:1", timeout=0.2) as client,
        pytest.raises(BrokerUnavailable, match="refused"),
    ):
        client.consumer("g", ["t"])


def test_a_failure_of_the_thread_is_raised_to_waiting_callers(
    joined: Callable[..., Consumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[object]()
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))
    consumer = joined(fresh("g"), fresh("t"))
    monkeypatch.setattr(consumer._members.members[0].member, "wake_at", None)
    with pytest.raises(LocalProtocolError, match="TypeError"):
        consumer.receive(PATIENCE_S)
    wait_until(lambda: seen == [TypeError])


def test_a_lost_connection_is_survived_with_outstanding_messages(
    client: Client, joined: Callable[..., Consumer], dialled: list[Connection]
) -> None:
    topic, group = fresh("t"), fresh("g")
    client.send_many(topic, [b"%d" % number for number in range(10)])
    consumer = joined(group, topic)
    message = consumer.receive(PATIENCE_S)
    assert message is not None
    wait_until(lambda: shown(client, group)["leased"] == 10, what="everything is fetched")
    dialled[-1].socket.shutdown(socket.SHUT_RDWR)
    rest = receive(consumer, 9)
    assert {other.attempt for other in rest} == {1}
    assert message.offset not in {
        other.offset for other in rest if other.partition == message.partition
    }
    consumer.ack(message, wait=True)
    assert floors(client, group) == 10
    assert consumer.stats.rejoined == 1


def logged(told: Sequence[Mapping[str, Any]], group: str) -> list[str]:
    """Return the events that a consumer has logged."""
    return [entry["event"] for entry in told if entry.get("group") == group]


def test_the_log_tells_a_member_that_joins_anew_from_one_that_lost_its_connection(
    client: Client, dialled: list[Connection]
) -> None:
    topic, group = fresh("t"), fresh("g")
    client.call("topic.create", name=topic, partitions=1)
    client.send(topic, b"0", key="a")

    with client.consumer(group, [topic], mode="ordered") as consumer, capture_logs() as told:
        message = consumer.receive(PATIENCE_S)
        assert message is not None
        consumer._members.members[0].give_back([message], rejoin=True)
        wait_until(lambda: "consumer.joined" in logged(told, group))
        dialled[-1].socket.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: logged(told, group).count("consumer.joined") == 2)
    assert logged(told, group) == [
        "consumer.rejoining", "consumer.joined", "consumer.disconnected", "consumer.joined",
    ]  # fmt: skip


def test_the_log_tells_of_a_broker_that_is_away_when_a_member_joins_anew(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, group = fresh("t"), fresh("g")
    client.call("topic.create", name=topic, partitions=1)
    client.send(topic, b"0", key="a")
    dial, away = client._core.open_connection, list[bool]()

    def dial_unless_away(deadline: float) -> Connection:
        if away.pop() if away else False:
            raise BrokerUnavailable("it is away")
        return dial(deadline)

    monkeypatch.setattr(client._core, "open_connection", dial_unless_away)

    with client.consumer(group, [topic], mode="ordered") as consumer, capture_logs() as told:
        message = consumer.receive(PATIENCE_S)
        assert message is not None
        away += [True, True]
        consumer._members.members[0].give_back([message], rejoin=True)
        wait_until(lambda: "consumer.joined" in logged(told, group))
    assert logged(told, group) == ["consumer.rejoining", "consumer.disconnected", "consumer.joined"]


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_restarted_broker_is_survived(tmp_path: Path, end: str) -> None:
    with (
        closing_broker(tmp_path) as broker,
        txmq.connect(broker.url, timeout=PATIENCE_S) as client,
        client.consumer("g", ["t"]) as consumer,
    ):
        client.send_batch("t", [Message(b"%d" % number, "k") for number in range(6)])
        before = receive(consumer, 2)
        in_hand = consumer.receive(PATIENCE_S)
        assert in_hand is not None
        wait_until(lambda: floors(client, "g") == 2, what="the acks")
        getattr(broker, end)()
        broker.start()
        client.send("t", b"6", key="k")
        after = receive(consumer, 4)
        consumer.ack(in_hand, wait=True)
        assert [message.body for message in (*before, in_hand, *after)] == [
            b"%d" % n for n in range(7)
        ]
        wait_until(lambda: floors(client, "g") == 7, what="everything is acked")


def test_a_key_keeps_its_order_when_a_nack_follows_a_restart(tmp_path: Path) -> None:
    with (
        closing_broker(tmp_path) as broker,
        txmq.connect(broker.url, timeout=PATIENCE_S) as client,
        client.consumer("g", ["t"], mode="ordered", retry=AT_ONCE) as consumer,
        busy_log(broker.url),
    ):
        for _ in range(5):
            client.send_batch("t", [Message(b"%d" % number, "k") for number in range(3)])
            in_hand = consumer.receive(PATIENCE_S)
            assert in_hand is not None
            broker.kill()
            consumer.nack(in_hand, error="failed")
            broker.start()
            assert [message.body for message in receive(consumer, 3)] == [b"0", b"1", b"2"]
            wait_until(lambda: shown(client, "g")["leased"] == 0, what="all is settled")


def test_a_key_keeps_its_order_when_acks_are_lost_with_the_broker(tmp_path: Path) -> None:
    received = [-1]
    with (
        closing_broker(tmp_path) as broker,
        txmq.connect(broker.url, timeout=PATIENCE_S) as client,
        client.consumer("g", ["t"], mode="ordered", retry=AT_ONCE) as consumer,
        busy_log(broker.url),
    ):
        for last in (3, 7, 11, 15, 19):
            client.send_batch("t", [Message(b"%d" % n, "k") for n in range(last - 3, last + 1)])
            while received[-1] < last - 1:
                received += [int(message.body) for message in receive(consumer, 1)]
            in_hand = consumer.receive(PATIENCE_S)
            broker.kill()  # it may have none of the acks
            if in_hand is not None:
                consumer.nack(in_hand, error="failed")
            broker.start()
            while received[-1] < last:
                received += [int(message.body) for message in receive(consumer, 1)]
    # what comes again is followed by all that came after it
    assert [pair for pair in pairwise(received) if pair[1] > pair[0] + 1] == []


@pytest.mark.parametrize("mode", ["concurrent", "ordered", "broadcast"])
@pytest.mark.parametrize("partitions", [1, 8, 11])
def test_a_consumer_goes_on_with_a_topic_that_is_made_again(
    client: Client, joined: Callable[..., Consumer], mode: str, partitions: int
) -> None:
    topic = fresh("t")
    client.call("topic.create", name=topic, partitions=8)
    before = [Message(b"old-%d" % n, f"k{n}") for n in range(20)]
    client.send_batch(topic, before)
    consumer = joined(fresh("g"), topic, mode=mode, member="m", start="first")
    in_hand = consumer.receive(PATIENCE_S)
    assert in_hand is not None
    client.call("topic.delete", name=topic)
    client.call("topic.create", name=topic, partitions=partitions)
    for n in range(20):
        client.send(topic, b"new-%d" % n, key=f"k{n}")
    received: set[bytes] = set()
    while len(received) < 20:
        message = consumer.receive(PATIENCE_S)
        assert message is not None, f"{len(received)} messages came"
        if message.body.startswith(b"new"):
            received.add(message.body)
        consumer.ack(message)
    consumer.ack(in_hand)  # it concerns the old topic
    wait_until(lambda: floors_of(client, consumer.group, topic) == 20, what="the acks")


def floors_of(client: Client, group: str, topic: str) -> int:
    """Return the settled messages of the topic that has the name now."""
    topic_id = client.call("topic.show", name=topic)["topic_id"]
    positions = shown(client, group)["positions"]
    return sum(one["floor"] for one in positions if one["topic_id"] == topic_id)


def test_closing_a_closed_consumer_does_not_wait(tmp_path: Path) -> None:
    with closing_broker(tmp_path) as broker, txmq.connect(broker.url, timeout=PATIENCE_S) as client:
        consumer = client.consumer("g", ["t"])
        client.send("t", b"in hand")
        assert consumer.receive(PATIENCE_S) is not None
        broker.kill()
        consumer.close(0.5)
        broker.start()
        consumer.close(10_000)  # longer than a test may take


CHILD = """
import signal, sys, txmq
url, group, topic = sys.argv[1:]
consumer = txmq.connect(url, timeout=120).consumer(group, [topic], session=1.0)
print("offset", consumer.receive(120).offset, flush=True)
signal.pause()
"""


def test_messages_of_a_killed_process_go_to_others_and_are_not_blamed(
    shared_broker: RealBroker, client: Client, joined: Callable[..., Consumer], tmp_path: Path
) -> None:
    topic, group = fresh("t"), fresh("g")
    client.send(topic, b"x")
    with running(tmp_path, CHILD, shared_broker.url, group, topic, command=run_source) as child:
        offset = int(child.first_line().removeprefix("offset "))
        child.terminate(signal.SIGKILL)
    [message] = receive(joined(group, topic, session=1.0), 1)
    assert (message.offset, message.attempt) == (offset, 1)
