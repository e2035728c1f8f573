"""What clients ask about single messages: to have one back that waits for its time."""

from __future__ import annotations

from typing import Any, Protocol

from txmq.errors import LocalProtocolError
from txmq.message import Receipt, parse_message_id


class Asks(Protocol):
    """Whoever can make control calls."""

    def call(self, name: str, /, **args: object) -> dict[str, Any]: ...


class MessageCalls:
    """The part of the blocking client for single messages."""

    def recall(self: Asks, message: Receipt | str) -> None:
        """Takes back a message that was sent with a time of delivery, named by its receipt or its id.

        Once more is fine. Raises RecallTooLate where it has been published already, or is not known.
        """
        self.call("message.recall", ids=[id_of(message)])


def id_of(message: Receipt | str) -> str:
    """The id of a message. LocalProtocolError where it is none."""
    found = message.message_id if isinstance(message, Receipt) else message
    if not isinstance(found, str):
        raise LocalProtocolError(f"{message!r:.80} names no message", hint="its receipt or its id is needed")
    parse_message_id(found)
    return found
