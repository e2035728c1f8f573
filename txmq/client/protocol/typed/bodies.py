"""Bodies of a topic by a pydantic model: checked at the send and at the receipt.

Without I/O, for all faces.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Generic, Literal, TypeAlias, TypedDict, TypeVar, Unpack
from uuid import uuid4

import msgpack
from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

from txmq.client.protocol.sender.rows import Fields
from txmq.errors import BodyMismatch, ConfigError, LocalProtocolError
from txmq.errors.validation import check_options, first_mistake
from txmq.model.message import Message, ReceivedMessage, check_name
from txmq.model.schemas.bodies import CONTENT_TYPE, MSGPACK
from txmq.model.tracebacks import text_of

BodyFormat: TypeAlias = Literal["json", "msgpack", "cloudevents"]
FORMATS = ("json", "msgpack", "cloudevents")
JSON = "application/json"
MAX_REASON = 1_000  # characters: some validators repeat all that they have seen
MODEL_HINT = "give a pydantic model, or another type that pydantic describes"
M = TypeVar("M")


class TopicOptions(TypedDict, total=False):
    """The keyword arguments of `client.topic`.

    `format`: of the bodies that are sent: "json", "msgpack", or "cloudevents", which is
    JSON with the headers of a CloudEvent in binary mode. `source` and `event_type` are
    the CloudEvent's; its type is by default the name of the model.
    """

    format: BodyFormat
    source: str
    event_type: str


class TypedBodies(Generic[M]):
    """A topic and the model of its bodies.

    `format` is of what is sent. What is received names its own in its headers, so that
    a topic may have several.
    """

    def __init__(self, name: str, model: type[M], **options: Unpack[TopicOptions]) -> None:
        """Raises LocalProtocolError, and ConfigError for a type that is no model or an
        option that is none.
        """
        self.name, self.model = check_name(name, "topic"), model
        check_options("topic", options, TopicOptions.__optional_keys__)
        self.format, self._source = options.get("format", "json"), options.get("source")
        if self.format not in FORMATS:
            raise LocalProtocolError(
                f"format is {self.format!r}", hint=f"use one of {', '.join(map(repr, FORMATS))}"
            )
        if (self._source is None) is (self.format == "cloudevents"):
            raise LocalProtocolError(
                f"format is {self.format!r}, and source is {self._source!r}",
                hint='a CloudEvent has a source: format="cloudevents", source="/shop/orders"',
            )
        try:
            self._adapter: TypeAdapter[M] = TypeAdapter(model)
        except (PydanticSchemaGenerationError, PydanticUserError) as error:
            raise ConfigError("model", str(error)[:MAX_REASON], hint=MODEL_HINT) from error
        self.title = str(getattr(model, "__name__", model))
        self._event_type = options.get("event_type") or self.title

    def __repr__(self) -> str:
        return f"<topic {self.name} of {self.title}>"

    def json_schema(self) -> str:
        """Return the JSON Schema of the model. Raises ConfigError for a model that has
        none.
        """
        try:
            return json.dumps(self._adapter.json_schema())
        except PydanticUserError as error:
            raise ConfigError("model", str(error)[:MAX_REASON], hint=MODEL_HINT) from error

    def encode(self, value: M) -> bytes:
        """Return the body of a value. Raises BodyMismatch if the model would not
        read it.
        """
        adapter = self._adapter
        try:
            body = adapter.dump_json(value, by_alias=True, warnings=False)
            adapter.validate_json(body)
            if self.format == "msgpack":
                return bytes(msgpack.packb(json.loads(body)))
        except Exception as error:
            raise self._mismatch(f"a body for topic {self.name!r}", error) from error
        return body

    def prepared(self, value: M, fields: Fields) -> tuple[bytes, Fields]:
        """Return the body of a value, and the fields of its message. Raises
        BodyMismatch.
        """
        if own := self._headers():
            fields = {**fields, "headers": own | dict(fields.get("headers") or {})}
        return self.encode(value), fields

    def message(self, value: M, **fields: Unpack[Fields]) -> Message:
        """Return the message of a value. Raises BodyMismatch."""
        body, fields = self.prepared(value, fields)
        return Message(body, **fields)

    def column(self, values: Iterable[M]) -> list[bytes]:
        """Return the bodies of values for a send of columns, which has no headers."""
        if self.format != "json":
            raise LocalProtocolError(
                f"columns have no headers, which name the format {self.format!r}",
                hint="use send_batch",
            )
        return [self.encode(value) for value in values]

    def decode(self, body: bytes, headers: Mapping[str, str]) -> M:
        """Return the value of a body. Raises BodyMismatch."""
        try:
            if headers.get(CONTENT_TYPE) == MSGPACK:
                body = json.dumps(msgpack.unpackb(body), ensure_ascii=False).encode()
            return self._adapter.validate_json(body)
        except Exception as error:
            raise self._mismatch("the body", error) from error

    def value(self, message: ReceivedMessage) -> M:
        """Return the value of a received message, which its consumer has checked, and
        its reader has not.

        Raises BodyMismatch, and LocalProtocolError for a message of another topic.
        """
        if message.topic != self.name:
            raise LocalProtocolError(
                f"a message of topic {message.topic!r}, and the model of {self.name!r}",
                hint="use the model of the message's topic",
            )
        value: M | None = getattr(message, "value", None)
        return self.decode(message.body, message.headers) if value is None else value

    def _headers(self) -> dict[str, str]:
        """Return the headers that tell the format."""
        if self.format == "json":
            return {}
        if self.format == "msgpack":
            return {CONTENT_TYPE: MSGPACK}
        return {
            CONTENT_TYPE: JSON,
            "ce_specversion": "1.0",
            "ce_id": str(uuid4()),
            "ce_source": str(self._source),
            "ce_type": self._event_type,
            "ce_time": datetime.now(UTC).isoformat(),
        }

    def _mismatch(self, what: str, error: Exception) -> BodyMismatch:
        if isinstance(error, ValidationError):
            where, reason = first_mistake(error, unit="field")
            told = f"{'.'.join(where) or 'the whole'}: {reason}"
        else:
            told = f"{type(error).__name__}: {text_of(error)}"
        return BodyMismatch(f"{what} is no {self.title}: {told[:MAX_REASON]}")


Topics: TypeAlias = Iterable[str | TypedBodies[Any]]
"""Topics by their names, or with models."""


def topic_names(topics: Topics) -> list[str]:
    """Return the names of topics; anything else stays, to be refused by its value."""
    return [topic.name if isinstance(topic, TypedBodies) else topic for topic in topics]


def models_of(topics: Topics) -> dict[str, TypedBodies[Any]]:
    """Return the topics with models by their names."""
    return {topic.name: topic for topic in topics if isinstance(topic, TypedBodies)}
