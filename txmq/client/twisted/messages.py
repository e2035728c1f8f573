"""What clients with Twisted's face ask about single messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any, Protocol

from twisted.internet.defer import Deferred

from txmq.client.blocking.messages import FoundMessage, Search, id_of
from txmq.model.message import Receipt


class Asks(Protocol):
    """Whoever can make control calls."""

    def call(self, name: str, /, **args: object) -> Deferred[dict[str, Any]]: ...


class MessageCalls:
    """The part of the client for single messages; each call is that of the blocking
    client.
    """

    def recall(self: Asks, message: Receipt | str) -> Deferred[None]:
        """Takes back a message that was sent with a time of delivery. Fails with
        RecallTooLate.
        """
        return self.call("message.recall", ids=[id_of(message)]).addCallback(lambda _reply: None)

    async def find(
        self: Asks,
        topic: str | None = None,
        *,
        message_id: Receipt | str | None = None,
        key: str | None = None,
        partition: int | None = None,
        offset: int = 0,
        start: datetime | int | None = None,
        end: datetime | int | None = None,
    ) -> AsyncIterator[FoundMessage]:
        """The messages of a topic that are all of this, for `async for`."""
        search = Search(topic, message_id, key, partition, offset, start, end)
        while (asked := search.asked()) is not None:
            for found in search.found(await self.call(asked[0], **asked[1])):
                yield found
