"""Answers to requests: a reader of the topic of replies, and those who wait."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from uuid import UUID

from txmq.aio import Client, Cluster, Reader, Readers
from txmq.errors import ConnectionLost, LocalProtocolError
from txmq.model.message import ReceivedMessage
from txmq.model.topic_partition import PartitionName
from txmq_faststream.message import CORRELATION_ID

NO_TOPIC = 'name one that only this service reads: TxmqBroker(url, reply_topic="orders-replies")'


class NoOffsets:
    """Positions that are not kept: an answer is for a process that lives."""

    def load(self, name: str, log_id: UUID) -> Mapping[PartitionName, int]:
        return {}

    def save(self, name: str, log_id: UUID, offsets: Mapping[PartitionName, int]) -> None:
        """Keep nothing."""

    def close(self) -> None:
        """Do nothing."""


class Replies:
    """The answers on one topic, read from the first request on."""

    def __init__(self, topic: str | None) -> None:
        self._topic = topic
        self._reader: Reader | Readers | None = None
        self._reading: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        self._waiting: dict[str, asyncio.Future[ReceivedMessage]] = {}

    async def open(self, client: Client | Cluster) -> str:
        """Read the topic from its end on, and return its name.

        Raises LocalProtocolError where the broker has no topic of replies.
        """
        if self._topic is None:
            raise LocalProtocolError("a request has no topic for its reply", hint=NO_TOPIC)
        async with self._opening:
            if self._reading is None or self._reading.done():
                await self.close()
                self._reader = await client.reader(
                    "replies", [self._topic], NoOffsets(), start="last"
                )
                self._reading = asyncio.create_task(self._read(self._reader))
        return self._topic

    def expect(self, correlation_id: str) -> asyncio.Future[ReceivedMessage]:
        """Return the future of the first answer to that request."""
        if correlation_id in self._waiting:
            raise LocalProtocolError(
                f"another request has the correlation id {correlation_id!r}",
                hint="leave it out, or use one for each request",
            )
        future: asyncio.Future[ReceivedMessage] = asyncio.get_running_loop().create_future()
        self._waiting[correlation_id] = future
        future.add_done_callback(lambda _done: self._waiting.pop(correlation_id, None))
        return future

    async def _read(self, reader: Reader | Readers) -> None:
        error: BaseException = ConnectionLost("the reader of the replies has ended")
        try:
            async for message in reader:
                future = self._waiting.get(message.headers.get(CORRELATION_ID, ""))
                if future is not None and not future.done():
                    future.set_result(message)
        except Exception as failure:  # noqa: BLE001  # those who wait raise it
            error = failure
        finally:
            for future in list(self._waiting.values()):
                if not future.done():
                    future.set_exception(error)

    async def close(self) -> None:
        """End the reading. Requests that wait fail."""
        reading, self._reading = self._reading, None
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.close()
        if reading is not None:
            await reading
