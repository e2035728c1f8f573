"""A broker of FastStream over txmq, in memory and with a real broker."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import pytest
from faststream import AckPolicy, BaseMiddleware, Context, Depends, FastStream, Header, TestApp
from faststream.exceptions import AckMessage, NackMessage, RejectMessage, StopConsume
from faststream.specification import AsyncAPI
from pydantic import BaseModel, NonNegativeInt, ValidationError

import txmq
from tests.client.real import RealBroker
from tests.client.scripted_member import fresh
from tests.frameworks.stories import run, until
from txmq.client.blocking.client import Client
from txmq.errors import LocalProtocolError
from txmq.model.retry import RetryPolicy
from txmq.testing.wait import PATIENCE_S
from txmq_faststream import (
    TestTxmqBroker,
    TxmqBroker,
    TxmqMessage,
    TxmqPublisher,
    TxmqResponse,
    TxmqRoute,
    TxmqRouter,
)

SOON: Any = {"retry": RetryPolicy((0.01,), retries=1)}


class Order(BaseModel):
    """A body."""

    name: str
    amount: NonNegativeInt = 1


@pytest.fixture
def broker(real: RealBroker) -> TxmqBroker:
    return make(real)


def make(real: RealBroker, **options: Any) -> TxmqBroker:
    settings: Any = {"timeout": PATIENCE_S}
    return TxmqBroker(real.url, group=fresh("g"), client=settings, logger=None, **options)


def lag(client: Client, group: str) -> int:
    return int(client.call("group.show", group=group)["unsettled"])


def letters(client: Client, group: str) -> list[txmq.DeadLetter]:
    return list(client.letters(group, bodies=True))


# FastStream's own examples, in memory


def test_the_first_example_of_faststream_with_its_test_broker() -> None:
    broker = TxmqBroker(group="g")
    app = FastStream(broker)

    @broker.subscriber("in")
    @broker.publisher("out")
    async def handle(order: Order, logger: Annotated[Any, Context()]) -> str:
        logger.info(order)
        return f"{order.name}: {order.amount}"

    @broker.subscriber("out")
    async def finish(text: str) -> None: ...

    async def story() -> None:
        async with TestTxmqBroker(broker) as tested, TestApp(app):
            await tested.publish(Order(name="o-1", amount=2), "in")
            handle.mock.assert_called_once_with({"name": "o-1", "amount": 2})
            finish.mock.assert_called_once_with("o-1: 2")
            with pytest.raises(ValidationError):
                await tested.publish({"name": "o-2", "amount": -1}, "in")

    run(story)


def test_routers_filters_dependencies_headers_and_requests_in_memory() -> None:
    async def routed(text: str, twice: Annotated[str, Depends(lambda: "2")]) -> str:
        return text * int(twice)

    router = TxmqRouter("eu.", [TxmqRoute(routed, "in", publishers=[TxmqPublisher("out")])])
    broker = TxmqBroker(group="g", routers=[router])
    seen = list[str]()

    async def is_letter(message: TxmqMessage) -> bool:
        return message.headers.get("kind") == "letter"

    mail = broker.subscriber("mail")

    @mail(filter=is_letter)
    async def letter(text: str, kind: Annotated[str, Header()]) -> None:
        seen.append(f"{kind} {text}")

    @mail
    async def parcel(text: str) -> TxmqResponse:
        seen.append(f"parcel {text}")
        return TxmqResponse("got it", key="k", headers={"by": "post"})

    @broker.subscriber("eu.out")
    async def out(text: str) -> None:
        seen.append(text)

    async def story() -> None:
        async with TestTxmqBroker(broker) as tested:
            await tested.publish("a", "mail", headers={"kind": "letter"})
            answer = await tested.request("b", "mail", correlation_id="c-1")
            assert await answer.decode() == "got it"
            assert (answer.headers["by"], answer.correlation_id) == ("post", "c-1")
            await tested.publish_batch("x", "y", topic="eu.in")

    run(story)
    assert seen == ["letter a", "parcel b", "xx", "yy"]


def test_a_subscriber_that_is_added_later_is_heard_in_memory() -> None:
    broker, seen = TxmqBroker(group="g"), list[str]()

    async def story() -> None:
        async with TestTxmqBroker(broker) as tested:
            subscriber = broker.subscriber("later", atomic=True)

            @subscriber
            async def handle(text: str) -> None:
                seen.append(text)

            await subscriber.start()
            await tested.publish("a", "later")
            await subscriber.stop()

    run(story)
    assert seen == ["a"]


def test_the_document_of_asyncapi_names_topics_and_bodies() -> None:
    broker = TxmqBroker("txmqs://ann:secret@mq:7650?ca=ca.pem", group="g", description="orders")

    @broker.subscriber("orders", title="Orders")
    @broker.publisher("invoices")
    async def handle(order: Order) -> int:
        return order.amount

    document = AsyncAPI(broker, title="Shop").to_specification().to_jsonable()
    [server] = document["servers"].values()
    assert (server["host"], server["protocol"]) == ("mq:7650", "txmqs")
    assert {one["address"] for one in document["channels"].values()} == {"orders", "invoices"}
    assert {one["action"] for one in document["operations"].values()} == {"receive", "send"}
    assert document["components"]["schemas"]["Order"]["required"] == ["name"]
    older = AsyncAPI(broker, schema_version="2.6.0").to_specification().to_jsonable()
    assert "secret" not in str(older) + str(document)
    assert older["channels"].keys() == {"Orders", "invoices:Publisher"}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, "no topic"),
        ({"topics": ["t"], "max_workers": 0}, "max_workers is 0"),
        ({"topics": ["t"], "batch": 0}, "batch is 0"),
        ({"topics": ["t"], "atomic": True, "ack_policy": AckPolicy.ACK}, "atomic"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_declared(arguments: Any, error: str) -> None:
    with pytest.raises(LocalProtocolError, match=error) as refused:
        TxmqBroker().subscriber(*arguments.pop("topics", ()), **arguments)
    assert refused.value.hint


# With a real broker


def test_what_a_handler_publishes_names_its_cause(broker: TxmqBroker, client: Client) -> None:
    topic, effects = fresh("t"), fresh("effects")

    @broker.subscriber(topic)
    @broker.publisher(effects)
    async def handle(text: str) -> str:
        return text

    async def story() -> str:
        async with broker:
            await broker.start()
            receipt = await broker.publish("first", topic)
            assert receipt is not None
            await until(lambda: lag(client, broker.config.group) == 0)
            return receipt.message_id

    cause = run(story)
    [effect] = client.find(effects)
    assert (effect.headers["causation"], effect.headers["correlation"]) == (cause, cause)


def test_messages_come_with_headers_key_and_context(
    broker: TxmqBroker, real: RealBroker, client: Client
) -> None:
    topic, seen = fresh("t"), list[Any]()

    @broker.subscriber(topic, max_workers=4)
    async def handle(order: Order, message: TxmqMessage, shop: Annotated[str, Header()]) -> None:
        raw = message.raw_message
        seen.append((order.name, shop, message.correlation_id, raw.key, raw.attempt))

    async def story() -> None:
        async with broker:
            await broker.start()
            assert await broker.ping(PATIENCE_S)
            receipt = await broker.publish(
                Order(name="o-1"), topic, key="k", headers={"shop": "eu"}, correlation_id="c-1"
            )
            assert receipt is not None
            assert receipt.offset == 0
            await until(lambda: seen)
            await until(lambda: lag(client, broker.config.group) == 0)
        assert not await broker.ping(1.0)

    run(story)
    assert seen == [("o-1", "eu", "c-1", "k", 1)]
    [stored] = client.find(topic)
    assert stored.headers["content-type"] == "application/json"


def test_the_test_broker_watches_a_real_one_as_well(broker: TxmqBroker) -> None:
    topic = fresh("t")

    @broker.subscriber(topic)
    @broker.publisher(fresh("t"))
    async def handle(text: str) -> str:
        return text.upper()

    async def story() -> None:
        async with TestTxmqBroker(broker, with_real=True) as tested:
            await tested.publish("a", topic)
            await handle.wait_call(timeout=PATIENCE_S)
            handle.mock.assert_called_once_with("a")

    run(story)


def test_a_request_is_answered_by_a_handler_of_another_process(real: RealBroker) -> None:
    topic = fresh("t")
    asks, answers = make(real, reply_topic=fresh("replies")), make(real)

    @answers.subscriber(topic)
    async def double(number: int) -> int:
        return 2 * number

    async def story() -> None:
        async with asks, answers:
            with pytest.raises(TimeoutError):
                await asks.request(1, topic, timeout=0.05)
            await answers.start()
            got = await asyncio.gather(*(asks.request(n, topic) for n in range(2, 5)))
            assert [await one.decode() for one in got] == [4, 6, 8]
            with pytest.raises(LocalProtocolError, match="no topic for its reply"):
                await answers.request(1, topic)

    run(story)


def test_what_becomes_of_a_message_is_as_its_policy_and_its_handler_say(
    broker: TxmqBroker, client: Client
) -> None:
    """Each topic has a group, so that the letters of each can be told apart."""
    groups = {name: fresh(name) for name in ("nack", "reject", "ack", "manual", "first")}
    policies = {
        "nack": AckPolicy.NACK_ON_ERROR,
        "reject": AckPolicy.REJECT_ON_ERROR,
        "ack": AckPolicy.ACK,
        "manual": AckPolicy.MANUAL,
        "first": AckPolicy.ACK_FIRST,
    }
    seen = list[tuple[str, str]]()
    raised = {
        "fail": ValueError("no such order"),
        "says ack": AckMessage(),
        "says nack": NackMessage(delay=0.01),
        "says reject": RejectMessage(reason="not ours"),
    }

    def declare(name: str) -> None:
        @broker.subscriber(
            groups[name], group=groups[name], ack_policy=policies[name], consumer=SOON
        )
        async def handle(text: str, message: TxmqMessage) -> None:
            seen.append((name, text))
            if text in raised:
                raise raised[text]
            if name == "manual":
                await message.ack()

    for name in groups:
        declare(name)

    async def story() -> None:
        async with broker:
            await broker.start()
            for name, group in groups.items():
                for text in ("fine", "fail") if name != "manual" else ("fine",):
                    await broker.publish(text, group)
            for text in ("says ack", "says nack", "says reject"):
                await broker.publish(text, groups["nack"])
            await until(lambda: all(lag(client, group) == 0 for group in groups.values()))
            await until(lambda: len(letters(client, groups["nack"])) == 3)

    run(story)
    assert seen.count(("nack", "fail")) == seen.count(("nack", "says nack")) == 2
    assert seen.count(("reject", "fail")) == seen.count(("ack", "fail")) == 1
    assert not letters(client, groups["ack"]) + letters(client, groups["first"])
    [rejected] = letters(client, groups["reject"])
    assert rejected.error_text == "ValueError: no such order"
    errors = {one.body: (one.error_type, one.error_text) for one in letters(client, groups["nack"])}
    assert errors.keys() == {b"fail", b"says nack", b"says reject"}
    assert errors[b"fail"][0] == "ValueError"
    assert "no such order" in errors[b"fail"][1]
    assert errors[b"says reject"][1] == "not ours"


def test_middlewares_surround_what_is_consumed_and_published(broker: TxmqBroker) -> None:
    topic, answers, seen = fresh("t"), fresh("t"), list[str]()

    class Noted(BaseMiddleware):
        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            seen.append(f"consume {await msg.decode()}")
            return await call_next(msg)

        async def publish_scope(self, call_next: Any, cmd: Any) -> Any:
            seen.append(f"publish {cmd.body}")
            cmd.headers["seen"] = "yes"
            return await call_next(cmd)

    broker.add_middleware(Noted)

    @broker.subscriber(topic)
    @broker.publisher(answers)
    async def handle(text: str) -> str:
        return text.upper()

    @broker.subscriber(answers)
    async def last(text: str, header: Annotated[str, Header("seen")]) -> None:
        seen.append(f"{text} {header}")
        raise StopConsume

    async def story() -> None:
        async with broker:
            await broker.start()
            await broker.publish("a", topic)
            await until(lambda: "A yes" in seen)

    run(story)
    assert seen == ["publish a", "consume a", "publish A", "consume A", "A yes"]


def test_an_atomic_handler_publishes_if_its_message_is_acked_and_only_then(
    broker: TxmqBroker, client: Client
) -> None:
    topic, out, done = fresh("t"), fresh("t"), list[str]()

    @broker.subscriber(topic, atomic=True, consumer=SOON)
    @broker.publisher(out)
    async def handle(text: str, message: TxmqMessage) -> str:
        await broker.publish(f"{text} inside", out)
        done.append(text)
        if text == "fails" and message.raw_message.attempt == 1:
            raise ValueError
        if text == "refused":
            raise RejectMessage
        return f"{text} returned"

    async def story() -> None:
        async with broker:
            await broker.start()
            for text in ("works", "fails", "refused"):
                await broker.publish(text, topic)
            await until(lambda: letters(client, broker.config.group))
            await until(lambda: done.count("fails") == 2)
            await until(lambda: lag(client, broker.config.group) == 0)
            async with broker.client.transaction() as tx:
                with broker.within(tx):
                    assert await broker.publish("within", out) is None
                await broker.publish("at once", out)

    run(story)
    bodies = sorted(one.body.decode() for one in client.find(out))
    wanted = [f"{text} {how}" for text in ("fails", "works") for how in ("inside", "returned")]
    assert bodies == sorted(["at once", "within", *wanted])
    assert [one.body for one in letters(client, broker.config.group)] == [b"refused"]


def test_a_handler_that_is_cut_off_leaves_its_message_to_others(
    real: RealBroker, client: Client
) -> None:
    topic, began = fresh("t"), list[int]()
    cut = make(real, graceful_timeout=0.01)

    @cut.subscriber(topic)
    async def hangs(message: TxmqMessage) -> None:
        began.append(message.raw_message.attempt)
        await asyncio.Event().wait()

    async def story() -> None:
        async with cut:
            await cut.start()
            await cut.publish("a", topic)
            await until(lambda: began)
        after = TxmqBroker(real.url, group=cut.config.group, logger=None)
        subscriber = after.subscriber(topic)
        async with after:
            message = await subscriber.get_one(timeout=PATIENCE_S)
            assert message is not None
            assert (await message.decode(), message.raw_message.attempt) == ("a", 1)
            await message.ack()
            async for other in subscriber:
                await other.ack()
                break

    async def later() -> None:
        await until(lambda: began)
        client.send(topic, b"b")

    async def both() -> None:
        await asyncio.gather(story(), later())

    run(both)
    assert lag(client, cut.config.group) == 0


def test_a_subscriber_of_batches_gets_lists_and_settles_them_as_one(
    broker: TxmqBroker, client: Client
) -> None:
    topic, out, seen = fresh("t"), fresh("t"), list[list[str]]()
    client.call("topic.create", name=topic, partitions=1)

    @broker.subscriber(topic, batch=3, batch_wait=0.2, atomic=True, consumer=SOON)
    @broker.publisher(out)
    async def handle(orders: list[Order], message: TxmqMessage) -> int:
        seen.append([order.name for order in orders])
        assert [one["n"] for one in message.batch_headers] == [o.name for o in orders]
        await broker.publish("inside", out)
        if "fails" in seen[-1]:
            assert message.consumer is not None
            message.consumer.dead_letter(message.deliveries[0], "this one alone")
            raise ValueError
        return len(orders)

    async def story() -> None:
        async with broker:
            for name in ("a", "b", "c", "fails", "d"):
                await broker.publish(Order(name=name), topic, headers={"n": name})
            await broker.start()
            await until(lambda: len(seen) >= 3)
            await until(lambda: lag(client, broker.config.group) == 0)

    run(story)
    assert seen[:2] == [["a", "b", "c"], ["fails", "d"]]
    assert seen[2:] == [["d"]]
    assert [one.error_text for one in letters(client, broker.config.group)] == ["this one alone"]
    assert sorted(one.body for one in client.find(out)) == [b"1", b"3", b"inside", b"inside"]


def test_batches_in_memory() -> None:
    broker, seen = TxmqBroker(group="g"), list[list[int]]()

    @broker.subscriber("in", batch=10)
    async def handle(numbers: list[int]) -> int:
        seen.append(numbers)
        return sum(numbers)

    async def story() -> None:
        async with TestTxmqBroker(broker) as tested:
            await tested.publish_batch(1, 2, topic="in")
            await tested.publish(3, "in")
            assert await (await tested.request(4, "in")).decode() == 4

    run(story)
    assert seen == [[1, 2], [3], [4]]


def test_a_worker_outlives_what_its_handlers_and_middlewares_raise(
    broker: TxmqBroker, client: Client
) -> None:
    """A handler that awaits a cancelled task raises CancelledError, without being
    cancelled.
    """
    topic, seen = fresh("t"), list[str]()

    class Failing(BaseMiddleware):
        async def after_processed(self, *error: Any) -> Any:
            if seen[-1] == "middleware":
                raise ZeroDivisionError
            return await super().after_processed(*error)

    broker.add_middleware(Failing)

    @broker.subscriber(topic, consumer=SOON)
    async def handle(text: str) -> None:
        seen.append(text)
        if text == "cancelled":
            task = asyncio.create_task(asyncio.sleep(60))
            asyncio.get_running_loop().call_soon(task.cancel)
            await task

    async def story() -> None:
        async with broker:
            await broker.start()
            for text in ("cancelled", "middleware", "last"):
                await broker.publish(text, topic)
            await until(lambda: len(letters(client, broker.config.group)) == 2)
            await until(lambda: "last" in seen)
            assert await broker.ping(PATIENCE_S)

    run(story)
    errors = {one.body: one for one in letters(client, broker.config.group)}
    assert errors[b"cancelled"].error_type == "asyncio.exceptions.CancelledError"
    assert "nacked" in errors[b"middleware"].error_text
