"""Typed topics of the blocking clients."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol, TypeVar, Unpack

from txmq.client.protocol.sender.batches import StoredBatch
from txmq.client.protocol.sender.rows import Fields
from txmq.client.protocol.typed.bodies import TopicOptions
from txmq.client.protocol.typed.topic import Topic, TopicClient
from txmq.model.durations import Duration
from txmq.model.message import Receipt

M = TypeVar("M")


class BlockingTopicClient(
    TopicClient[Receipt, list[Receipt], list[StoredBatch], dict[str, Any]], Protocol
):
    """A blocking client. Pyright wants its parameters all."""

    def send(
        self,
        topic: str,
        body: bytes,
        *,
        partition: int | None = None,
        timeout: Duration | None = None,
        **fields: Unpack[Fields],
    ) -> Receipt: ...

    def send_async(
        self,
        topic: str,
        body: bytes,
        *,
        partition: int | None = None,
        timeout: Duration | None = None,
        **fields: Unpack[Fields],
    ) -> Future[Receipt]: ...


class TypedTopic(Topic[M, Receipt, list[Receipt], list[StoredBatch], dict[str, Any]]):
    """A topic whose bodies are values of a pydantic model; see `Topic`."""

    _client: BlockingTopicClient

    def send_async(
        self, value: M, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> Future[Receipt]:
        """Send a value without waiting, as `client.send_async` does. Raises
        BodyMismatch.
        """
        body, fields = self.prepared(value, fields)
        return self._client.send_async(self.name, body, partition=partition, **fields)


class TypedTopicCalls:
    """The part of a blocking client that makes typed topics."""

    def topic(
        self: BlockingTopicClient, name: str, model: type[M], **options: Unpack[TopicOptions]
    ) -> TypedTopic[M]:
        """Return a topic whose bodies are values of a pydantic model.

        Its sends check them; consumers and readers take it in place of the name.
        Nothing is asked of the broker: its `set_schema` stores the model's schema
        there.
        """
        return TypedTopic(self, name, model, **options)
