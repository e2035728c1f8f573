"""A typed topic as users hold it: sends of values, by any face of the client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar, Unpack

from txmq.client.protocol.sender.rows import Fields
from txmq.client.protocol.typed.bodies import TopicOptions, TypedBodies
from txmq.model.message import Message
from txmq.model.schemas.compatibility import Compatibility

M = TypeVar("M")
# What the calls of a face return: receipt, receipts, stored batches, reply of a call.
R = TypeVar("R")
Rs = TypeVar("Rs")
Stored = TypeVar("Stored")
Reply = TypeVar("Reply")
R_co = TypeVar("R_co", covariant=True)
Rs_co = TypeVar("Rs_co", covariant=True)
Stored_co = TypeVar("Stored_co", covariant=True)
Reply_co = TypeVar("Reply_co", covariant=True)


class Sends(Protocol[R_co]):
    """Sender of one message: a client or a transaction."""

    def send(
        self,
        topic: str,
        body: bytes,
        *,
        partition: int | None = None,
        **fields: Unpack[Fields],
    ) -> R_co: ...


class TopicClient(Sends[R_co], Protocol[R_co, Rs_co, Stored_co, Reply_co]):
    """The calls of a client for a topic."""

    def send_batch(
        self, topic: str, messages: Iterable[Message], *, partition: int | None = None
    ) -> Rs_co: ...

    def send_many(
        self,
        topic: str,
        bodies: Sequence[bytes],
        keys: Sequence[str | None] | None = None,
        tags: Sequence[str | None] | None = None,
        *,
        partition: int | None = None,
    ) -> Stored_co: ...

    def send_one_way(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> None: ...

    def call(self, name: str, /, **args: object) -> Reply_co: ...


class TopicSends(Generic[M, R]):
    """The sends of a typed topic by a client, or in a transaction."""

    def __init__(self, bodies: TypedBodies[M], sender: Sends[R]) -> None:
        self._bodies, self._sender = bodies, sender

    def send(self, value: M, *, partition: int | None = None, **fields: Unpack[Fields]) -> R:
        """Send a value, as the `send` of the client or the transaction does.

        Raises BodyMismatch where the model would not read it; then nothing is sent.
        """
        body, fields = self._bodies.prepared(value, fields)
        return self._sender.send(self._bodies.name, body, partition=partition, **fields)


class Topic(TypedBodies[M], Generic[M, R, Rs, Stored, Reply]):
    """A topic whose bodies are values of a pydantic model. Made by `client.topic`.

    Consumers and readers take it in place of the topic's name. A consumer checks each
    message: `message.value` is the value, and what does not fit is dead-lettered with
    the error BodyMismatch, so that no handler sees it.
    """

    def __init__(
        self,
        client: TopicClient[R, Rs, Stored, Reply],
        name: str,
        model: type[M],
        **options: Unpack[TopicOptions],
    ) -> None:
        super().__init__(name, model, **options)
        self._client = client
        self._sends = TopicSends(self, client)

    def send(self, value: M, *, partition: int | None = None, **fields: Unpack[Fields]) -> R:
        """Send a value, as `client.send` does. Raises BodyMismatch."""
        return self._sends.send(value, partition=partition, **fields)

    def send_one_way(
        self, value: M, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> None:
        """Send a value without a receipt. Raises BodyMismatch."""
        body, fields = self.prepared(value, fields)
        self._client.send_one_way(self.name, body, partition=partition, **fields)

    def send_batch(self, values: Iterable[M | Message], *, partition: int | None = None) -> Rs:
        """Send values, as `client.send_batch` does.

        Those with a key or other fields are made by `message(value, key=…)`.
        """
        messages = [
            value if isinstance(value, Message) else self.message(value) for value in values
        ]
        return self._client.send_batch(self.name, messages, partition=partition)

    def send_many(
        self,
        values: Iterable[M],
        keys: Sequence[str | None] | None = None,
        tags: Sequence[str | None] | None = None,
        *,
        partition: int | None = None,
    ) -> Stored:
        """Send values as columns, as `client.send_many` does. JSON only."""
        return self._client.send_many(
            self.name, self.column(values), keys, tags, partition=partition
        )

    def within(self, transaction: Sends[R_co]) -> TopicSends[M, R_co]:
        """Return the sends in a transaction: `orders.within(tx).send(order)`."""
        return TopicSends(self, transaction)

    def set_schema(
        self,
        *,
        compatibility: Compatibility | None = None,
        force: bool = False,
        dry_run: bool = False,
        operator: str | None = None,
        reason: str = "",
    ) -> Reply:
        """Make the model's JSON Schema that of the topic at the broker.

        `compatibility`: what later changes must keep, "backward" (at first), "forward"
        or "none". Raises IncompatibleSchema where this change breaks the rule.
        """
        return self._client.call(
            "topic.schema",
            name=self.name,
            json_schema=self.json_schema(),
            compatibility=compatibility,
            force=force,
            dry_run=dry_run,
            operator=operator,
            reason=reason,
        )
