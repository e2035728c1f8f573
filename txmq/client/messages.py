"""What clients ask about single messages: to find them, and to have one back that waits for its time."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from txmq.errors import LocalProtocolError
from txmq.message import Receipt, micros, parse_message_id


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
        """The messages of a topic that are all of this, in the order of partitions and offsets, page by page.

        A `partition` and a span of time in which they were stored (`start`, up to `end`) narrow the search down; what
        is left is looked through. With a `message_id` alone: a message that waits for its time, or is of a transaction
        of the last seven days, wherever it is. Raises UnknownTopic, and what a call raises.
        """
        name = None if message_id is None else id_of(message_id)
        if name is not None and (found := self.call("message.show", id=name, bodies=True)["message"]):
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
            page = self.call("message.find", **args, after=following)
            yield from map(found_of, page["messages"])
            following = page["next"]
            if following is None:
                return


def search_args(
    topic: str,
    name: str | None,
    key: str | None,
    partition: int | None,
    offset: int,
    start: datetime | int | None,
    end: datetime | int | None,
) -> dict[str, object]:
    """The arguments of `message.find`, but for the page. Raises LocalProtocolError."""
    times = {"start": None if start is None else micros(start), "end": None if end is None else micros(end)}
    return {"topic": topic, "id": name, "key": key, "partition": partition, "offset": offset, "bodies": True, **times}


class FoundMessage(NamedTuple):
    """A message that was looked up. `state`: "published", "delayed" (until `due_at`), "recalled", or that of its
    transaction; `offset` is None where it has none, and of what was recalled only the id is left.
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
        raise LocalProtocolError(f"{message!r:.80} names no message", hint="its receipt or its id is needed")
    parse_message_id(found)
    return found
