"""What clients with Twisted's face ask about single messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any, Protocol

from twisted.internet.defer import Deferred

from txmq.client.messages import FoundMessage, found_of, id_of, search_args
from txmq.errors import LocalProtocolError
from txmq.message import Receipt


class Asks(Protocol):
    """Whoever can make control calls."""

    def call(self, name: str, /, **args: object) -> Deferred[dict[str, Any]]: ...


class MessageCalls:
    """The part of the client for single messages; each call is that of the blocking client."""

    def recall(self: Asks, message: Receipt | str) -> Deferred[None]:
        """Takes back a message that was sent with a time of delivery. Fails with RecallTooLate."""
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
        name = None if message_id is None else id_of(message_id)
        if name is not None and (found := (await self.call("message.show", id=name, bodies=True))["message"]):
            if found.get("offset") is not None or found["state"] != "published":
                yield found_of(found)
                return
            topic, partition = found["topic"], found["partition"]
        if topic is None:
            if name is None:
                raise LocalProtocolError("a search needs a topic, or the id of a message")
            return
        args = search_args(topic, name, key, partition, offset, start, end)
        following: object = None
        while True:
            page = await self.call("message.find", **args, after=following)
            for told in page["messages"]:
                yield found_of(told)
            following = page["next"]
            if following is None:
                return
