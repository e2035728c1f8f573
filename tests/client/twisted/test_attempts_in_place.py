"""Attempts in place of a run on Twisted, which is cancelled."""

from __future__ import annotations

from typing import Any

import pytest
from twisted.internet.defer import CancelledError
from twisted.internet.task import deferLater

import txmq.twisted
from tests.client.reactor_thread import InReactor
from tests.client.real import RealBroker
from tests.client.scripted_member import fresh
from txmq.model.message import ReceivedMessage


def test_a_cancelled_run_ends_them(reactor: Any, real: RealBroker, in_reactor: InReactor) -> None:
    def handle(_message: ReceivedMessage) -> None:
        raise KeyError("k")

    async def story() -> None:
        async with txmq.twisted.connect(reactor, real.url) as client:
            topic = fresh("t")
            await client.send(topic, b"m00", key="key")
            consumer = await client.consumer(fresh("g"), [topic], attempts_in_place=1_000)
            run = consumer.run(handle)
            while not consumer.stats.retried:
                await deferLater(reactor, 0.01)
            run.cancel()
            with pytest.raises(CancelledError):
                await run
            await consumer.close()
            assert (consumer.stats.nacked, consumer.stats.postponed) == (0, 1)

    in_reactor(story)
