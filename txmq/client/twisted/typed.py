"""Typed topics of the clients on Twisted."""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar, Unpack

from twisted.internet.defer import Deferred

from txmq.client.protocol.sender.batches import StoredBatch
from txmq.client.protocol.typed.bodies import TopicOptions
from txmq.client.protocol.typed.topic import Topic, TopicClient
from txmq.model.message import Receipt

M = TypeVar("M")
TypedTopic: TypeAlias = Topic[
    M,
    Deferred[Receipt],
    Deferred[list[Receipt]],
    Deferred[list[StoredBatch]],
    Deferred[dict[str, Any]],
]
"""A topic whose bodies are values of a pydantic model; its calls return Deferreds."""
TwistedTopicClient: TypeAlias = TopicClient[
    Deferred[Receipt],
    Deferred[list[Receipt]],
    Deferred[list[StoredBatch]],
    Deferred[dict[str, Any]],
]


class TypedTopicCalls:
    """The part of a client on Twisted that makes typed topics."""

    def topic(
        self: TwistedTopicClient, name: str, model: type[M], **options: Unpack[TopicOptions]
    ) -> TypedTopic[M]:
        """Return a topic whose bodies are values of a pydantic model.

        It is as that of the blocking client, and its sends return Deferreds.
        """
        return Topic(self, name, model, **options)
