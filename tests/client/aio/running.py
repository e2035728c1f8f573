"""Coroutines of tests, run on a loop of their own that must be left clean, and what
those of asyncio and of Twisted await.
"""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from txmq.model.message import ReceivedMessage
from txmq.testing.wait import PATIENCE_S

T = TypeVar("T")
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def run(work: Coroutine[Any, Any, T], loop: str = "asyncio") -> T:
    """Return what the work returns, on a new loop.

    Fails where the work leaves tasks behind, or where the loop or the interpreter has
    to complain: of tasks that were destroyed, of failures that nobody asked for, of
    coroutines that nobody awaited.
    """
    complaints: list[str] = []
    left: list[str] = []

    async def watched() -> T:
        asyncio.get_running_loop().set_exception_handler(
            lambda _loop, context: complaints.append(f"{context}")
        )
        async with asyncio.timeout(PATIENCE_S):
            result = await work
        await asyncio.sleep(0)  # for callbacks of tasks that have just ended
        left.extend(
            repr(task) for task in asyncio.all_tasks() if task is not asyncio.current_task()
        )
        gc.collect(1)
        return result

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            result = runner.run(watched())
        gc.collect(1)
    complaints += [
        str(warning.message) for warning in caught if "never awaited" in str(warning.message)
    ]
    assert not left, f"tasks were left behind: {left}"
    assert not complaints, complaints
    return result


async def receive(consumer: Any, count: int) -> list[ReceivedMessage]:
    """Return so many messages, each acked."""
    received: list[ReceivedMessage] = []
    while len(received) < count:
        message = await consumer.receive()
        assert message is not None
        consumer.ack(message)
        received.append(message)
    return received


async def bodies(client: Any, topic: str, partition: int = 0) -> list[bytes]:
    """Return what stands in a partition."""
    return [message.body for message in (await client.read(topic, partition, 0)).messages]
