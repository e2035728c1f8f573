"""Handlers with an inbox on Twisted: in threads, with the guarantees of the blocking
face.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psycopg2
import pytest
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.threads import blockingCallFromThread, deferToThreadPool
from twisted.python.failure import Failure

import txmq
import txmq.twisted
from tests.client.effects import (
    effects,
    have_come,
    lose_effects,
    numbered_effects,
    take_effect,
    with_effects,
)
from tests.client.faces.face import TwistedFace
from tests.client.reactor_thread import InReactor
from tests.client.real import RealBroker
from tests.client.real_consumers import drain
from tests.client.scripted_member import fresh
from txmq.client.aio.consumer.inbox import Inbox, InboxWorker
from txmq.errors import LocalProtocolError
from txmq.model.message import Message, ReceivedMessage
from txmq.model.retry import RetryPolicy
from txmq.testing.wait import PATIENCE_S
from txmq.twisted import Client
from txmq.tx.postgres.driver import Driver
from txmq.tx.postgres.session import Connection

BODIES = [f"m{number:02}" for number in range(12)]


@pytest.fixture
def connect(database: str) -> Callable[[], Connection]:
    return with_effects(database)


@pytest.fixture
def client(reactor: Any, in_reactor: InReactor, shared_broker: RealBroker) -> Iterator[Client]:
    client = txmq.twisted.connect(reactor, shared_broker.url, service="tests", timeout=PATIENCE_S)
    yield client

    async def close() -> None:
        await client.close()

    in_reactor(close)


async def consumer_of(client: Any, group: str, **options: Any) -> Any:
    """A consumer of a topic with BODIES, of few keys."""
    topic = fresh("t")
    await client.send_batch(
        topic, [Message(body.encode(), f"k{n % 3}") for n, body in enumerate(BODIES)]
    )
    return await client.consumer(
        group, [topic], **{"retry": RetryPolicy((0,), retries=50), **options}
    )


def test_each_message_takes_effect_once_off_the_reactors_thread_and_is_acked(
    reactor: Any, client: Client, connect: Callable[[], Connection], in_reactor: InReactor
) -> None:
    threads = set[int]()

    def handle(message: ReceivedMessage, connection: Connection) -> None:
        threads.add(threading.get_ident())
        take_effect(message, connection)
        if message.attempt == 1 and message.body != b"m03":
            raise ValueError("later")

    async def story() -> None:
        consumer = await consumer_of(client, fresh("g"), mode="ordered")
        threads.add(threading.get_ident())
        await TwistedFace(reactor).drain(client, consumer, handle, inbox=connect, workers=2)
        assert (consumer.stats.nacked, consumer.stats.acked) == (11, 12)
        shown = await client.call("group.show", group=consumer.group)
        assert (shown["unsettled"], shown["letters"]) == (0, 0)

    in_reactor(story)
    assert effects(connect) == BODIES
    assert 2 <= len(threads) <= 3, "the reactor's, and one for each worker that had something to do"


def test_restored_messages_of_an_ordered_group_come_before_later_ones(
    reactor: Any,
    client: Client,
    connect: Callable[[], Connection],
    in_reactor: InReactor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The upkeep of the inbox finds out while handlers have the first messages."""
    open_assigned, open_own = Inbox._open_assigned, InboxWorker._open
    opened = asyncio.Event()

    async def open_first(self: Inbox, driver: Driver) -> None:
        await open_assigned(self, driver)
        opened.set()

    async def open_later(self: InboxWorker, driver: Driver, messages: Any) -> None:
        await opened.wait()
        await open_own(self, driver, messages)

    topic, group = fresh("t"), fresh("g")
    later = [body.replace("m", "n") for body in BODIES]

    async def create() -> None:
        await client.call("topic.create", name=topic, partitions=1)

    async def story(bodies: list[str], count: int) -> None:
        await client.send_batch(
            topic, [Message(body.encode(), f"k{n % 3}") for n, body in enumerate(bodies)]
        )
        consumer = await client.consumer(group, [topic], mode="ordered")
        await TwistedFace(reactor).drain(
            client,
            consumer,
            take_effect,
            have_come(connect, count),
            inbox=connect,
            workers=2,
        )

    in_reactor(create)
    in_reactor(partial(story, BODIES, 12))
    lose_effects(connect, group)
    monkeypatch.setattr(Inbox, "_open_assigned", open_first)
    monkeypatch.setattr(InboxWorker, "_open", open_later)
    in_reactor(partial(story, later, 24))
    found = numbered_effects(connect)
    for key in range(3):
        own = [body for body in found if int(body[1:]) % 3 == key]
        assert own == [*BODIES[key::3], *later[key::3]]


def test_both_faces_use_the_same_name_in_the_inbox(
    reactor: Any,
    client: Client,
    shared_broker: RealBroker,
    connect: Callable[[], Connection],
    in_reactor: InReactor,
) -> None:
    """What one has committed, and never acked, the other one passes over."""
    group = fresh("g")

    async def story() -> str:
        consumer = await consumer_of(client, group)
        consumer._awaited._members.ack_many = lambda _messages: None
        await TwistedFace(reactor).run_until(
            consumer, take_effect, have_come(connect, len(BODIES)), inbox=connect
        )
        return str(consumer.settings.topics[0])

    topic = in_reactor(story)
    assert effects(connect) == BODIES
    with (
        txmq.connect(shared_broker.url, service="tests", timeout=PATIENCE_S) as blocking,
        blocking.consumer(group, [topic]) as consumer,
    ):
        drain(blocking, consumer, take_effect, inbox=connect)
        assert consumer.stats.duplicates == len(BODIES)
    assert effects(connect) == BODIES


def test_messages_of_a_list_that_the_handler_nacks_take_no_effect(
    client: Client, connect: Callable[[], Connection], reactor: Any, in_reactor: InReactor
) -> None:
    async def story() -> None:
        consumer = await consumer_of(client, fresh("g"))

        def handle(messages: list[ReceivedMessage], connection: Connection) -> None:
            for message in messages:
                take_effect(message, connection)
                if message.body == b"m04" and message.attempt == 1:
                    blockingCallFromThread(reactor, consumer.nack, message, error="not yet")

        await TwistedFace(reactor).drain(
            client,
            consumer,
            handle,
            inbox=connect,
            batch=12,
            batch_wait=0.05,
        )
        assert consumer.stats.nacked == 1

    in_reactor(story)
    assert effects(connect) == BODIES


def test_closing_waits_for_the_handler_and_ends_the_run(
    client: Client, connect: Callable[[], Connection], reactor: Any, in_reactor: InReactor
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def handle(message: ReceivedMessage, connection: Connection) -> None:
        begun.set()
        assert may_end.wait(PATIENCE_S)
        take_effect(message, connection)

    async def story() -> None:
        consumer = await consumer_of(client, fresh("g"))
        ended = consumer.run(handle, inbox=connect)
        await deferToThreadPool(reactor, reactor.getThreadPool(), begun.wait, PATIENCE_S)
        closed = consumer.close()
        may_end.set()
        await closed
        await ended
        assert consumer.stats.acked == len(effects(connect))

    in_reactor(story)
    assert effects(connect), "it had begun"


def test_a_fatal_error_and_cancellation_end_the_run(
    client: Client, connect: Callable[[], Connection], in_reactor: InReactor
) -> None:
    class Enough(BaseException):
        """No failure of a message."""

    def handle(_message: ReceivedMessage, _connection: Connection) -> None:
        raise Enough

    async def story() -> None:
        consumer = await consumer_of(client, fresh("g"))
        with pytest.raises(Enough):
            await consumer.run(handle, inbox=connect)
        ended: Deferred[None] = consumer.run(take_effect, inbox=connect)
        ended.addErrback(lambda failure: failure.trap("twisted.internet.defer.CancelledError"))
        ended.cancel()
        await ended

    in_reactor(story)


def test_a_cancelled_run_ends_when_its_handlers_have_ended(
    reactor: Any, client: Client, connect: Callable[[], Connection], in_reactor: InReactor
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def handle(message: ReceivedMessage, connection: Connection) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        take_effect(message, connection)

    async def story() -> None:
        consumer = await consumer_of(client, fresh("g"))
        ends: list[Failure] = []
        run = consumer.run(handle, inbox=connect).addErrback(ends.append)
        pool = reactor.getThreadPool()
        await deferToThreadPool(reactor, pool, begun.wait, PATIENCE_S)
        run.cancel()
        run.cancel()
        await deferToThreadPool(reactor, pool, str)  # the reactor goes on meanwhile
        assert not ends, "the handler works"
        go_on.set()
        await run
        assert [end.type for end in ends] == [CancelledError]
        assert (len(effects(connect)), consumer.stats.acked) == (1, 1)

    in_reactor(story)


def test_a_run_whose_database_is_away_can_be_cancelled(
    client: Client, in_reactor: InReactor
) -> None:
    tried: Deferred[None] = Deferred()

    def note() -> None:  # also for the connection of the upkeep, in another thread
        if not tried.called:
            tried.callback(None)

    async def story() -> None:
        def note() -> None:
            if not tried.called:  # the inbox and its worker connect in a thread each
                tried.callback(None)

        def connect() -> Connection:
            client._bridge._reactor.callFromThread(note)
            return psycopg2.connect("host=127.0.0.1 port=1")

        consumer = await consumer_of(client, fresh("g"))
        run = consumer.run(take_effect, inbox=connect)
        await tried
        run.cancel()
        with pytest.raises(CancelledError):
            await run
        assert (consumer.stats.acked, consumer.stats.nacked) == (0, 0)

    in_reactor(story)


@pytest.mark.parametrize("options", [{"workers": 0}, {"batch": 0}, {"batch_wait": 1.0}])
def test_invalid_options_are_refused_with_a_hint(
    client: Client, in_reactor: InReactor, options: dict[str, Any]
) -> None:
    async def story() -> None:
        consumer = await consumer_of(client, fresh("g"))
        with pytest.raises(LocalProtocolError) as refused:
            await consumer.run(take_effect, inbox=lambda: psycopg2.connect(""), **options)
        assert refused.value.hint

    in_reactor(story)


def test_coroutines_are_refused_at_once_or_when_a_handler_returns_one(
    reactor: Any, client: Client, connect: Callable[[], Connection], in_reactor: InReactor
) -> None:
    async def handle(message: ReceivedMessage, connection: Connection) -> None:
        take_effect(message, connection)

    def indirectly(message: ReceivedMessage, connection: Connection) -> object:
        return handle(message, connection)

    async def story() -> list[dict[str, Any]]:
        consumer = await consumer_of(client, fresh("g"), retry=RetryPolicy((0,), retries=0))
        with pytest.raises(LocalProtocolError, match="handle is a coroutine"):
            await consumer.run(handle, inbox=connect)
        await TwistedFace(reactor).drain(client, consumer, indirectly, inbox=connect)
        letters: list[dict[str, Any]] = (await client.call("dlq.list", group=consumer.group))[
            "letters"
        ]
        return letters

    letters = in_reactor(story)
    assert {letter["error_type"] for letter in letters} == {"txmq.errors.base.LocalProtocolError"}
    assert (len(letters), effects(connect)) == (len(BODIES), [])
