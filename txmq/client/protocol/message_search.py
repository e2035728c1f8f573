"""Search for messages by control calls, without I/O."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple, TypedDict

from txmq.errors import LocalProtocolError
from txmq.model.content import Header, content_of
from txmq.model.message import Receipt, parse_message_id, to_micros

OF_A_TOPIC = {"topic", "partition", "offset"}  # arguments


class TraceOptions(TypedDict, total=False):
    """What to look for, beside a key: a message, or content. `body` is a text that
    bodies have, or a path into JSON and a value: `$.customer.id=17`. A text that begins
    with $ has a backslash before it. `header` is a name and a value, None = any.
    """

    message_id: Receipt | str | None
    body: str | None
    header: Header | None


class FindOptions(TraceOptions, total=False):
    """Properties of the messages to find; a message has all that are given. A partition
    and a span of storage time (from `start`, before `end`) narrow the search.
    """

    key: str | None
    partition: int | None
    offset: int
    start: datetime | int | None
    end: datetime | int | None


class FoundMessage(NamedTuple):
    """A message that a search found.

    `state` is "published", "delayed" (until `due_at`), "recalled", or the state of its
    transaction. `offset` is None where the message has none. Of a recalled message only
    the id is left.
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


class MessageSearch:
    """A search of one or more calls: while `next_call` names one, `read_reply` gets its
    reply.
    """

    def __init__(  # noqa: PLR0913  # options of `find`
        self,
        topic: str | None,
        *,
        message_id: Receipt | str | None = None,
        key: str | None = None,
        partition: int | None = None,
        offset: int = 0,
        start: datetime | int | None = None,
        end: datetime | int | None = None,
        body: str | None = None,
        header: Header | None = None,
    ) -> None:
        """Raises LocalProtocolError where nothing is looked for."""
        name = None if message_id is None else message_id_of(message_id)
        if name is None and topic is None and (key, body, header) == (None, None, None):
            raise LocalProtocolError(
                "a search without limits",
                hint="name a topic, the id of a message, a key, a body or a header",
            )
        content_of(body, header)
        self._args = {
            "topic": topic,
            "id": name,
            "key": key,
            "partition": partition,
            "offset": offset,
            "start": None if start is None else to_micros(start),
            "end": None if end is None else to_micros(end),
            "body": body,
            "header": header,
        }
        self._by_id = name is not None
        self._over = False
        self._after: object = None

    def next_call(self) -> tuple[str, dict[str, object]] | None:
        """Return the next call and its arguments, or None at the end of the search."""
        if self._over:
            return None
        if self._by_id:
            return "message.show", {"id": self._args["id"], "bodies": True}
        args = {**self._args, "bodies": True, "after": self._after}
        if self._args["topic"] is not None:
            return "message.find", args
        return "message.search", {name: args[name] for name in args.keys() - OF_A_TOPIC}

    def read_reply(self, reply: Mapping[str, Any]) -> list[FoundMessage]:
        """Return the messages in the reply to that call."""
        if self._by_id:
            return self._read_show(reply["message"])
        self._after = reply["next"]
        self._over = self._after is None
        return [parse_found(fields) for fields in reply["messages"]]

    def _read_show(self, fields: Mapping[str, Any] | None) -> list[FoundMessage]:
        """Return the message of the id.

        Where the broker knows its partition but not its offset, the next call searches
        that partition.
        """
        self._by_id = False
        if fields:
            if fields.get("offset") is not None or fields["state"] != "published":
                self._over = True
                return [parse_found(fields)]
            self._args |= {"topic": fields["topic"], "partition": fields["partition"]}
        self._over = self._args["topic"] is None
        return []


def trace_args(
    key: str | None,
    *,
    message_id: Receipt | str | None = None,
    body: str | None = None,
    header: Header | None = None,
) -> dict[str, Any]:
    """Return the criteria of a trace. Raises LocalProtocolError."""
    name = None if message_id is None else message_id_of(message_id)
    return {"key": key, "id": name, "body": body, "header": header}


def parse_found(fields: Mapping[str, Any]) -> FoundMessage:
    """Return the message that a reply describes."""
    return FoundMessage(
        message_id=fields["message_id"],
        state=fields.get("state", "published"),
        topic=fields.get("topic"),
        partition=fields.get("partition"),
        offset=fields.get("offset"),
        key=fields.get("key"),
        tag=fields.get("tag"),
        headers=fields.get("headers", {}),
        body=b64decode(fields.get("body", "")),
        born_at=fields.get("born_at", 0),
        stored_at=fields.get("stored_at", 0),
        due_at=fields.get("due_at", 0),
    )


def message_id_of(message: Receipt | str) -> str:
    """Return the id of a message. Raises LocalProtocolError for any other value."""
    found = message.message_id if isinstance(message, Receipt) else message
    if not isinstance(found, str):
        raise LocalProtocolError(
            f"{message!r:.80} does not name a message", hint="give its receipt or its id"
        )
    parse_message_id(found)
    return found
