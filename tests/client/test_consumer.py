"""Consumers with a broker: what is sent arrives, in order where it should, once where it can, and never not at all."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import txmq
from tests.client.consuming import fresh
from tests.client.real import RealBroker
from txmq.client.blocking import Client
from txmq.client.connection import Connection
from txmq.client.consumer import Consumer
from txmq.errors import BrokerUnavailable, GroupMismatch, LocalProtocolError, NotLeased
from txmq.message import Message, ReceivedMessage
from txmq.retry import RetryPolicy
from txmq.testing.forked import script
from txmq.testing.processes import running
from txmq.testing.wait import wait_until

WAIT_S = 20.0
AT_ONCE = RetryPolicy.table(0, attempts=50)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    with closing_broker(tmp_path_factory.mktemp("broker")) as broker:
        yield broker


@contextmanager
def closing_broker(directory: Path) -> Iterator[RealBroker]:
    broker = RealBroker(directory)
    try:
        yield broker
    finally:
        broker.stop()


@pytest.fixture
def client(broker: RealBroker) -> Iterator[Client]:
    with txmq.connect(broker.url, service="tests", timeout=WAIT_S) as client:
        yield client


@pytest.fixture
def dialled(client: Client, monkeypatch: pytest.MonkeyPatch) -> list[Connection]:
    """The connections that consumers have made, to be broken."""
    connections: list[Connection] = []
    dial = client.core.dial

    def remembered(deadline: float) -> Connection:
        connections.append(dial(deadline))
        return connections[-1]

    monkeypatch.setattr(client.core, "dial", remembered)
    return connections


@pytest.fixture
def joined(client: Client) -> Iterator[Callable[..., Consumer]]:
    """Consumers that leave at the end of the test."""
    made: list[Consumer] = []

    def join(group: str, topic: str, **options: Any) -> Consumer:
        made.append(client.consumer(group, [topic], **options))
        return made[-1]

    yield join
    for consumer in made:
        consumer.close()


def receive(consumer: Consumer, count: int) -> list[ReceivedMessage]:
    """So many messages, each acked."""
    received: list[ReceivedMessage] = []
    for _ in range(count):
        message = consumer.receive(WAIT_S)
        assert message is not None, f"{len(received)} of {count} messages came"
        consumer.ack(message)
        received.append(message)
    return received


def shown(client: Client, group: str) -> dict[str, Any]:
    return client.call("group.show", group=group)


def floors(client: Client, group: str) -> int:
    return sum(position["floor"] for position in shown(client, group)["positions"])


def test_messages_arrive_with_all_that_was_sent_and_acked_ones_do_not_come_again(
    client: Client, joined: Callable[..., Consumer]
) -> None:
    topic, group = fresh("t"), fresh("g")
    receipt = client.send(topic, b"body", key="k", tag="t", headers={"h": "v"})
    [message] = receive(joined(group, topic), 1)
    assert (message.topic, message.partition, message.offset) == (topic, receipt.partition, receipt.offset)
    assert (message.key, message.tag, message.headers, message.body) == ("k", "t", {"h": "v"}, b"body")
    assert (message.message_id, message.attempt) == (receipt.message_id, 1)
    wait_until(lambda: floors(client, group) == 1, what="the ack")


def test_it_waits_for_messages_to_come_and_for_no_longer_than_it_was_told(
    client: Client, joined: Callable[..., Consumer]
) -> None:
    topic = fresh("t")
    consumer = joined(fresh("g"), topic)
    assert consumer.receive(0.05) is None
    received: list[ReceivedMessage] = []
    thread = threading.Thread(target=lambda: received.extend(receive(consumer, 1)))
    thread.start()
    client.send(topic, b"x")
    thread.join(WAIT_S)
    assert [message.body for message in received] == [b"x"]


def test_batches_carry_columns(client: Client, joined: Callable[..., Consumer]) -> None:
    topic, group = fresh("t"), fresh("g")
    bodies = [b"%d" % number for number in range(500)]
    client.send_many(topic, bodies, keys=[f"k{number % 7}" for number in range(500)])
    consumer = joined(group, topic)
    received: list[bytes] = []
    for batch in consumer.batches():
        assert len(batch.bodies) == len(batch.keys) == len(batch.offsets)
        received += batch.bodies
        consumer.ack_batch(batch)
        if len(received) == 500:
            break
    assert sorted(received) == sorted(bodies)
    wait_until(lambda: floors(client, group) == 500, what="the acks")


def test_the_rest_of_a_batch_is_acked_soon(client: Client, joined: Callable[..., Consumer]) -> None:
    topic, group = fresh("t"), fresh("g")
    client.send_many(topic, [b"%d" % number for number in range(5)])
    consumer = joined(group, topic, retry=RetryPolicy.table(1_000), session_s=60)
    batch = consumer.receive_batch(WAIT_S)
    assert batch is not None
    consumer.nack(batch.messages()[2], error="no")
    consumer.ack_batch(batch)
    wait_until(lambda: floors(client, group) == 5, 12.0, what="the acks, long before the next heartbeat")


def test_a_message_in_hand_outlives_its_lease_while_its_consumer_is_alive(
    client: Client, joined: Callable[..., Consumer]
) -> None:
    topic, group = fresh("t"), fresh("g")
    client.send(topic, b"x")
    slow = joined(group, topic, lease_s=1.0)
    message = slow.receive(WAIT_S)
    assert message is not None
    other = joined(group, topic, lease_s=1.0)
    assert other.receive(2.5) is None
    slow.ack(message, wait=True)
    assert floors(client, group) == 1


def test_only_messages_with_a_wanted_tag_come_and_the_others_hold_up_nothing(
    client: Client, joined: Callable[..., Consumer]
) -> None:
    topic, group = fresh("t"), fresh("g")
    client.send_batch(topic, [Message(b"%d" % number, "k", ("paid", "new")[number % 2]) for number in range(10)])
    consumer = joined(group, topic, tags={"paid"})
    assert [message.body for message in receive(consumer, 5)] == [b"0", b"2", b"4", b"6", b"8"]
    wait_until(lambda: floors(client, group) == 10, what="the position passes what is not wanted")


def test_a_selector_leaves_out_the_rest_and_the_position_passes_it(
    client: Client, joined: Callable[..., Consumer]
) -> None:
    topic, group = fresh("t"), fresh("g")
    headers = [{"region": "eu", "price": f"{n}"} if n % 2 else {"price": "8"} for n in range(10)]
    client.send_batch(topic, [Message(b"%d" % n, "k", headers=pairs) for n, pairs in enumerate(headers)])
    consumer = joined(group, topic, selector="region = 'eu' AND price BETWEEN 3 AND 7")
    assert [message.body for message in receive(consumer, 3)] == [b"3", b"5", b"7"]
    wait_until(lambda: floors(client, group) == 10, what="the position passes what is not wanted")


def test_batches_without_a_wanted_tag_do_not_leave_the_broker(client: Client, joined: Callable[..., Consumer]) -> None:
    topic, group = fresh("t"), fresh("g")
    for number in range(20):
        client.send(topic, b"%d" % number, key="k", tag="paid" if number % 5 == 4 else "new")
    consumer = joined(group, topic, tags={"paid"})
    assert [message.body for message in receive(consumer, 4)] == [b"4", b"9", b"14", b"19"]
    wait_until(lambda: floors(client, group) == 20, what="the position passes what is not wanted")
    assert (consumer.stats.delivered, consumer.stats.filtered) == (4, 0)


def test_a_failed_message_comes_again_and_says_so(client: Client, joined: Callable[..., Consumer]) -> None:
    topic = fresh("t")
    client.send(topic, b"x")
    consumer = joined(fresh("g"), topic)
    first = consumer.receive(WAIT_S)
    assert first is not None
    consumer.nack(first, delay=0.0, error=ValueError("not yet"))
    [second] = receive(consumer, 1)
    assert (second.offset, second.message_id, second.attempt) == (first.offset, first.message_id, 2)


def test_a_message_held_for_too_long_has_failed(client: Client, joined: Callable[..., Consumer]) -> None:
    topic = fresh("t")
    client.send(topic, b"x")
    consumer = joined(fresh("g"), topic, consume_timeout_s=1.0, retry=AT_ONCE)
    held = consumer.receive(WAIT_S)
    again = consumer.receive(WAIT_S)
    assert held is not None
    assert again is not None
    assert (again.offset, again.attempt) == (held.offset, 2)
    with pytest.raises(NotLeased):
        consumer.ack(held, wait=True)


def test_a_dead_letter_keeps_why(client: Client, joined: Callable[..., Consumer]) -> None:
    topic, group = fresh("t"), fresh("g")
    client.send(topic, b"x", key="k")
    consumer = joined(group, topic)
    message = consumer.receive(WAIT_S)
    assert message is not None
    consumer.dead_letter(message, "no such customer")
    wait_until(lambda: client.call("dlq.list", group=group)["letters"], what="the letter")
    [letter] = client.call("dlq.list", group=group)["letters"]
    assert (letter["offset"], letter["key"], letter["error_text"]) == (message.offset, "k", "no such customer")


def test_waiting_for_an_ack_ends_when_the_broker_has_it(client: Client, joined: Callable[..., Consumer]) -> None:
    topic, group = fresh("t"), fresh("g")
    client.send(topic, b"x")
    consumer = joined(group, topic)
    message = consumer.receive(WAIT_S)
    assert message is not None
    consumer.ack(message, wait=True)
    assert floors(client, group) == 1
    with pytest.raises(NotLeased):
        consumer.ack(message, wait=True)


def test_closing_gives_back_what_was_not_begun_without_counting_it(
    client: Client, joined: Callable[..., Consumer]
) -> None:
    topic, group = fresh("t"), fresh("g")
    client.send_many(topic, [b"%d" % number for number in range(20)])
    first = joined(group, topic)
    kept = receive(first, 3)
    first.close()
    assert first.receive() is None
    attempts = {message.offset: message.attempt for message in receive(joined(group, topic), 17)}
    assert set(attempts.values()) == {1}
    assert not attempts.keys() & {message.offset for message in kept}


def test_members_share_a_topic_and_take_over_from_one_that_leaves(
    client: Client, joined: Callable[..., Consumer]
) -> None:
    topic, group = fresh("t"), fresh("g")
    client.call("topic.create", name=topic, partitions=4)
    first, second = joined(group, topic), joined(group, topic)
    wait_until(lambda: len(first.assignment) == len(second.assignment) == 2, what="a fair share", timeout_s=WAIT_S)
    assert not first.assignment & second.assignment
    first.close()
    for partition in range(4):
        client.send(topic, b"x", partition=partition)
    assert {message.partition for message in receive(second, 4)} == {0, 1, 2, 3}


def test_every_member_of_a_broadcast_group_gets_everything_and_a_named_one_remembers_where_it_was(
    client: Client, joined: Callable[..., Consumer]
) -> None:
    topic, group = fresh("t"), fresh("g")
    client.send(topic, b"before")
    first = joined(group, topic, mode="broadcast", member="one")
    unnamed = joined(group, topic, mode="broadcast")
    assert [message.body for message in receive(first, 1)] == [b"before"]
    client.send(topic, b"now")
    for consumer in (first, unnamed):
        assert [message.body for message in receive(consumer, 1)] == [b"now"]
    first.close()
    client.send(topic, b"missed")
    assert [message.body for message in receive(joined(group, topic, mode="broadcast", member="one"), 1)] == [b"missed"]


def test_settings_of_a_group_are_agreed_by_all_members(client: Client, joined: Callable[..., Consumer]) -> None:
    topic, group = fresh("t"), fresh("g")
    joined(group, topic, mode="ordered")
    with pytest.raises(GroupMismatch):
        joined(group, topic, mode="concurrent")


def test_without_a_broker_there_is_no_consumer() -> None:
    with txmq.connect("txmq://127.0.0.1:1", timeout=0.2) as client, pytest.raises(BrokerUnavailable, match="refused"):
        client.consumer("g", ["t"])


def test_a_thread_that_fails_is_told_to_whoever_waits(
    joined: Callable[..., Consumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[object]()
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))
    consumer = joined(fresh("g"), fresh("t"))
    monkeypatch.setattr(consumer._member, "wake_at", None)
    with pytest.raises(LocalProtocolError, match="TypeError"):
        consumer.receive(WAIT_S)
    wait_until(lambda: seen == [TypeError], WAIT_S)


def test_a_lost_connection_is_survived_with_what_is_in_hand(
    client: Client, joined: Callable[..., Consumer], dialled: list[Connection]
) -> None:
    topic, group = fresh("t"), fresh("g")
    client.send_many(topic, [b"%d" % number for number in range(10)])
    consumer = joined(group, topic)
    message = consumer.receive(WAIT_S)
    assert message is not None
    wait_until(lambda: shown(client, group)["leased"] == 10, what="everything is fetched")
    dialled[-1].socket.shutdown(socket.SHUT_RDWR)
    rest = receive(consumer, 9)
    assert {other.attempt for other in rest} == {1}
    assert message.offset not in {other.offset for other in rest if other.partition == message.partition}
    consumer.ack(message, wait=True)
    assert floors(client, group) == 10
    assert consumer.stats.rejoined == 1


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_restarted_broker_is_survived(tmp_path: Path, end: str) -> None:
    with (
        closing_broker(tmp_path) as broker,
        txmq.connect(broker.url, timeout=WAIT_S) as client,
        client.consumer("g", ["t"]) as consumer,
    ):
        client.send_batch("t", [Message(b"%d" % number, "k") for number in range(6)])
        before = receive(consumer, 2)
        in_hand = consumer.receive(WAIT_S)
        assert in_hand is not None
        wait_until(lambda: floors(client, "g") == 2, what="the acks")
        getattr(broker, end)()
        broker.start()
        client.send("t", b"6", key="k")
        after = receive(consumer, 4)
        consumer.ack(in_hand, wait=True)
        assert [message.body for message in (*before, in_hand, *after)] == [b"%d" % n for n in range(7)]
        wait_until(lambda: floors(client, "g") == 7, what="everything is acked")


def test_a_consumer_that_is_closed_waits_for_nobody_when_it_is_closed_again(tmp_path: Path) -> None:
    with closing_broker(tmp_path) as broker, txmq.connect(broker.url, timeout=WAIT_S) as client:
        consumer = client.consumer("g", ["t"])
        client.send("t", b"in hand")
        assert consumer.receive(WAIT_S) is not None
        broker.kill()
        consumer.close(0.5)
        broker.start()
        consumer.close(10_000)  # longer than a test may take


CHILD = """
import signal, sys, txmq
url, group, topic = sys.argv[1:]
consumer = txmq.connect(url, timeout=20).consumer(group, [topic], session_s=1.0)
print("offset", consumer.receive(20).offset, flush=True)
signal.pause()
"""


def test_messages_of_a_killed_process_go_to_others_and_are_not_blamed(
    broker: RealBroker, client: Client, joined: Callable[..., Consumer], tmp_path: Path
) -> None:
    topic, group = fresh("t"), fresh("g")
    client.send(topic, b"x")
    with running(tmp_path, CHILD, broker.url, group, topic, command=script) as child:
        offset = int(child.first_line().removeprefix("offset "))
        child.end(signal.SIGKILL)
    [message] = receive(joined(group, topic, session_s=1.0), 1)
    assert (message.offset, message.attempt) == (offset, 1)


class Ledger:
    """Handles messages, of which every third fails once, and notes for each key in which order they were done."""

    def __init__(self) -> None:
        self.done: dict[str | None, list[int]] = {}
        self._failed: set[int] = set()
        self._busy: set[str | None] = set()
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        with self._lock:
            return sum(map(len, self.done.values()))

    def __call__(self, message: ReceivedMessage) -> None:
        number = int(message.body)
        with self._lock:
            assert message.key not in self._busy, "two messages of a key at once"
            self._busy.add(message.key)
            fails = number not in self._failed and number % 3 == 0
            self._failed.add(number)
        try:
            if fails:
                raise ValueError("later")
            with self._lock:
                self.done.setdefault(message.key, []).append(number)
        finally:
            with self._lock:
                self._busy.discard(message.key)


KEYS, EACH = 5, 20
IN_ORDER = {f"k{key}": list(range(key, KEYS * EACH, KEYS)) for key in range(KEYS)}


def send_in_order(client: Client, topic: str, start: int, end: int) -> None:
    client.send_batch(topic, [Message(b"%d" % number, f"k{number % KEYS}") for number in range(start, end)])


@contextmanager
def at_work(ledger: Ledger, members: list[Consumer]) -> Iterator[list[threading.Thread]]:
    """The members run it in three threads each; at the end of the block they are closed."""
    threads = [threading.Thread(target=member.run, args=(ledger,), kwargs={"threads": 3}) for member in members]
    for thread in threads:
        thread.start()
    try:
        yield threads
    finally:
        for member in members:
            member.close()
        for thread in threads:
            thread.join(WAIT_S)


def test_each_key_stays_in_order_while_messages_fail_and_members_come_and_go(
    client: Client, joined: Callable[..., Consumer]
) -> None:
    topic, group, ledger = fresh("t"), fresh("g"), Ledger()
    with at_work(ledger, [joined(group, topic, mode="ordered", retry=AT_ONCE)]):
        for start in range(0, KEYS * EACH, 2 * KEYS):
            with at_work(ledger, [joined(group, topic, mode="ordered", retry=AT_ONCE)]):
                send_in_order(client, topic, start, start + 2 * KEYS)
        wait_until(lambda: ledger.count >= KEYS * EACH, 2 * WAIT_S, what="all is done")
    assert ledger.done == IN_ORDER


def test_each_key_stays_in_order_and_comes_once_while_connections_break(
    client: Client, joined: Callable[..., Consumer], dialled: list[Connection]
) -> None:
    topic, group, ledger = fresh("t"), fresh("g"), Ledger()
    members = [joined(group, topic, mode="ordered", retry=AT_ONCE) for _ in range(2)]
    with at_work(ledger, members):
        for start in range(0, KEYS * EACH, 2 * KEYS):
            send_in_order(client, topic, start, start + 2 * KEYS)
            before = len(dialled)
            with suppress(OSError):  # lost already
                dialled[-1].socket.shutdown(socket.SHUT_RDWR)
            wait_until(lambda: len(dialled) > before, WAIT_S, what="another connection")  # noqa: B023
        wait_until(lambda: ledger.count >= KEYS * EACH, 2 * WAIT_S, what="all is done")
    assert ledger.done == IN_ORDER


def test_a_dead_letter_parks_its_key_and_no_other(client: Client, joined: Callable[..., Consumer]) -> None:
    topic, group = fresh("t"), fresh("g")
    client.send_batch(topic, [Message(b"%d" % number, "ab"[number % 2]) for number in range(8)], partition=0)
    consumer = joined(group, topic, mode="ordered")
    handled: list[bytes] = []

    def handle(message: ReceivedMessage) -> None:
        handled.append(message.body)
        if message.body == b"2":
            consumer.dead_letter(message, "poison")

    consumer.run(handle, threads=2, idle_exit=1.0)
    assert sorted(handled) == [b"0", b"1", b"2", b"3", b"5", b"7"]
    wait_until(lambda: shown(client, group)["parked"] == 2, what="the key is parked")


def test_an_outage_buries_nothing_and_what_waited_is_done_when_it_is_over(
    client: Client, joined: Callable[..., Consumer]
) -> None:
    topic, group, messages = fresh("t"), fresh("g"), 200
    back, stop, seen = threading.Event(), threading.Event(), set[int]()
    client.send_many(topic, [b"%d" % number for number in range(messages)], keys=[f"k{n}" for n in range(messages)])
    consumer = joined(group, topic, retry=RetryPolicy.table(0.01, attempts=1))

    def handle(message: ReceivedMessage) -> None:
        if not back.is_set():
            raise ConnectionError("no database")
        seen.add(int(message.body))

    work = threading.Thread(target=consumer.run, args=(handle,), kwargs={"threads": 4, "stop": stop})
    work.start()
    wait_until(lambda: shown(client, group)["state"] == "guarded", what="the guard")
    back.set()
    wait_until(lambda: shown(client, group)["state"] == "active", WAIT_S, what="the probe")
    wait_until(lambda: len(seen) == messages, WAIT_S, what="everything")
    stop.set()
    work.join()
    assert (shown(client, group)["letters"], shown(client, group)["floods"]) == (0, 1)


def test_handlers_get_lists_where_they_ask_for_them(client: Client, joined: Callable[..., Consumer]) -> None:
    topic, group = fresh("t"), fresh("g")
    client.send_many(topic, [b"%d" % number for number in range(30)])
    sizes: list[int] = []
    consumer = joined(group, topic)
    consumer.run(lambda messages: sizes.append(len(messages)), batch=8, idle_exit=0.3)
    assert (sum(sizes), max(sizes)) == (30, 8)
    wait_until(lambda: floors(client, group) == 30, what="the acks")


def test_running_ends_when_it_is_told_to(client: Client, joined: Callable[..., Consumer]) -> None:
    topic, stop = fresh("t"), threading.Event()
    client.send(topic, b"x")
    joined(fresh("g"), topic).run(lambda _message: stop.set(), stop=stop)
    assert stop.is_set()


def test_an_ack_in_a_transaction_takes_effect_with_it(client: Client, joined: Callable[..., Consumer]) -> None:
    topic, other, group = fresh("t"), fresh("t"), fresh("g")
    client.send_batch(topic, [Message(b"%d" % number, "k") for number in range(2)])
    consumer = joined(group, topic)
    first, second = consumer.receive(WAIT_S), consumer.receive(WAIT_S)
    assert first is not None
    assert second is not None
    with client.transaction() as tx:
        tx.ack(first)
        tx.send(other, b"made of it")
    with suppress(ZeroDivisionError), client.transaction() as tx:
        tx.ack(second)
        tx.send(other, b"never")
        raise ZeroDivisionError
    wait_until(lambda: floors(client, group) == 1, what="the ack of the first")
    assert [message.body for message in receive(joined(fresh("g"), other), 1)] == [b"made of it"]
    consumer.ack(second, wait=True)
    assert floors(client, group) == 2
