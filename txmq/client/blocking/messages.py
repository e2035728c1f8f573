"""What clients ask about single messages: to find them, and to have one back that waits
for its time.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from txmq.errors import LocalProtocolError
from txmq.model.message import Receipt, micros, parse_message_id


class Asks(Protocol):
    """Whoever can make control calls."""

    def call(self, name: str, /, **args: object) -> dict[str, Any]: ...


class MessageCalls:
    """The part of the blocking client for single messages."""

    def recall(self: Asks, message: Receipt | str) -> None:
        """Takes back a message that was sent with a time of delivery, named by its
        receipt or its id.

        Once more is fine. Raises RecallTooLate where it has been published already, or
        is not known.
        """
        self.call("message.recall", ids=[id_of(message)])

    def find(
        self: Asks,
        topic: str | None = None,
        *,
        message_id: Receipt | str | None = None,
        key: str | None = None,
        partition: int | None = None,
        offset: int = 0,
        start: datetime | int | None = None,
        end: datetime | int | None = None,
    ) -> Iterator[FoundMessage]:
        """The messages of a topic that are all of this, in the order of partitions and
        offsets, page by page.

        A `partition` and a span of time in which they were stored (`start`, up to
        `end`) narrow the search down; what is left is looked through. With a
        `message_id` alone: a message that waits for its time, or is of a transaction of
        the last seven days, wherever it is. Raises UnknownTopic, and what a call
        raises.
        """
        search = Search(topic, message_id, key, partition, offset, start, end)
        while (asked := search.asked()) is not None:
            yield from search.found(self.call(asked[0], **asked[1]))


class Search:
    """What to ask for next, and what was found: for as long as `asked` names a call,
    `found` gets its reply.
    """

    def __init__(
        self,
        topic: str | None,
        message_id: Receipt | str | None,
        key: str | None,
        partition: int | None,
        offset: int,
        start: datetime | int | None,
        end: datetime | int | None,
    ) -> None:
        """Raises LocalProtocolError where this is no search."""
        name = None if message_id is None else id_of(message_id)
        if name is None and topic is None:
            raise LocalProtocolError(
                "a search for everything", hint="name a topic, or the id of a message"
            )
        times = {
            "start": None if start is None else micros(start),
            "end": None if end is None else micros(end),
        }
        self._args = {
            "topic": topic,
            "id": name,
            "key": key,
            "partition": partition,
            "offset": offset,
            **times,
        }
        self._by_id = name is not None
        self._over = False
        self._after: object = None

    def asked(self) -> tuple[str, dict[str, object]] | None:
        """The next call and its arguments; None = that was all."""
        if self._over:
            return None
        if self._by_id:
            return "message.show", {"id": self._args["id"], "bodies": True}
        return "message.find", {**self._args, "bodies": True, "after": self._after}

    def found(self, reply: Mapping[str, Any]) -> list[FoundMessage]:
        """The messages in the reply to that call."""
        if self._by_id:
            return self._shown(reply["message"])
        self._after = reply["next"]
        self._over = self._after is None
        return [found_of(told) for told in reply["messages"]]

    def _shown(self, told: Mapping[str, Any] | None) -> list[FoundMessage]:
        """What is known of the id; what is told without its place is then looked for,
        where it must be.
        """
        self._by_id = False
        if told:
            if told.get("offset") is not None or told["state"] != "published":
                self._over = True
                return [found_of(told)]
            self._args |= {"topic": told["topic"], "partition": told["partition"]}
        self._over = self._args["topic"] is None
        return []


class FoundMessage(NamedTuple):
    """A message that was looked up. `state`: "published", "delayed" (until `due_at`),
    "recalled", or that of its transaction; `offset` is None where it has none, and of
    what was recalled only the id is left.
    """

    message_id: str
    state: str
    topic: str | None
    partition: int | None
    offset: int | None
    key: str | None
    tag: str | None
    headers: Mapping[str, str]
    body: bytes
    born_at: int
    stored_at: int
    due_at: int


def found_of(told: Mapping[str, Any]) -> FoundMessage:
    """A message as a reply tells it."""
    return FoundMessage(
        message_id=told["message_id"],
        state=told.get("state", "published"),
        topic=told.get("topic"),
        partition=told.get("partition"),
        offset=told.get("offset"),
        key=told.get("key"),
        tag=told.get("tag"),
        headers=told.get("headers", {}),
        body=b64decode(told.get("body", "")),
        born_at=told.get("born_at", 0),
        stored_at=told.get("stored_at", 0),
        due_at=told.get("due_at", 0),
    )


def id_of(message: Receipt | str) -> str:
    """The id of a message. LocalProtocolError where it is none."""
    found = message.message_id if isinstance(message, Receipt) else message
    if not isinstance(found, str):
        raise LocalProtocolError(
            f"{message!r:.80} names no message", hint="its receipt or its id is needed"
        )
    parse_message_id(found)
    return found
