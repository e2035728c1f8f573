"""Local stores of consumers in threads: interrupts and forks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.client.real import RealBroker
from tests.client.real_consumers import drain, unprocessed
from tests.client.scripted_member import fresh
from txmq.client.blocking.client import Client
from txmq.client.blocking.consumer.consumer import Consumer
from txmq.errors import DirectoryInUse
from txmq.model.message import ReceivedMessage
from txmq.model.retry import RetryPolicy
from txmq.testing.processes import run_script
from txmq.testing.wait import PATIENCE_S

RETRY = RetryPolicy((0.3,), retries=5)


def consumer_of(client: Client, group: str, topic: str, directory: Path) -> Consumer:
    return client.consumer(group, [topic], on_failure="local", local_store=directory, retry=RETRY)


def test_a_second_process_is_told_that_the_directory_is_in_use(
    client: Client, tmp_path: Path
) -> None:
    topic, group = fresh("t"), fresh("g")
    client.send(topic, b"m00")
    with consumer_of(client, group, topic, tmp_path), pytest.raises(DirectoryInUse) as refused:
        consumer_of(client, group, topic, tmp_path)
    assert refused.value.hint


FORKING = """
import os, sys, txmq
url, topic, directory = sys.argv[1:]
with txmq.connect(url, service="forking", timeout=120) as client:
    def join():
        return client.consumer(topic, [topic], on_failure="local", local_store=directory)
    with join() as consumer:
        consumer.nack(consumer.receive(120))
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(writing)
            os.read(reading, 1)  # until the parent is done
            os._exit(0)
    with join():
        print("joined")
    os.close(writing)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_of_a_handler_ends_the_run_and_its_message_comes_again(
    client: Client, tmp_path: Path, interrupt: type[BaseException]
) -> None:
    topic, group, attempts = fresh("t"), fresh("g"), list[int]()
    client.send(topic, b"m00")

    def handle(message: ReceivedMessage) -> None:
        attempts.append(message.attempt)
        if message.attempt < 3:
            raise KeyError("k") if message.attempt == 1 else interrupt

    with consumer_of(client, group, topic, tmp_path) as consumer, pytest.raises(interrupt):
        consumer.run(handle, workers=2, idle_exit=PATIENCE_S)
    with consumer_of(client, group, topic, tmp_path) as consumer:
        drain(client, consumer, handle, lambda: not consumer.stats.stored)
    assert attempts == [1, 2, 3]
    assert unprocessed(client, group) == 0


def test_a_store_is_not_kept_by_the_child_of_a_fork(
    client: Client, shared_broker: RealBroker, tmp_path: Path
) -> None:
    topic = fresh("t")
    client.send(topic, b"m00")
    assert run_script(FORKING, shared_broker.url, topic, str(tmp_path)).endswith("joined\n")
