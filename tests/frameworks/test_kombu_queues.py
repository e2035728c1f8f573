"""Queues and exchanges of Kombu's, as programs that come from RabbitMQ expect them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from kombu import Connection, Consumer, Exchange, Producer, Queue
from kombu.asynchronous.hub import Hub
from kombu.exceptions import ChannelError

import txmq
import txmq.kombu
from tests.client.scripted_member import fresh
from txmq.errors import UnknownTopic
from txmq.kombu.address import Names
from txmq.kombu.bindings import Binding, Bindings
from txmq.kombu.messages import lifetime
from txmq.testing.broker_thread import BrokerThread
from txmq.testing.wait import PATIENCE_S, wait_until

NAMES = Names()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerThread]:
    with BrokerThread(tmp_path_factory.mktemp("broker") / "data") as broker:
        yield broker


@pytest.fixture
def connection(broker: BrokerThread) -> Iterator[Connection]:
    with Connection(broker.url) as connection:
        yield connection


@pytest.fixture
def other(broker: BrokerThread) -> Iterator[Connection]:
    """Another program."""
    with Connection(broker.url) as connection:
        yield connection


@pytest.fixture
def client(broker: BrokerThread) -> Iterator[txmq.Client]:
    with txmq.connect(broker.url, timeout=PATIENCE_S) as client:
        yield client


def lag(client: txmq.Client, queue: str) -> int:
    return int(client.call("group.show", group=NAMES.queue(queue))["unsettled"])


def test_what_needs_no_ack_does_not_come_again(connection: Connection, client: txmq.Client) -> None:
    name = fresh("work")
    with connection.SimpleQueue(name, no_ack=True) as queue:
        for number in range(30):
            queue.put(number)
        first = [queue.get(timeout=PATIENCE_S).payload for _ in range(20)]
        then = [queue.get_nowait().payload for _ in range(10)]
        assert sorted(first + then) == list(range(30))
        assert not queue.channel._held
        wait_until(lambda: lag(client, name) == 0, what="the acks")


def test_a_get_finds_all_that_waits_and_takes_no_more(
    connection: Connection, other: Connection, client: txmq.Client
) -> None:
    name = fresh("work")
    for number in range(20):
        with connection.SimpleQueue(name) as queue:
            queue.put(number)
    got = list[int]()
    with connection.SimpleQueue(name) as one, other.SimpleQueue(name) as two:
        one.get_nowait().requeue()
        one.get_nowait().requeue()
        while len(got) < 20:
            for queue in (one, two):  # each has partitions of its own
                try:
                    message = queue.get_nowait()
                except queue.Empty:
                    continue
                message.ack()
                got.append(message.payload)
        for queue in (one, two):
            with pytest.raises(queue.Empty):
                queue.get_nowait()
        assert client.call("group.show", group=NAMES.queue(name))["members"] == 0
    assert sorted(got) == list(range(20))


def test_a_queue_counts_what_is_ready(connection: Connection) -> None:
    with connection.SimpleQueue(fresh("work")) as queue:
        for number in range(3):
            queue.put(number)
        held = queue.get(timeout=PATIENCE_S)
        assert queue.qsize() == 2
        assert queue.queue.queue_declare(passive=True).message_count == 2
        held.requeue()
        wait_until(lambda: queue.qsize() == 3, what="it is ready again")


def test_what_is_said_of_messages_of_a_deleted_queue_changes_nothing(
    connection: Connection,
) -> None:
    with connection.SimpleQueue(fresh("work")) as queue:
        queue.put("x")
        queue.put("y")
        messages = [queue.get(timeout=PATIENCE_S) for _ in range(2)]
        queue.queue.delete()
        messages[0].ack()
        messages[1].requeue()
        with pytest.raises(ChannelError, match="NOT_FOUND"):
            queue.qsize()


def test_bindings_of_other_programs_count(connection: Connection, other: Connection) -> None:
    exchange = Exchange(fresh("news"), type="topic")
    queue = Queue(fresh("germany"), exchange, routing_key="*.de")
    queue(connection).declare()
    with pytest.raises(ChannelError, match="PRECONDITION_FAILED"):
        Exchange(exchange.name, type="direct")(other).declare()
    producer = Producer(
        other, Exchange(exchange.name), auto_declare=False
    )  # it knows the name alone
    producer.publish("paris", routing_key="a.fr")
    producer.publish("berlin", routing_key="a.de")
    with connection.SimpleQueue(queue) as got:
        message = got.get(timeout=PATIENCE_S)
        message.ack()
        assert message.payload == "berlin"
        assert got.qsize() == 0
    queue(connection).unbind_from(exchange, "*.de")
    producer.publish("bonn", routing_key="a.de")
    assert queue(connection).queue_declare(passive=True).message_count == 0


def test_a_lasting_queue_of_a_fanout_keeps_messages(
    connection: Connection, other: Connection
) -> None:
    exchange = Exchange(fresh("news"), type="fanout")
    queues = [Queue(fresh("lasting"), exchange) for _ in range(2)]
    for queue in queues:
        queue(connection).declare()
    connection.close()
    Producer(other, exchange).publish("kept")
    for queue in queues:
        with other.SimpleQueue(queue) as simple:
            assert simple.get_nowait().payload == "kept"


def test_a_passive_declaration_of_what_is_not_there_raises(
    connection: Connection, other: Connection
) -> None:
    exchange, queue = Exchange(fresh("x"), passive=True), Queue(fresh("q"))
    with pytest.raises(ChannelError, match="NOT_FOUND"):
        queue(other).queue_declare(passive=True)
    with pytest.raises(ChannelError, match="NOT_FOUND"):
        exchange(other).declare()
    queue(connection).declare()
    Exchange(exchange.name, type="topic")(connection).declare()
    assert queue(other).queue_declare(passive=True).message_count == 0
    exchange(other).declare()
    queue(connection).delete()
    with pytest.raises(ChannelError, match="NOT_FOUND"):
        queue(other).queue_declare(passive=True)


def test_messages_expire(connection: Connection) -> None:
    lasting, brief = Queue(fresh("work")), Queue(fresh("brief"), message_ttl=0.01)
    began = time.monotonic()
    for queue, expiration in ((lasting, 0.01), (brief, None), (brief, 60)):
        connection.Producer().publish(
            "gone", routing_key=queue.name, declare=[queue], expiration=expiration
        )
    connection.Producer().publish("there", routing_key=lasting.name, expiration=3600)
    wait_until(lambda: time.monotonic() > began + 0.02, what="the first ones expire")
    with connection.SimpleQueue(lasting) as simple:
        assert simple.get(timeout=PATIENCE_S).payload == "there"
        with pytest.raises(simple.Empty):
            simple.get_nowait()
    assert brief(connection).get() is None


@pytest.mark.parametrize(
    ("expiration", "longest", "seconds"),
    [(None, None, None), ("1500", None, 1.5), (None, 2.0, 2.0), ("1500", 1.0, 1.0)],
)
def test_the_shorter_time_to_live_counts(
    expiration: str | None, longest: float | None, seconds: float | None
) -> None:
    properties = {} if expiration is None else {"expiration": expiration}
    assert lifetime({"properties": properties}, longest) == seconds
    assert lifetime({"properties": {"expiration": "0"}}) == 0.001


def test_virtual_hosts_do_not_meet(broker: BrokerThread) -> None:
    with Connection(f"{broker.url}/a") as one, Connection(f"{broker.url}/b") as two:
        news = Exchange("news", type="fanout")
        heard = {"a": list[object](), "b": list[object]()}
        for connection, host in ((one, "a"), (two, "b")):
            Consumer(
                connection,
                [Queue(fresh("mine"), news, auto_delete=True)],
                callbacks=[lambda body, _message, host=host: heard[host].append(body)],
                no_ack=True,
            ).consume()
        for connection, body in ((two, "b"), (one, "a")):
            Producer(connection, news).publish(body)
            connection.SimpleQueue("work").put(body)
        for connection in (one, two):
            connection.drain_events(timeout=PATIENCE_S)
        assert heard == {"a": ["a"], "b": ["b"]}
        assert one.SimpleQueue("work").get_nowait().payload == "a"
    hosts = (None, "a", "a.q.x", "a/b", "q")
    names = [Names(host).queue(queue) for host in hosts for queue in ("x.q.y", "q.y", "y")]
    assert len(set(names)) == len(names)
    assert Names("/").queue("celery") == Names("").queue("celery") == "kombu.q.celery"


def test_a_queue_that_is_deleted_with_its_consumer_leaves_no_topic(
    connection: Connection, client: txmq.Client
) -> None:
    name = fresh("replies")
    with connection.channel() as channel:
        queue = Queue(name, auto_delete=True, durable=False)
        consumer = Consumer(channel, [queue], callbacks=[lambda *_: None], no_ack=True)
        with consumer:
            connection.Producer().publish("x", routing_key=name)
            connection.drain_events(timeout=PATIENCE_S)
        client.call("topic.show", name=NAMES.queue(name))
    with pytest.raises(UnknownTopic):
        client.call("topic.show", name=NAMES.queue(name))


def test_an_event_loop_delivers_as_many_as_may_be_in_hand(
    connection: Connection, other: Connection
) -> None:
    hub, got = Hub(), list[Any]()
    queue = Queue(fresh("work"))
    consumer = Consumer(connection, [queue], callbacks=[lambda _body, message: got.append(message)])
    consumer.qos(prefetch_count=2)
    try:
        with consumer:
            connection.register_with_event_loop(hub)
            for number in range(5):
                Producer(other).publish(number, routing_key=queue.name)

            def goes_on(count: int) -> bool:
                hub.run_once()
                return len(got) == count

            wait_until(lambda: goes_on(2), what="two messages")
            for number in range(3):
                got[number].ack()
                wait_until(partial(goes_on, 3 + number), what="another one")
            assert {message.payload for message in got} == set(range(5))
    finally:
        hub.close()


def test_old_records_of_bindings_are_written_anew(client: txmq.Client) -> None:
    topic = fresh("bindings")
    one, two = Bindings(client, topic), Bindings(client, topic)
    binding = Binding("news", "direct", "de", None, "germany")
    one.add(binding)
    two.add(binding)  # it is known
    strange = (b"nobody's", b"[" * 100_000, b"[]", b'{"binding": [], "bound": true}')
    record = b'{"binding": ["news", "%s", "k", "%s", "q"], "bound": true}'
    for body in (*strange, record % (b"no type", b"x"), record % (b"topic", b"(")):
        client.send(topic, body)
    stored = len(list(client.find(topic)))
    assert stored == 7
    two._stored_at[binding] = 0.0
    two.refresh()
    assert len(list(client.find(topic))) == stored + 1
    two.remove(queue="germany")
    one.refresh()
    assert one.table("news") == []
