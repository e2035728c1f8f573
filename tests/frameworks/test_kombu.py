"""Kombu's transport: queues, fanout, and Celery's tasks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker
from kombu import Connection, Exchange, Queue
from kombu.exceptions import OperationalError

import txmq
from tests.frameworks.celery_app import add, app
from txmq.errors import MessageTooLarge
from txmq.kombu.address import Names, address_of
from txmq.kombu.messages import due_at
from txmq.testing.broker_thread import BrokerThread
from txmq.testing.wait import PATIENCE_S, wait_until

QUEUE = Names().queue
STRANGE = b'{"body": "x", "headers": {}, "properties": {"delivery_info": {}, "expiration": []}}'
WORKER = (sys.executable, "-m", "celery", "-A", "tests.frameworks.celery_app", "worker")


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerThread]:
    with BrokerThread(tmp_path / "data") as broker:
        yield broker


@pytest.fixture(scope="module")
def working(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerThread]:
    """A broker with a worker of the tested app."""
    with BrokerThread(tmp_path_factory.mktemp("working") / "data") as broker:
        app.conf.broker_url = broker.url
        with start_worker(app, perform_ping_check=False, pool="solo", loglevel="ERROR"):
            yield broker
        app.close()


def hear(said: list[object]) -> Callable[[object, Any], None]:
    def callback(body: object, message: Any) -> None:
        said.append(body)
        message.ack()

    return callback


@contextmanager
def worker_process(broker: BrokerThread, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [*WORKER, "--pool", "prefork", "--concurrency", "1",
             "--without-gossip", "--without-mingle"],
            env=os.environ | {"TESTED_BROKER": broker.url}, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def test_tasks_are_done_and_their_results_come(working: BrokerThread) -> None:
    results = [add.delay(number, 1) for number in range(20)]
    assert [result.get(timeout=PATIENCE_S) for result in results] == list(range(1, 21))


def test_a_countdown_waits_at_the_broker(working: BrokerThread) -> None:
    result = add.apply_async((1, 1), countdown=0.5)
    with txmq.connect(working.url) as client:
        [delayed] = client.call("message.delayed")["messages"]
        assert delayed["topic"] == QUEUE("celery")
    assert result.get(timeout=PATIENCE_S) == 2


def test_workers_hear_remote_control(working: BrokerThread) -> None:
    [answer] = app.control.ping(timeout=PATIENCE_S, limit=1)
    assert list(answer.values()) == [{"ok": "pong"}]


def test_what_was_not_acked_is_given_back(broker: BrokerThread) -> None:
    with Connection(broker.url) as first, first.SimpleQueue("work") as queue:
        queue.put({"number": 1})
        assert queue.get(timeout=PATIENCE_S).payload == {"number": 1}
        assert queue.qsize() == 0, "it is not ready, but held"
    with Connection(broker.url) as second, second.SimpleQueue("work") as queue:
        again = queue.get(timeout=PATIENCE_S)
        again.ack()
        assert again.payload == {"number": 1}
        with pytest.raises(queue.Empty):
            queue.get(timeout=0.1)


def test_what_was_held_too_long_is_left_to_others(broker: BrokerThread) -> None:
    """And the channel goes on: the message's place in its window is free again."""
    with Connection(broker.url, transport_options={"visibility_timeout": 3.0}) as connection:
        queue = connection.SimpleQueue("work")
        for number in range(4):
            queue.put(number)
        messages = [queue.get(timeout=PATIENCE_S) for _ in range(4)]
        held = list(queue.channel._held.values())
        wait_until(lambda: not any(one.in_hand for _, one in held), what="their time is over")
        for message, settle in zip(messages, ("ack", "reject", "requeue"), strict=False):
            getattr(message, settle)()
        window = queue.channel.qos
        assert len(window._delivered.keys() - window._dirty) == 1
        queue.put("next")
        again = queue.get(timeout=PATIENCE_S)
        again.ack()
        assert again.payload == "next"
        queue.close()
    with txmq.connect(broker.url) as client:
        assert not list(client.letters(QUEUE("work")))


def test_what_is_no_message_of_kombu_is_a_dead_letter(broker: BrokerThread) -> None:
    enveloped = b'{"body": %s, "headers": {}, "properties": {"delivery_info": {}, %s}}'
    bodies = (
        *(b"no JSON", b"[1]", b'{"properties": {}}', b"\xff\xfe", b"[" * 100_000),
        enveloped % (b"5", b'"body_encoding": "base64"'),
        enveloped % (b'"x"', b'"body_encoding": "base64"'),
        enveloped % (b'"x"', b'"body_encoding": []'),
    )
    with txmq.connect(broker.url) as client:
        for body in bodies:
            client.send(QUEUE("work"), body)
        with Connection(broker.url) as connection, connection.SimpleQueue("work") as queue:
            queue.put("x")
            message = queue.get(timeout=PATIENCE_S)
            message.ack()
            assert message.payload == "x"
            with pytest.raises(queue.Empty):
                queue.get_nowait()
        wait_until(
            lambda: len(list(client.letters(QUEUE("work")))) == len(bodies), what="dead letters"
        )


def test_an_address_of_ipv6_keeps_its_brackets() -> None:
    assert address_of(Connection("txmq://[::1]:7650")) == "txmq://[::1]:7650"


def test_the_url_s_user_and_the_options_of_tls_go_to_the_client() -> None:
    secret = Connection("txmq://ann:s%2Fcret@mq:7651", ssl={"ca_certs": "/etc/ca.pem"})
    assert address_of(secret) == "txmqs://ann:s%2Fcret@mq:7651?ca=%2Fetc%2Fca.pem"
    assert address_of(Connection("txmq://mq", ssl=True)) == "txmqs://mq:7650"
    assert address_of(Connection("txmq://")) == "txmq://127.0.0.1:7650"


def test_a_rejected_message_is_a_dead_letter(broker: BrokerThread) -> None:
    with Connection(broker.url) as connection, connection.SimpleQueue("work") as queue:
        queue.put("x")
        queue.get(timeout=PATIENCE_S).reject()
        queue.put("y")
        first = queue.get(timeout=PATIENCE_S)
        assert not first.delivery_info["redelivered"]
        first.requeue()
        second = queue.get(timeout=PATIENCE_S)
        assert second.payload == "y"
        assert second.delivery_info["redelivered"]
        queue.channel.basic_ack(first.delivery_tag)  # late: it is another delivery's by now
        [(_consumer, delivered)] = queue.channel._held.values()
        assert delivered.in_hand
        with txmq.connect(broker.url) as client:
            group = QUEUE("work")
            wait_until(lambda: len(list(client.letters(group))) == 1, what="a dead letter")


def test_sends_without_confirmation_tell_of_their_errors_later(tmp_path: Path) -> None:
    options = {"confirm_publish": False}
    with BrokerThread(tmp_path / "data") as broker:
        with (
            Connection(broker.url, transport_options=options) as connection,
            connection.SimpleQueue("work") as queue,
        ):
            for number in range(500):
                queue.put(number)
        with Connection(broker.url, transport_options=options) as other:
            queue = other.SimpleQueue("work")  # the close above has waited for them
            assert queue.qsize() == 500
            with pytest.raises(MessageTooLarge):
                queue.put("x" * 5_000_000)
            queue.put("stored, and so the topic is known")
            wait_until(lambda: queue.qsize() == 501, what="the last before the broker's end")
            broker.stop()
            queue.put("lost")
            queue.put("lost, too")
            other.transport.link.client.close(timeout=0)
            with pytest.raises(OperationalError, match="2 messages sent before"):
                queue.put("not sent")


def test_a_refusal_is_no_lost_connection(broker: BrokerThread) -> None:
    """Celery would send the task once more, over a new connection."""
    with Connection(broker.url) as connection:
        producer = connection.Producer()
        before = connection.default_channel
        with pytest.raises(MessageTooLarge):
            producer.publish("x" * 5_000_000, routing_key="work", retry=True)
        assert connection.default_channel is before


def test_a_purge_leaves_an_empty_queue(broker: BrokerThread) -> None:
    with Connection(broker.url) as connection, connection.SimpleQueue("work") as queue:
        for number in range(3):
            queue.put(number)
        assert (queue.clear(), queue.qsize()) == (3, 0)
        queue.put("later")
        assert queue.get(timeout=PATIENCE_S).payload == "later"


def test_a_fanout_reaches_everybody_who_listens(broker: BrokerThread) -> None:
    news = Exchange("news", type="fanout", durable=False)
    heard: dict[str, list[object]] = {"a": [], "b": []}
    with Connection(broker.url) as one, Connection(broker.url) as two:
        for connection, name in ((one, "a"), (two, "b")):
            consumer = connection.Consumer(
                Queue(f"news@{name}", news, auto_delete=True),
                callbacks=[hear(heard[name])],
            )
            consumer.consume()
        with txmq.connect(broker.url) as client:  # of others, which stops nobody
            for body in (b"{", STRANGE):
                client.send(Names().exchange("news"), body)
        one.Producer().publish("hello", exchange=news, declare=[news])
        for connection in (one, two):
            connection.drain_events(timeout=PATIENCE_S)
        with pytest.raises(socket.timeout):
            one.drain_events(timeout=0.05)
    assert heard == {"a": ["hello"], "b": ["hello"]}


def test_a_killed_worker_s_task_is_done_by_the_next_one(
    broker: BrokerThread, tmp_path: Path
) -> None:
    with Celery(broker=broker.url) as sender:
        sender.send_task("tests.frameworks.celery_app.die_once", (str(tmp_path),))
    with worker_process(broker, tmp_path) as first:
        wait_until(lambda: first.poll() is not None, what="the worker has died")
    assert (tmp_path / "first").exists()
    assert not (tmp_path / "second").exists()
    with worker_process(broker, tmp_path):
        second = tmp_path / "second"
        wait_until(lambda: second.exists() and second.read_text(), what="the task is done")
    assert second.read_text() == "True", "the second one is told that there was a first"


def test_a_busy_worker_hears_remote_control(broker: BrokerThread, tmp_path: Path) -> None:
    """Its only process is busy, and more tasks wait than it takes ahead."""
    held = [str(tmp_path / f"held {number}") for number in range(12)]
    with Celery(broker=broker.url) as sender, worker_process(broker, tmp_path):
        tasks = {
            file: sender.send_task("tests.frameworks.celery_app.hold", (file,)) for file in held
        }

        def running() -> list[str]:
            return [file for file in held if Path(file).exists()]

        wait_until(running, what="a task runs")
        [answer] = sender.control.ping(timeout=PATIENCE_S, limit=1)
        assert list(answer.values()) == [{"ok": "pong"}]
        [first] = running()
        [active] = sender.control.broadcast("active", reply=True, timeout=PATIENCE_S, limit=1)
        [[shown]] = active.values()
        assert shown["id"] == tasks[first].id
        sender.control.revoke(tasks[first].id, terminate=True, signal="SIGKILL")
        wait_until(lambda: len(running()) == 2, what="the next task runs")


def test_queues_do_not_share_topics() -> None:
    names = ("a_b", "a.b", "a@b", "a_40b", "ä", "control", "q.control")
    assert len({QUEUE(name) for name in names}) == len(names)
    assert QUEUE("celery") == "kombu.q.celery"


@pytest.mark.parametrize(
    ("headers", "due"),
    [
        ({"eta": "2026-01-02T03:04:05+00:00"}, datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ({"eta": "2026-01-02T03:04:05"}, datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ({"eta": None}, None),
        ({}, None),
        (None, None),
    ],
)
def test_an_eta_is_a_time_of_delivery(headers: Any, due: datetime | None) -> None:
    assert due_at({"headers": headers}) == due
