"""What clients with Twisted's face ask about single messages."""

from __future__ import annotations

from typing import Any, Protocol

from twisted.internet.defer import Deferred

from txmq.client.messages import id_of
from txmq.message import Receipt


class Asks(Protocol):
    """Whoever can make control calls."""

    def call(self, name: str, /, **args: object) -> Deferred[dict[str, Any]]: ...


class MessageCalls:
    """The part of the client for single messages; each call is that of the blocking client."""

    def recall(self: Asks, message: Receipt | str) -> Deferred[None]:
        """Takes back a message that was sent with a time of delivery. Fails with RecallTooLate."""
        return self.call("message.recall", ids=[id_of(message)]).addCallback(lambda _reply: None)
