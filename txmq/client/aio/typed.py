"""Typed topics of the clients on asyncio."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Coroutine
from typing import Any, Protocol, TypeAlias, TypeVar, Unpack

from txmq.client.protocol.sender.batches import StoredBatch
from txmq.client.protocol.sender.rows import Fields
from txmq.client.protocol.typed.bodies import TopicOptions
from txmq.client.protocol.typed.topic import Topic, TopicClient
from txmq.model.durations import Duration
from txmq.model.message import Receipt

M = TypeVar("M")
T = TypeVar("T")
Work: TypeAlias = Coroutine[Any, Any, T]


class AioTopicClient(
    TopicClient[Work[Receipt], Work[list[Receipt]], Work[list[StoredBatch]], Work[dict[str, Any]]],
    Protocol,
):
    """A client on asyncio. Pyright wants its parameters all."""

    async def send_async(
        self,
        topic: str,
        body: bytes,
        *,
        partition: int | None = None,
        timeout: Duration | None = None,  # noqa: ASYNC109  # as of the other faces
        **fields: Unpack[Fields],
    ) -> Future[Receipt]: ...


class TypedTopic(
    Topic[M, Work[Receipt], Work[list[Receipt]], Work[list[StoredBatch]], Work[dict[str, Any]]]
):
    """A topic whose bodies are values of a pydantic model; see `Topic`. Its calls are
    coroutines.
    """

    _client: AioTopicClient

    async def send_async(
        self, value: M, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> Future[Receipt]:
        """Send a value and return the future of its receipt, as `client.send_async`
        does. Raises BodyMismatch.
        """
        body, fields = self.prepared(value, fields)
        return await self._client.send_async(self.name, body, partition=partition, **fields)


class TypedTopicCalls:
    """The part of a client on asyncio that makes typed topics."""

    def topic(
        self: AioTopicClient, name: str, model: type[M], **options: Unpack[TopicOptions]
    ) -> TypedTopic[M]:
        """Return a topic whose bodies are values of a pydantic model.

        It is as that of the blocking client, and its sends are coroutines.
        """
        return TypedTopic(self, name, model, **options)
