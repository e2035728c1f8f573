"""Handlers of a cluster's messages on Twisted, which close their consumer."""

from __future__ import annotations

from typing import Any

import pytest

import txmq.twisted
from tests.client.reactor_thread import InReactor
from tests.client.real import RealBroker
from tests.client.scripted_member import fresh
from txmq.errors import LocalProtocolError
from txmq.model.message import ReceivedMessage
from txmq.testing.wait import PATIENCE_S


def test_a_handler_that_is_at_work_is_waited_for_and_idleness_ends_the_run(
    reactor: Any, in_reactor: InReactor, real: RealBroker, deciding: RealBroker
) -> None:
    async def story() -> None:
        done, closing, urls = list[bytes](), list[Any](), [real.url, deciding.url]
        async with txmq.twisted.connect(reactor, urls, timeout=PATIENCE_S) as cluster:
            topic = fresh("t")
            for client in cluster.clients:
                await client.call("topic.create", name=topic, partitions=1)
            await cluster.send(topic, b"0", key="k")
            consumers = await cluster.consumer(fresh("g"), [topic])

            async def handle(message: ReceivedMessage) -> None:
                closing.append(consumers.close())
                await cluster.clients[0].call("topic.list")
                done.append(message.body)

            await consumers.run(handle)
            await closing[0]
            assert (done, consumers.stats.acked, consumers.stats.returned) == ([b"0"], 1, 0)
            await cluster.send(topic, b"1", key="k")
            async with await cluster.consumer(fresh("g"), [topic]) as others:
                message = await others.receive(PATIENCE_S)  # the other one comes with it
                assert message is not None
                await others.ack(message, wait=True)
                while len(done) < 2:
                    await others.run(
                        lambda message: done.append(message.body), workers=2, idle_exit=0.1
                    )
                with pytest.raises(LocalProtocolError):
                    await others.run(print, workers=0)
        assert done == [b"0", b"1"]

    in_reactor(story)
