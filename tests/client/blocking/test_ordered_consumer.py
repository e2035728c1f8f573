"""Ordered consumers with a broker: one key after the other, whatever happens to members
and connections.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.client.real_consumers import drain, shown
from tests.client.scripted_member import fresh
from txmq.client.blocking.client import Client
from txmq.client.blocking.connections.connection import Connection
from txmq.client.blocking.consumer.consumer import Consumer
from txmq.model.message import Message, ReceivedMessage
from txmq.model.retry import RetryPolicy
from txmq.testing.wait import PATIENCE_S, wait_until

AT_ONCE = RetryPolicy((0,), retries=50)


class OrderedHandler:
    """Handles messages, of which every third fails once, and notes for each key in
    which order they were done.
    """

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
    client.send_batch(
        topic, [Message(b"%d" % number, f"k{number % KEYS}") for number in range(start, end)]
    )


@contextmanager
def at_work(ledger: OrderedHandler, members: list[Consumer]) -> Iterator[list[threading.Thread]]:
    """The members run it in three threads each; at the end of the block they are
    closed.
    """
    threads = [
        threading.Thread(target=member.run, args=(ledger,), kwargs={"workers": 3})
        for member in members
    ]
    for thread in threads:
        thread.start()
    try:
        yield threads
    finally:
        for member in members:
            member.close()
        for thread in threads:
            thread.join()


def test_each_key_stays_in_order_while_messages_fail_and_members_come_and_go(
    client: Client, joined: Callable[..., Consumer]
) -> None:
    topic, group, ledger = fresh("t"), fresh("g"), OrderedHandler()
    with at_work(ledger, [joined(group, topic, mode="ordered", retry=AT_ONCE)]):
        for start in range(0, KEYS * EACH, 2 * KEYS):
            with at_work(ledger, [joined(group, topic, mode="ordered", retry=AT_ONCE)]):
                send_in_order(client, topic, start, start + 2 * KEYS)
        wait_until(lambda: ledger.count >= KEYS * EACH, 2 * PATIENCE_S, what="all is done")
    assert ledger.done == IN_ORDER


def wait_for_more_than(count: int, dialled: list[Connection]) -> None:
    wait_until(lambda: len(dialled) > count, what="another connection")


def test_each_key_stays_in_order_and_comes_once_while_connections_break(
    client: Client, joined: Callable[..., Consumer], dialled: list[Connection]
) -> None:
    topic, group, ledger = fresh("t"), fresh("g"), OrderedHandler()
    members = [joined(group, topic, mode="ordered", retry=AT_ONCE) for _ in range(2)]
    with at_work(ledger, members):
        for start in range(0, KEYS * EACH, 2 * KEYS):
            send_in_order(client, topic, start, start + 2 * KEYS)
            before = len(dialled)
            with suppress(OSError):  # lost already
                dialled[-1].socket.shutdown(socket.SHUT_RDWR)
            wait_for_more_than(before, dialled)
        wait_until(lambda: ledger.count >= KEYS * EACH, 2 * PATIENCE_S, what="all is done")
    assert ledger.done == IN_ORDER


def test_a_dead_letter_parks_its_key_and_no_other(
    client: Client, joined: Callable[..., Consumer]
) -> None:
    topic, group = fresh("t"), fresh("g")
    client.send_batch(
        topic, [Message(b"%d" % number, "ab"[number % 2]) for number in range(8)], partition=0
    )
    consumer = joined(group, topic, mode="ordered")
    handled: list[bytes] = []

    def handle(message: ReceivedMessage) -> None:
        handled.append(message.body)
        if message.body == b"2":
            consumer.dead_letter(message, "poison")

    drain(client, consumer, handle, lambda: shown(client, group)["parked"] == 2, workers=2)
    assert sorted(handled) == [b"0", b"1", b"2", b"3", b"5", b"7"]


def test_a_consumer_leaves_its_group_where_it_is_closed_while_it_joins_anew(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, group = fresh("t"), fresh("g")
    client.call("topic.create", name=topic, partitions=1)
    client.send(topic, b"0", key="a")
    consumer = client.consumer(group, [topic], mode="ordered")
    message = consumer.receive(PATIENCE_S)
    assert message is not None
    [member] = consumer._members.members
    search = member.thread._leader_search
    connect, away, over = search._connect, threading.Event(), threading.Event()

    def connect_later(deadline: float) -> Connection:
        away.set()
        assert over.wait(PATIENCE_S)
        return connect(deadline + PATIENCE_S)

    monkeypatch.setattr(search, "_connect", connect_later)
    member.give_back([message], rejoin=True)
    assert away.wait(PATIENCE_S)
    closing = threading.Thread(target=consumer.close)
    closing.start()
    wait_until(lambda: member.member._leaving)
    over.set()
    closing.join()
    assert shown(client, group)["members"] == 0, "nobody waits for the end of its session"
