"""Sends and acks that take effect with a transaction."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, Unpack

from txmq.client.protocol.sender.rows import Fields, column_rows, micros_now
from txmq.client.protocol.transaction.bundle import Bundle
from txmq.client.protocol.transaction.lifecycle import Stage
from txmq.model.actions import BundleAction
from txmq.model.message import Message

B = TypeVar("B", bound=Bundle[Any])


class BundleOperations(ABC, Generic[B]):
    """Sends and acks at one broker that take effect with a transaction."""

    def __init__(self, bundle: B) -> None:
        self._bundle = bundle

    def send(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> None:
        """Send a message if the transaction commits.

        Raises LocalProtocolError or MessageTooLarge.
        """
        self._require(Stage.OPEN)
        born_at = time.time_ns() // 1_000
        self._bundle.buffer.add(topic, Message(body, **fields), born_at, partition)

    def send_many(
        self,
        topic: str,
        bodies: Sequence[bytes],
        keys: Sequence[str | None] | None = None,
        tags: Sequence[str | None] | None = None,
        *,
        partition: int | None = None,
    ) -> None:
        """Send messages given as columns, which is faster for many messages.

        The columns must not be changed before the end of the block.
        """
        self._require(Stage.OPEN)
        self._bundle.buffer.add_columns(
            topic, column_rows(bodies, keys, tags, micros_now()), partition
        )

    def ack(self, delivered: object) -> None:
        """Ack a message or a batch of one of this process's consumers with the commit.

        Raises LocalProtocolError for a message of another broker, NotLeased if the
        consumer does not hold the message any more.
        """
        self._require(Stage.OPEN)
        self._bundle.ack(delivered)

    def act(self, action: BundleAction) -> None:
        """Add an action that takes effect with the decision (docs/FORMATS.md 2.1)."""
        self._require(Stage.OPEN)
        self._bundle.buffer.actions.append(action)

    @abstractmethod
    def _require(self, stage: Stage) -> None:
        """Raise ClientClosed or LocalProtocolError unless the transaction is there."""
