"""Calls on their way from the reactor to the loop of asyncio, and back."""

from __future__ import annotations

import asyncio
import inspect
import threading
from contextlib import closing
from typing import Any

import pytest
from twisted.internet import defer
from twisted.internet.asyncioreactor import AsyncioSelectorReactor
from twisted.internet.defer import CancelledError, Deferred

import txmq.twisted
from tests.client.reactor_thread import InReactor
from tests.client.real import RealBroker
from tests.client.scripted_member import fresh
from txmq.aio import outcome_of
from txmq.client.protocol.transaction.checks import Half
from txmq.client.protocol.transaction.open_work import end_work
from txmq.client.twisted import bridge
from txmq.errors import LocalProtocolError
from txmq.model.message import COMMIT, Decision, Message, ReceivedMessage
from txmq.testing.wait import PATIENCE_S

NOBODY = "txmq://127.0.0.1:1"


def test_a_call_has_the_arguments_and_the_docstring_of_asyncio() -> None:
    own, awaited = txmq.twisted.Client.send, txmq.aio.Client.send
    assert (own.__doc__, own.__name__) == (awaited.__doc__, "send")
    assert inspect.signature(own).parameters == inspect.signature(awaited).parameters
    assert inspect.signature(own).return_annotation == "Deferred[Receipt]"


def test_a_cancelled_deferred_cancels_the_call_and_names_its_outcome(
    reactor: Any, in_reactor: InReactor
) -> None:
    async def story() -> None:
        client = txmq.twisted.connect(reactor, NOBODY, timeout=PATIENCE_S)
        for begun in (False, True):
            sent = client.send("t", b"x")
            if begun:
                await Deferred.fromCoroutine(_turn(client))
            sent.cancel()
            with pytest.raises(CancelledError) as cancelled:
                await sent
            assert outcome_of(cancelled.value) == "not done"
        with pytest.raises(defer.TimeoutError):
            await client.send("t", b"x").addTimeout(0.01, reactor)
        await client.close()

    in_reactor(story)


async def _turn(client: txmq.twisted.Client) -> None:
    """Let the loop have what was given to it."""

    async def nothing() -> None:
        pass

    await client._bridge.defer(nothing)


def test_handlers_and_checkers_are_called_in_the_reactors_thread(
    reactor: Any, in_reactor: InReactor, real: RealBroker
) -> None:
    threads, asked = set[int](), Deferred[None]()

    def check(_half: Half) -> Decision:
        threads.add(threading.get_ident())
        asked.callback(None)
        return COMMIT

    def handle(_message: ReceivedMessage) -> None:
        threads.add(threading.get_ident())

    async def story() -> None:
        topic = fresh("t")
        async with txmq.twisted.connect(reactor, real.url, service="tests") as client:
            client.register_checker("bank", check)
            half = await client.half(topic, b"half", checker="bank", check_after=0.1)
            end_work(half.token)  # as if nobody were going to decide it
            await asked
            async with await client.consumer(fresh("g"), [topic]) as consumer:
                while not consumer.stats.acked:
                    await consumer.run(handle, idle_exit=0.1)
        assert threads == {threading.get_ident()}

    in_reactor(story)


def test_a_client_in_another_thread_than_its_reactors_is_refused(
    reactor: Any, in_reactor: InReactor
) -> None:
    async def made() -> txmq.twisted.Client:
        client = txmq.twisted.connect(reactor, NOBODY, timeout=PATIENCE_S)
        await _turn(client)
        return client

    async def closed() -> None:
        await client.close()

    client = in_reactor(made)
    try:
        with pytest.raises(LocalProtocolError, match="its reactor runs in another one"):
            client.send("t", b"x")
    finally:
        in_reactor(closed)


def test_a_partitioner_may_use_its_client(
    reactor: Any, in_reactor: InReactor, real: RealBroker
) -> None:
    async def story() -> None:
        topic, copies = fresh("t"), fresh("t")

        def choose(_topic: str, _key: str | None, _count: int) -> int:
            client.send_one_way(copies, b"x", partition=0)
            return 0

        async with txmq.twisted.connect(reactor, real.url, partitioner=choose) as client:
            await client.send(copies, b"x", partition=0)
            await client.send(topic, b"x")
            await client.flush()
            assert len([one async for one in client.find(copies)]) == 2

    in_reactor(story)


def test_reactors_that_begin_at_once_share_a_loop() -> None:
    found = set[int]()
    gate = threading.Barrier(8)

    def begin() -> None:
        gate.wait()
        found.add(id(bridge._loop_in_thread()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bridge, "_loops", {})
        threads = [threading.Thread(target=begin) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        [loop] = bridge._loops.values()
    loop.call_soon_threadsafe(loop.stop)
    assert found == {id(loop)}


@pytest.mark.parametrize("reactor", ["select"], indirect=True)
def test_a_handler_that_exits_ends_its_run_and_not_the_loop(
    reactor: Any, in_reactor: InReactor, real: RealBroker
) -> None:
    def leave(_message: ReceivedMessage) -> None:
        raise SystemExit

    async def story() -> None:
        topic = fresh("t")
        async with txmq.twisted.connect(reactor, real.url) as client:
            await client.send_batch(topic, [Message(b"x")])
            async with await client.consumer(fresh("g"), [topic]) as consumer:
                with pytest.raises(SystemExit):
                    await consumer.run(leave)
            assert len([one async for one in client.find(topic)]) == 1

    in_reactor(story)


def test_a_client_may_be_used_before_its_reactor_runs() -> None:
    with closing(asyncio.SelectorEventLoop()) as loop:
        client = txmq.twisted.connect(AsyncioSelectorReactor(loop), NOBODY, service="tests")
        tx = client.transaction(checker="bank")
        with pytest.raises(LocalProtocolError):
            tx.send("t", b"x")  # its block is not entered
