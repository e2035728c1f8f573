"""Attempts in place of a run in threads, which is told to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tests.client.real import RealBroker
from tests.client.scripted_member import fresh
from txmq.client.blocking.client import Client
from txmq.model.message import ReceivedMessage


def test_a_stop_ends_them_with_a_nack(real: RealBroker, connect: Callable[..., Client]) -> None:
    client, topic, stop = connect(real.url), fresh("t"), threading.Event()
    client.send(topic, b"m00")

    def fail(_message: ReceivedMessage) -> None:
        stop.set()
        raise KeyError("k")

    with client.consumer(fresh("g"), [topic], attempts_in_place=1_000) as consumer:
        consumer.run(fail, stop=stop)
    assert consumer.stats.nacked == 1
