"""Failed messages in a consumer's local store: a real broker, a real disk, and where it
matters PostgreSQL and processes that die.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import txmq
from tests.client.effects import effects, take_effect, with_effects
from tests.client.real import RealBroker
from tests.client.real_consumers import closing_broker, unprocessed
from tests.client.scripted_member import fresh
from txmq.client.blocking.client import Client
from txmq.client.blocking.consumer.consumer import Consumer
from txmq.errors import BrokerUnavailable, DirectoryInUse, LocalProtocolError, TxmqError
from txmq.model.message import Message, ReceivedMessage
from txmq.model.retry import RetryPolicy
from txmq.recover.local_store import scan, stores_below
from txmq.testing.processes import run_script
from txmq.testing.wait import wait_until
from txmq.tx.postgres.session import Connection

WAIT_S = 20.0
IDLE_S = 2.0  # much longer than a busy machine stands still
RETRY = RetryPolicy.table(0.3, attempts=5)


@pytest.fixture
def client(shared_broker: RealBroker) -> Iterator[Client]:
    with txmq.connect(shared_broker.url, service="tests", timeout=WAIT_S) as client:
        yield client


@pytest.fixture
def connect_database(database: str) -> Callable[[], Connection]:
    return with_effects(database)


def send(client: Client, topic: str, count: int = 3, keys: int = 1) -> list[str]:
    bodies = [f"m{number:02}" for number in range(count)]
    client.send_batch(
        topic, [Message(body.encode(), f"k{number % keys}") for number, body in enumerate(bodies)]
    )
    return bodies


def consumer_of(
    client: Client, group: str, topic: str, directory: Path, **options: Any
) -> Consumer:
    settings = {"on_failure": "local", "local_store": directory, "retry": RETRY}
    return client.consumer(group, [topic], **{**settings, **options})


class Failing:
    """Attempts at messages, of which the first `failures` of each fail."""

    def __init__(self, failures: int = 1) -> None:
        self._failures = failures
        self.attempts: list[tuple[str, int]] = []

    def attempt(self, message: ReceivedMessage, _connection: object = None) -> None:
        self.attempts.append((message.body.decode(), message.attempt))
        if message.attempt <= self._failures:
            raise KeyError("k")


def run_until_attempts(
    number: int, consumer: Consumer, handle: Callable[..., object], failing: Failing, **options: Any
) -> None:
    """Run the handler until there are so many attempts."""
    stop = threading.Event()

    def handle_and_look(*arguments: object) -> None:
        try:
            handle(*arguments)
        finally:
            if len(failing.attempts) >= number:
                stop.set()

    consumer.run(handle_and_look, stop=stop, **options)


def test_failed_messages_are_retried_here_and_settled_at_the_broker(
    client: Client, tmp_path: Path
) -> None:
    topic, group, failing = fresh("t"), fresh("g"), Failing()
    bodies = send(client, topic)
    with consumer_of(client, group, topic, tmp_path) as consumer:
        consumer.run(failing.attempt, threads=2, idle_exit=IDLE_S)
        stats = consumer.stats
        assert (stats.nacked, stats.acked, stats.stored, stats.stored_attempts) == (3, 3, 0, 3)
        [store] = stores_below(str(tmp_path))
        # On disk, too, while the consumer has no other work: it may be killed next.
        wait_until(lambda: not list(scan(store.path)), WAIT_S)
    assert sorted(failing.attempts) == sorted(
        (body, attempt) for body in bodies for attempt in (1, 2)
    )
    assert unprocessed(client, group) == 0


def test_what_fails_for_good_is_a_dead_letter_with_its_attempts(
    client: Client, tmp_path: Path
) -> None:
    topic, group, failing = fresh("t"), fresh("g"), Failing(100)
    send(client, topic, 1)
    retry = RetryPolicy.table(0.1, attempts=2)
    with consumer_of(client, group, topic, tmp_path, retry=retry) as consumer:
        consumer.run(failing.attempt, idle_exit=IDLE_S)
    assert [attempt for _body, attempt in failing.attempts] == [1, 2, 3]
    [letter] = client.call("dlq.list", group=group)["letters"]
    assert (letter["attempts"], letter["error_type"]) == (3, "KeyError")


@pytest.mark.parametrize("on_failure", ["local", "broker"])
def test_effects_come_while_the_broker_is_away_and_acks_follow(
    own_broker: RealBroker, tmp_path: Path, on_failure: str
) -> None:
    topic, group, done = "t", "g", threading.Event()
    attempts: list[tuple[str, int]] = []

    with txmq.connect(own_broker.url, service="tests", timeout=WAIT_S) as own_client:

        def handle(message: ReceivedMessage) -> None:
            attempts.append((message.body.decode(), message.attempt))
            if message.attempt == 1:
                own_client.send("other", b"after the lease, which is durable then")
                own_broker.kill()
                raise KeyError("k")
            done.set()

        own_client.send(topic, b"m00")
        consumer = consumer_of(own_client, group, topic, tmp_path / "s", on_failure=on_failure)
        stop = threading.Event()
        runner = threading.Thread(target=consumer.run, args=(handle,), kwargs={"stop": stop})
        runner.start()
        assert done.wait(WAIT_S)
        own_broker.start()
        wait_until(
            lambda: consumer.stats.rejoined and not consumer.stats.stored, WAIT_S, what="the ack"
        )
        stop.set()
        runner.join()
        consumer.close()
        assert attempts == [("m00", 1), ("m00", 2)]
        assert unprocessed(own_client, group) == 0


def test_keys_keep_their_order(client: Client, tmp_path: Path) -> None:
    topic, group = fresh("t"), fresh("g")
    send(client, topic, 12, keys=3)
    done: dict[str, list[str]] = {}

    def handle(message: ReceivedMessage) -> None:
        if message.attempt == 1 and message.body in (b"m00", b"m04", b"m05"):
            raise KeyError("k")
        done.setdefault(message.key or "", []).append(message.body.decode())

    with consumer_of(client, group, topic, tmp_path, mode="ordered") as consumer:
        consumer.run(handle, threads=3, idle_exit=IDLE_S)
    assert sorted(map(len, done.values())) == [4, 4, 4]
    assert all(bodies == sorted(bodies) for bodies in done.values())


def test_the_next_process_goes_on_with_what_is_stored(client: Client, tmp_path: Path) -> None:
    topic, group, failing = fresh("t"), fresh("g"), Failing()
    send(client, topic)
    retry = RetryPolicy.table(4.0, attempts=5)
    with consumer_of(client, group, topic, tmp_path, retry=retry) as consumer:
        run_until_attempts(3, consumer, failing.attempt, failing)
        wait_until(lambda: consumer.stats.stored == 3, WAIT_S, what="the failures are stored")
    assert len(failing.attempts) == 3
    with consumer_of(client, group, topic, tmp_path, retry=retry) as consumer:
        run_until_attempts(6, consumer, failing.attempt, failing)
        wait_until(lambda: not consumer.stats.stored, WAIT_S, what="nothing is left to retry")
        assert consumer.stats.acked == 3
    assert sorted(failing.attempts)[1::2] == [("m00", 2), ("m01", 2), ("m02", 2)]
    assert unprocessed(client, group) == 0


def test_a_second_process_is_told_that_the_directory_is_in_use(
    client: Client, tmp_path: Path
) -> None:
    topic, group = fresh("t"), fresh("g")
    send(client, topic, 1)
    with consumer_of(client, group, topic, tmp_path), pytest.raises(DirectoryInUse) as refused:
        consumer_of(client, group, topic, tmp_path)
    assert refused.value.hint


def test_a_directory_that_cannot_be_used_is_refused(client: Client, tmp_path: Path) -> None:
    topic = fresh("t")
    send(client, topic, 1)
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(TxmqError) as refused:
        consumer_of(client, fresh("g"), topic, tmp_path / "file")
    assert not isinstance(refused.value, BrokerUnavailable)


def test_the_brokers_copy_of_a_lost_disk_is_adopted(client: Client, tmp_path: Path) -> None:
    topic, group, failing = fresh("t"), fresh("g"), Failing()
    send(client, topic)
    retry = RetryPolicy.table(600, attempts=5)
    with consumer_of(client, group, topic, tmp_path, retry=retry) as consumer:
        run_until_attempts(3, consumer, failing.attempt, failing)
        wait_until(lambda: consumer.stats.stored == 3, WAIT_S, what="the failures are stored")
    shutil.rmtree(tmp_path)
    [store] = client.call("recover.list", group=group)["stores"]
    client.call("recover.adopt", group=group, store=store["store"])
    with client.consumer(group, [topic], retry=retry) as consumer:
        consumer.run(failing.attempt, idle_exit=IDLE_S)
        assert consumer.stats.acked == 3
    assert unprocessed(client, group) == 0


def test_each_message_takes_effect_once_with_an_inbox(
    client: Client, tmp_path: Path, connect_database: Callable[[], Connection]
) -> None:
    topic, group = fresh("t"), fresh("g")
    bodies = send(client, topic, 6, keys=2)
    failing = Failing()

    def handle(message: ReceivedMessage, connection: Connection) -> None:
        take_effect(message, connection)
        failing.attempt(message)

    with consumer_of(client, group, topic, tmp_path, mode="ordered") as consumer:
        consumer.run(handle, inbox=connect_database, threads=2, idle_exit=IDLE_S)
    assert effects(connect_database) == bodies
    assert unprocessed(client, group) == 0


def test_iteration_and_waiting_acks_work_with_stored_messages(
    client: Client, tmp_path: Path
) -> None:
    topic, group = fresh("t"), fresh("g")
    send(client, topic, 1)
    with consumer_of(client, group, topic, tmp_path) as consumer:
        first = consumer.receive(WAIT_S)
        assert first is not None
        consumer.nack(first)
        second = consumer.receive(WAIT_S)
        assert second is not None
        assert (second.body, second.attempt) == (b"m00", 2)
        with (
            pytest.raises(LocalProtocolError, match="no transaction can ack it"),
            client.transaction() as tx,
        ):
            tx.ack(second)
        consumer.ack(second, wait=True)
        wait_until(lambda: unprocessed(client, group) == 0, WAIT_S)


def test_several_topics_have_a_store_each(client: Client, tmp_path: Path) -> None:
    topics, group, failing = [fresh("t"), fresh("t")], fresh("g"), Failing()
    for topic in topics:
        send(client, topic, 2)
    settings: Any = {"on_failure": "local", "local_store": tmp_path, "retry": RETRY}
    with client.consumer(group, topics, **settings) as consumer:
        consumer.run(failing.attempt, idle_exit=IDLE_S)
        assert consumer.stats.acked == 4
    assert len(list(tmp_path.glob("*/*"))) == 2


def test_several_brokers_have_a_store_each(tmp_path: Path, own_broker: RealBroker) -> None:
    failing = Failing()
    with closing_broker(tmp_path / "other") as other:
        urls = [own_broker.url, other.url]
        with txmq.connect(urls, service="tests", timeout=WAIT_S) as cluster:
            for number in range(8):
                cluster.send("t", f"m{number:02}".encode(), key=f"k{number}")
            settings: Any = {"on_failure": "local", "local_store": tmp_path / "s", "retry": RETRY}
            with cluster.consumer("g", ["t"], **settings) as consumer:
                consumer.run(failing.attempt, threads=2, idle_exit=IDLE_S)
                assert consumer.stats.acked == 8
    assert len(list((tmp_path / "s").glob("*/*"))) == 2


def test_a_topic_made_again_has_another_store(own_broker: RealBroker, tmp_path: Path) -> None:
    failing = Failing()
    with txmq.connect(own_broker.url, service="tests", timeout=WAIT_S) as client:
        client.send("t", b"m00")
        with consumer_of(client, "g", "t", tmp_path / "s") as consumer:
            message = consumer.receive(WAIT_S)
            assert message is not None
            consumer.nack(message, 600.0)
            wait_until(lambda: consumer.stats.stored == 1, WAIT_S)
        client.call("topic.delete", name="t")
        client.call("topic.create", name="t", partitions=1)
        client.send("t", b"m01")
        with consumer_of(client, "g", "t", tmp_path / "s") as consumer:
            consumer.run(failing.attempt, idle_exit=IDLE_S)
            assert (consumer.stats.stored, consumer.stats.acked) == (0, 1)
    assert failing.attempts == [("m01", 1), ("m01", 2)]


FORKING = """
import os, sys, txmq
url, topic, directory = sys.argv[1:]
with txmq.connect(url, service="forking", timeout=20) as client:
    def join():
        return client.consumer(topic, [topic], on_failure="local", local_store=directory)
    with join() as consumer:
        consumer.nack(consumer.receive(20))
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
    send(client, topic, 1)

    def handle(message: ReceivedMessage) -> None:
        attempts.append(message.attempt)
        if message.attempt < 3:
            raise KeyError("k") if message.attempt == 1 else interrupt

    with consumer_of(client, group, topic, tmp_path) as consumer, pytest.raises(interrupt):
        consumer.run(handle, threads=2, idle_exit=WAIT_S)
    with consumer_of(client, group, topic, tmp_path) as consumer:
        consumer.run(handle, idle_exit=IDLE_S)
        assert consumer.stats.stored == 0
    assert attempts == [1, 2, 3]
    assert unprocessed(client, group) == 0


def test_a_store_is_not_kept_by_the_child_of_a_fork(
    client: Client, shared_broker: RealBroker, tmp_path: Path
) -> None:
    topic = fresh("t")
    send(client, topic, 1)
    assert run_script(FORKING, shared_broker.url, topic, str(tmp_path)).endswith("joined\n")


def test_a_reset_takes_messages_back_and_they_have_one_effect(
    client: Client, tmp_path: Path, connect_database: Callable[[], Connection]
) -> None:
    topic, group = fresh("t"), fresh("g")
    bodies = send(client, topic)
    failing = Failing()

    def handle(message: ReceivedMessage, connection: Connection) -> None:
        take_effect(message, connection)
        failing.attempt(message)

    retry = RetryPolicy.table(4.0, attempts=5)
    with consumer_of(client, group, topic, tmp_path, retry=retry) as consumer:
        run_until_attempts(3, consumer, handle, failing, inbox=connect_database)
        wait_until(lambda: consumer.stats.stored == 3, WAIT_S, what="the failures are stored")
        client.call("group.reset", group=group, topic=topic, to="first")
        while unprocessed(client, group) or consumer.stats.stored:
            consumer.run(handle, inbox=connect_database, idle_exit=0.3)
    assert effects(connect_database) == bodies


def test_a_group_that_is_deleted_and_made_again_goes_on(client: Client, tmp_path: Path) -> None:
    topic, group, failing = fresh("t"), fresh("g"), Failing()
    send(client, topic)
    retry = RetryPolicy.table(4.0, attempts=5)
    with consumer_of(client, group, topic, tmp_path, retry=retry) as consumer:
        run_until_attempts(3, consumer, failing.attempt, failing)
        wait_until(lambda: consumer.stats.stored == 3, WAIT_S, what="the failures are stored")
    client.call("group.delete", group=group)
    with consumer_of(client, group, topic, tmp_path, retry=retry) as consumer:
        while unprocessed(client, group) or consumer.stats.stored:
            consumer.run(failing.attempt, idle_exit=0.3)
    assert {body for body, attempt in failing.attempts if attempt == 2} == {"m00", "m01", "m02"}
