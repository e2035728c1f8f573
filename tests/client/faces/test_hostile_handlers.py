"""Handlers that end their process or task, or whose errors cannot be told."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from tests.client.faces.face import AioFace, Face
from tests.client.real import RealBroker
from tests.client.scripted_member import fresh
from txmq.model.message import Message, ReceivedMessage
from txmq.model.retry import RetryPolicy
from txmq.testing.wait import PATIENCE_S

ENDS = 7
ONCE_MORE = RetryPolicy((0,), retries=1)
BLOCKING = """
import sys, psycopg2, txmq

def handle(message, *connection):
    if message.body == b"ends":
        sys.exit(7)

url, group, topic, dsn = sys.argv[1:]
inbox = {"inbox": lambda: psycopg2.connect(dsn)} if dsn else {}
with txmq.connect(url, service="s") as client, client.consumer(group, [topic]) as consumer:
    consumer.run(handle, **inbox)
"""
AIO = """
import asyncio, sys, psycopg, txmq.aio

async def handle(message, *connection):
    if message.body == b"ends":
        sys.exit(7)

async def main(url, group, topic, dsn):
    inbox = {"inbox": lambda: psycopg.AsyncConnection.connect(dsn)} if dsn else {}
    async with txmq.aio.connect(url, service="s") as client:
        async with await client.consumer(group, [topic]) as consumer:
            await consumer.run(handle, **inbox)

asyncio.run(main(*sys.argv[1:]))
"""


class Unspeakable(Exception):
    """An error whose texts raise."""

    def __str__(self) -> str:
        raise KeyError("text")

    __repr__ = __str__


async def letters_of(client: Any, group: str) -> list[Any]:
    return list((await client.call("dlq.list", group=group))["letters"])


async def topic_of(client: Any, *bodies: bytes) -> str:
    """Return a topic with these messages in one partition."""
    topic = fresh("t")
    await client.call("topic.create", name=topic, partitions=1)
    await client.send_batch(topic, [Message(body, body.decode()) for body in bodies])
    return topic


def require_end(script: str, *arguments: str) -> None:
    """Require that a process of the script ends by its handler."""
    command = [sys.executable, "-c", script, *arguments]
    ended = subprocess.run(command, stderr=subprocess.PIPE, timeout=PATIENCE_S, check=False)
    assert ended.returncode == ENDS, ended.stderr.decode()


@pytest.fixture(params=["plain", "inbox"])
def inbox(request: pytest.FixtureRequest) -> str:
    """The DSN of the inbox; "" = without."""
    return "" if request.param == "plain" else str(request.getfixturevalue("database"))


async def test_an_error_whose_texts_raise_is_a_failure_as_any_other(
    face: Face, real: RealBroker, inbox: str
) -> None:
    client, group, handled = face.connect(real.url), fresh("g"), list[bytes]()
    topic = await topic_of(client, b"bad", b"good")
    consumer = await client.consumer(group, [topic], retry=ONCE_MORE, attempts_in_place=2)

    async def handle(message: ReceivedMessage, *_connection: Any) -> None:
        if message.body == b"bad":
            raise Unspeakable
        handled.append(message.body)

    async with face.consuming(consumer, handle, inbox=inbox):
        await face.until(lambda: letters_of(client, group))
        await face.until(lambda: consumer.stats.acked == 1)
    [letter] = await letters_of(client, group)
    assert letter["error_type"].endswith("Unspeakable")
    assert "exception str() failed" in letter["error_text"]
    assert handled == [b"good"]


@pytest.mark.parametrize("face", [Face(), AioFace()], ids=["blocking", "aio"])
async def test_a_handler_that_ends_its_process_has_failed(
    face: Face, real: RealBroker, inbox: str
) -> None:
    """On a reactor no handler ends the process: the run of one that tries ends."""
    client, group = face.connect(real.url), fresh("g")
    topic = await topic_of(client, b"ends", b"good")
    await (await client.consumer(group, [topic], retry=ONCE_MORE)).close()
    script = AIO if isinstance(face, AioFace) else BLOCKING
    for _ in range(2):
        require_end(script, real.url, group, topic, inbox)
    [letter] = await letters_of(client, group)
    assert (letter["error_type"], letter["attempts"]) == ("SystemExit", 2)


@pytest.mark.parametrize("awaited", [True, False])
def test_a_handler_that_cancels_its_own_task_has_failed(
    real: RealBroker, inbox: str, *, awaited: bool
) -> None:
    face, handled = AioFace(), list[bytes]()

    async def handle(message: ReceivedMessage, *_connection: Any) -> None:
        if message.body == b"cancels":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            if awaited:
                await asyncio.sleep(0)
        else:
            handled.append(message.body)

    async def story() -> None:
        client, group = face.connect(real.url), fresh("g")
        topic = await topic_of(client, b"cancels", b"good")
        consumer = await client.consumer(group, [topic], retry=ONCE_MORE)
        async with face.consuming(consumer, handle, inbox=inbox):
            await face.until(lambda: letters_of(client, group))
            await face.until(lambda: consumer.stats.acked == 1)
        [letter] = await letters_of(client, group)
        assert (letter["error_type"], letter["attempts"]) == ("RuntimeError", 2)
        assert handled == [b"good"]

    face.run(story())


async def test_a_handler_may_close_its_consumer(face: Face, real: RealBroker) -> None:
    """The run leaves the group when the handler has ended, and its ack goes along."""
    client, group, handled = face.connect(real.url), fresh("g"), list[bytes]()
    consumer = await client.consumer(group, [await topic_of(client, b"one", b"two")])

    async def handle(message: ReceivedMessage) -> None:
        handled.append(message.body)
        await consumer.close()

    await face.consume(consumer, handle)
    await consumer.close()
    assert (handled, consumer.stats.acked) == ([b"one"], 1)
