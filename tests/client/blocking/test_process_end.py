"""Processes that end without `close`, and children of a fork that use what is their
parent's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import txmq
from tests.client.real import RealBroker
from tests.client.scripted_member import fresh
from txmq.client.blocking.client import Client
from txmq.errors import LocalProtocolError
from txmq.testing.wait import PATIENCE_S

Connect = Callable[..., Client]
MANY = 2_000
ROOT = Path(__file__).parents[3]
SENDS = """
import sys, txmq
client = txmq.connect(sys.argv[1], service="orders")
for number in range(int(sys.argv[3])):
    client.send_async(sys.argv[2], b"%d" % number, key=str(number % 7))
"""
SENDS_IN_A_CHILD = """
import sys, multiprocessing, txmq
def send(url, topic, count):
    client = txmq.connect(url, service="orders")
    for number in range(count):
        client.send_async(topic, b"%d" % number, key=str(number % 7))
context = multiprocessing.get_context("fork")
child = context.Process(target=send, args=(sys.argv[1], sys.argv[2], int(sys.argv[3])))
child.start()
child.join()
"""
SENDS_ON_TWISTED = """
import sys, txmq.twisted
from twisted.internet import reactor
def send():
    client = txmq.twisted.connect(reactor, sys.argv[1], service="orders")
    def more(_receipt):
        for number in range(1, int(sys.argv[3])):
            client.send(sys.argv[2], b"%d" % number, key=str(number % 7))
        reactor.stop()
    client.send(sys.argv[2], b"0", key="0").addCallback(more)
reactor.callWhenRunning(send)
reactor.run()
"""
SENDS_TO_A_STOPPED_BROKER = """
import sys, txmq
from tests.freezing import freeze
client = txmq.connect(sys.argv[1], service="orders", timeout=120)
client.send(sys.argv[2], b"stored")
client.send("t-other", b"stored")
freeze(int(sys.argv[3]))
for topic in (sys.argv[2], sys.argv[2], "t-other"):
    client.send_async(topic, b"unsent")
"""


def run(source: str, *arguments: object) -> str:
    """Run a program to its ordinary end; return what it printed on standard error."""
    ended = subprocess.run(
        [sys.executable, "-c", source, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
        cwd=ROOT,
    )
    return ended.stderr


@pytest.mark.parametrize("source", [SENDS, SENDS_IN_A_CHILD, SENDS_ON_TWISTED])
def test_a_process_that_ends_without_close_sends_what_waits(
    real: RealBroker, connect: Connect, source: str
) -> None:
    topic = fresh("t")
    client = connect(real.url)
    client.call("topic.create", name=topic, partitions=3)
    printed = run(source, real.url, topic, MANY)
    ends = client.call("topic.show", name=topic)["ends"]
    assert (sum(ends), printed) == (MANY, "")


def test_messages_without_a_receipt_at_the_end_of_their_process_are_named(
    own_broker: RealBroker,
) -> None:
    topic = fresh("t")
    printed = run(SENDS_TO_A_STOPPED_BROKER, own_broker.url, topic, own_broker.pid)
    assert "RuntimeWarning: the process ends without a receipt for 3 messages" in printed
    assert f"(2 of '{topic}', 1 of 't-other')" in printed
    own_broker.kill()  # it is stopped and would not hear of its end


def in_a_child(work: Callable[[], object]) -> int:
    """Do the work in a forked child; return how many calls of it were refused."""
    child = os.fork()
    if not child:  # nothing of pytest may run here
        try:
            work()
        except LocalProtocolError as error:
            os._exit(2 if "was forked from it" in str(error) else 3)
        finally:
            os._exit(4)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


REFUSED = 2


def test_a_consumer_in_the_child_of_a_fork_refuses_and_that_of_the_parent_goes_on(
    real: RealBroker, connect: Connect
) -> None:
    client, topic = connect(real.url), fresh("t")
    client.send_many(topic, [b"%d" % number for number in range(5)])
    consumer = client.consumer(fresh("g"), [topic])
    first = consumer.receive(PATIENCE_S)
    assert first is not None
    uses: list[Callable[[], object]] = [
        lambda: consumer.receive(1.0),
        lambda: consumer.receive_many(5, 1.0),
        lambda: consumer.receive_batch(1.0),
        lambda: next(iter(consumer)),
        lambda: consumer.run(lambda _message: None, idle_exit=0.1),
        lambda: consumer.ack(first),
        lambda: consumer.ack(first, wait=True),
        lambda: consumer.nack(first),
        lambda: consumer.extend(first),
        lambda: consumer.dead_letter(first, "no"),
    ]
    assert [in_a_child(use) for use in uses] == [REFUSED] * len(uses)
    consumer.ack(first, wait=True)
    rest = consumer.receive_many(5, PATIENCE_S)
    assert sorted([first.body, *(message.body for message in rest)]) == [
        b"%d" % number for number in range(5)
    ]


def test_a_child_closes_what_is_its_parents_and_has_a_consumer_of_its_own(
    real: RealBroker, connect: Connect
) -> None:
    client, topic = connect(real.url), fresh("t")
    client.send(topic, b"x")
    consumer = client.consumer(fresh("g"), [topic])
    other = fresh("g")

    def work() -> None:
        consumer.close()
        with client.consumer(other, [topic]) as own:
            message = own.receive(PATIENCE_S)
            assert message is not None
            own.ack(message, wait=True)
        os._exit(0)

    assert in_a_child(work) == 0
    message = consumer.receive(PATIENCE_S)
    assert message is not None
    consumer.ack(message, wait=True)


def test_a_reader_in_the_child_of_a_fork_refuses_and_that_of_the_parent_goes_on(
    real: RealBroker, connect: Connect, tmp_path: Path
) -> None:
    client, topic = connect(real.url), fresh("t")
    client.send_many(topic, [b"0", b"1"], keys=["k", "k"])
    with client.reader("r", [topic], txmq.FileOffsets(tmp_path)) as reader:
        uses: list[Callable[[], object]] = [
            lambda: reader.receive(1.0),
            reader.commit,
            lambda: reader.assign(None),
        ]
        first = reader.receive(PATIENCE_S)
        assert [in_a_child(use) for use in uses] == [REFUSED] * len(uses)

        def close() -> None:
            reader.close()
            os._exit(0)

        assert in_a_child(close) == 0
        second = reader.receive(PATIENCE_S)
        assert [message and message.body for message in (first, second)] == [b"0", b"1"]
