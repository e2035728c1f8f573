"""Typed topics: bodies are checked at the send and at the receipt, in all faces."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from threading import Event
from typing import Annotated, Any, Literal

import msgpack
import pytest
from pydantic import BaseModel, Field

import txmq
import txmq.aio
import txmq.twisted
from tests.client.reactor_thread import InReactor
from tests.client.real import RealBroker
from tests.client.real_consumers import drain, shown
from tests.client.scripted_member import fresh
from txmq.client.blocking.client import Client
from txmq.client.blocking.typed import TypedTopic
from txmq.client.protocol.typed.bodies import TypedBodies
from txmq.errors import BodyMismatch, ConfigError, IncompatibleSchema, LocalProtocolError
from txmq.model.message import Message, ReceivedMessage
from txmq.testing.wait import PATIENCE_S, wait_until

NAME = "txmq.errors.base.BodyMismatch"


class Order(BaseModel):
    """A body."""

    id: int
    region: Annotated[str, Field(alias="Region", max_length=3)] = "eu"
    at: datetime | None = None


class OrderWithNote(Order):
    """A later version of the body, which older ones do not fit."""

    note: str


class Paid(BaseModel):
    """One of two kinds of body."""

    kind: Literal["paid"]


class Sent(BaseModel):
    """The other kind."""

    kind: Literal["sent"]
    to: str


GOOD, BAD = Order(id=1, at=datetime(2026, 1, 1, tzinfo=UTC)), b'{"id": "one"}'


@pytest.fixture
def client(shared_broker: RealBroker) -> Iterator[Client]:
    with txmq.connect(shared_broker.url, service="tests", timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def orders(client: Client) -> TypedTopic[Order]:
    client.call("topic.create", name=(topic := fresh("t")), partitions=1)
    return client.topic(topic, Order)


def letters(client: Client, group: str) -> list[tuple[int, str]]:
    return [(letter.offset, letter.error_text.splitlines()[-1]) for letter in
            client.letters(group, error_type=NAME)]  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"format": "msgpack"},
                                     {"format": "cloudevents", "source": "/shop"}])  # fmt: skip
def test_a_value_goes_into_a_body_and_comes_back(options: Any) -> None:
    bodies = TypedBodies("t", Order, **options)
    message = bodies.message(GOOD, key="k", headers={"h": "v"})
    headers = dict(message.headers or {})
    assert (message.key, headers.pop("h")) == ("k", "v")
    tree = msgpack.unpackb if options.get("format") == "msgpack" else json.loads
    assert tree(message.body) == {"id": 1, "Region": "eu", "at": "2026-01-01T00:00:00Z"}
    received = ReceivedMessage(
        "t", 0, 0, "k", None, dict(message.headers or {}), message.body, "", 1, 0, 0
    )
    assert bodies.value(received) == TypedBodies("t", Order).value(received) == GOOD
    told = {name for name in headers if name.startswith("ce_")}
    if "source" in options:
        assert headers["ce_source"] == "/shop"
        assert headers["ce_type"] == "Order"
        assert told >= {"ce_id", "ce_specversion", "ce_time"}
    else:
        assert not told
        assert bool(headers) is (options.get("format") == "msgpack")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (Order.model_construct(id="one"), "id: Input should be a valid integer"),
        (Order.model_construct(id=1, region="europe"), "Region: String should have at most"),
        (object(), "Unable to serialize unknown type"),
        ({"Region": "eu"}, "id: is missing"),
    ],
)
def test_a_value_that_the_model_would_not_read_is_not_sent(value: Any, why: str) -> None:
    with pytest.raises(BodyMismatch, match=f"a body for topic 't' is no Order: .*{why}"):
        TypedBodies("t", Order).message(value)


@pytest.mark.parametrize("body", [BAD, b"", b"\xff", b"[]", b'{"id": 1, "Region": "europe"}'])
@pytest.mark.parametrize("headers", [{}, {"content-type": "application/msgpack"}])
def test_a_body_that_does_not_fit_is_a_mismatch(body: bytes, headers: dict[str, str]) -> None:
    with pytest.raises(BodyMismatch, match="the body is no Order: "):
        TypedBodies("t", Order).decode(body, headers)


def test_any_type_that_pydantic_describes_is_a_model_and_others_are_refused() -> None:
    either: Any = Annotated[Paid | Sent, Field(discriminator="kind")]
    bodies = TypedBodies[Any]("t", either)
    assert bodies.decode(b'{"kind":"sent","to":"x"}', {}) == Sent(kind="sent", to="x")
    with pytest.raises(ConfigError, match="model"):
        TypedBodies("t", Client)
    wrong: Any = {"format": "xml"}
    for options in (wrong, {"format": "cloudevents"}, {"source": "x"}):
        with pytest.raises(LocalProtocolError):
            TypedBodies("t", Order, **options)


def test_values_go_by_every_send_and_reach_handlers(
    client: Client, orders: TypedTopic[Order], tmp_path: Path
) -> None:
    assert orders.send(Order(id=0), key="k").offset == 0
    assert orders.send_async(Order(id=1)).result(PATIENCE_S).offset == 1
    orders.send_batch([Order(id=2), orders.message(Order(id=3), key="k")])
    orders.send_many([Order(id=4)], keys=["k"])
    with client.transaction() as tx:
        orders.within(tx).send(Order(id=5), key="k")
    tx.wait_published(PATIENCE_S)
    with pytest.raises(BodyMismatch), client.transaction() as tx:
        orders.within(tx).send(Order.model_construct(id="x"))
    values = []
    with client.consumer(fresh("g"), [orders], mode="ordered") as consumer:
        drain(client, consumer, lambda message: values.append(message.value.id))
    assert sorted(values) == [0, 1, 2, 3, 4, 5]
    with client.reader("r", [orders], txmq.FileOffsets(tmp_path)) as reader:
        read = [orders.value(next(iter(reader))).id for _ in range(6)]
    assert read == [0, 1, 2, 3, 4, 5]


def test_what_does_not_fit_is_dead_lettered_before_any_handler(
    client: Client, orders: TypedTopic[Order]
) -> None:
    group, seen = fresh("g"), list[int]()
    good, bad = orders.message(GOOD).body, Message(BAD, "k")
    client.send_batch(orders.name, [Message(good), bad, Message(good, "k"), Message(good, "other")])
    with client.consumer(group, [orders], mode="ordered") as consumer:
        drain(
            client,
            consumer,
            lambda messages: seen.extend(m.offset for m in messages),
            lambda: shown(client, group)["parked"],
            batch=9,
        )
        assert seen == [0, 3], "the next message of the key is parked behind the letter"
        told = "BodyMismatch: the body is no Order: id: Input should be a valid integer"
        [(offset, error)] = letters(client, group)
        assert (offset, told in error) == (1, True)
        [letter] = client.letters(group, bodies=True)
        client.edit_letter(letter, body=good, operator="kim", reason="as it was meant")
        client.call("dlq.replay", group=group, letters=[[orders.name, 0, 1]])
        stop = Event()

        def handle(message: Any) -> None:
            seen.append(message.offset)
            if len(seen) == 4:
                stop.set()

        consumer.run(handle, stop=stop)
    assert seen == [0, 3, 1, 2]


def test_a_flood_of_what_does_not_fit_passes(client: Client, orders: TypedTopic[Order]) -> None:
    group = fresh("g")
    client.send_many(orders.name, [BAD] * 200)
    last = orders.send(GOOD)
    with client.consumer(group, [orders]) as consumer:
        message = consumer.receive(PATIENCE_S)
        assert message is not None
        assert (message.offset, message.value) == (last.offset, GOOD)
        assert orders.value(message) is message.value
        assert pickle.loads(pickle.dumps(message)) == message
        wait_until(lambda: len(letters(client, group)) == 200, what="the letters")


def test_batches_of_columns_have_values_and_leave_out_what_does_not_fit(
    client: Client, orders: TypedTopic[Order]
) -> None:
    bodies = [orders.encode(Order(id=number)) for number in range(4)]
    client.send_many(orders.name, [bodies[0], BAD, bodies[2], bodies[3]])
    with client.consumer(fresh("g"), [orders]) as consumer:
        batch = consumer.receive_batch(PATIENCE_S)
        assert batch is not None
        assert list(batch.offsets) == [0, 2, 3]
        assert [value.id for value in batch.values] == [0, 2, 3]
        assert [message.value.id for message in batch.messages()] == [0, 2, 3]
        assert list(batch.bodies) == [bodies[0], *bodies[2:]]
        consumer.ack_batch(batch, wait=True)
        assert consumer.stats.acked == 3


def test_other_topics_of_the_consumer_are_not_looked_at(
    client: Client, orders: TypedTopic[Order]
) -> None:
    plain = fresh("t")
    client.send(plain, BAD)
    with client.consumer(fresh("g"), [orders, plain]) as consumer:
        message = consumer.receive(PATIENCE_S)
        assert message is not None
        assert (message.body, message.value) == (BAD, None)
        with pytest.raises(LocalProtocolError, match="use the model of the message's topic"):
            orders.value(message)


def test_the_schema_of_a_model_is_stored_and_its_changes_are_judged(
    client: Client, orders: TypedTopic[Order]
) -> None:
    assert orders.set_schema(operator="kim")["compatibility"] == "backward"
    assert json.loads(client.call("topic.show", name=orders.name)["schema"])["title"] == "Order"
    later = client.topic(orders.name, OrderWithNote)
    with pytest.raises(IncompatibleSchema, match="note: is required, and may be missing"):
        later.set_schema()
    assert later.set_schema(force=True)["breaks"] == ["$.note: is required, and may be missing"]


def test_the_twisted_face_has_the_same(
    reactor: Any, shared_broker: RealBroker, in_reactor: InReactor, client: Client
) -> None:
    group = fresh("g")

    async def story() -> None:
        own = txmq.twisted.connect(reactor, shared_broker.url, service="tests", timeout=PATIENCE_S)
        async with own:
            topic = fresh("t")
            await own.call("topic.create", name=topic, partitions=1)
            orders = own.topic(topic, Order)
            assert (await orders.send(Order(id=0))).offset == 0
            await own.send(topic, BAD)
            await orders.send_batch([Order(id=2)])
            await orders.send_many([Order(id=3)])
            async with own.transaction() as tx:
                orders.within(tx).send(Order(id=4))
            await orders.set_schema()
            async with await own.consumer(group, [orders]) as consumer:
                found = [await consumer.receive(PATIENCE_S) for _ in range(4)]
                assert [one and one.value.id for one in found] == [0, 2, 3, 4]
            with pytest.raises(BodyMismatch):
                await orders.send(Order.model_construct(id="x"))

    in_reactor(story)
    wait_until(lambda: [one for one, _text in letters(client, group)] == [1], what="the letter")


def test_a_consumer_without_models_has_the_plain_operations(
    client: Client, joined: Callable[..., Any]
) -> None:
    from txmq.client.protocol.consumer.operations import Operations

    consumer = joined(fresh("g"), fresh("t"))
    assert type(consumer._members.members[0].operations) is Operations


def test_the_asyncio_face_has_the_same(shared_broker: RealBroker, client: Client) -> None:
    group, topic = fresh("g"), fresh("t")
    client.call("topic.create", name=topic, partitions=1)

    async def story() -> list[int]:
        async with txmq.aio.connect(shared_broker.url, service="tests", timeout=PATIENCE_S) as own:
            orders = own.topic(topic, Order)
            assert (await orders.send(Order(id=0))).offset == 0
            await own.send(topic, BAD)
            await (await orders.send_async(Order(id=2)))
            await orders.send_many([Order(id=3)])
            async with own.transaction() as tx:
                orders.within(tx).send(Order(id=4))
            await orders.set_schema()
            async with await own.consumer(group, [orders]) as consumer:
                found = [await consumer.receive(PATIENCE_S) for _ in range(4)]
                with pytest.raises(BodyMismatch):
                    await orders.send(Order.model_construct(id="x"))
                return [one.value.id for one in found if one is not None]

    assert asyncio.run(story()) == [0, 2, 3, 4]
    wait_until(lambda: [one for one, _text in letters(client, group)] == [1], what="the letter")
