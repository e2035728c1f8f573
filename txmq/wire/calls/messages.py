"""Arguments of control calls about single messages (docs/FORMATS.md 2.3)."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, StringConstraints

from txmq.errors import LocalProtocolError
from txmq.model import limits
from txmq.model.message import parse_message_id
from txmq.wire.calls.arguments import Args, Limit, Name, Token


def _message_id(text: object) -> tuple[bytes, int]:
    try:
        return parse_message_id(text if isinstance(text, str) else "")
    except LocalProtocolError as error:
        raise ValueError(error.message) from None


MessageId = Annotated[tuple[bytes, int], BeforeValidator(_message_id)]
Time = Annotated[int, Field(ge=0, le=limits.TIME)]
PartitionNumber = Annotated[int, Field(ge=0, le=4_095)]
TopicId = Annotated[int, Field(ge=0, lt=1 << 32)]
Position = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]
# after which a reply has what was found by then, and the next one goes on
Within = Annotated[int, Field(ge=1, le=60_000)]
# number of the message, group id, lease, member, attempts, is it processed
KnownDelivery = tuple[
    Annotated[int, Field(ge=0, lt=100)], Position, Position, str, Position | None, bool
]


class MessageIds(Args):
    """Messages by id."""

    ids: Annotated[tuple[MessageId, ...], Field(min_length=1, max_length=1_000)]


class MessageShow(Args):
    """One message by id."""

    id: MessageId
    bodies: bool = False


class MessageFind(Args):
    """A page of a topic's messages, selected by all criteria given.

    `key` and `id` select messages; `start` (included) and `end` bound the time of
    storage; `partition` and `offset` bound the position. `after` is `next` of the page
    before.
    """

    topic: Name
    key: Annotated[str, StringConstraints(min_length=1, max_length=limits.KEY)] | None = None
    id: MessageId | None = None
    start: Time | None = None
    end: Time | None = None
    partition: Annotated[int, Field(ge=0, le=4_095)] | None = None
    offset: Position = 0
    after: tuple[Position, Position] | None = None
    limit: Limit = 100
    bodies: bool = False


class ProducerSkip(Args):
    """A producer's session that goes on at `sequence`, whatever is missing before."""

    producer: Token
    epoch: Annotated[int, Field(ge=0, le=0xFFFF_FFFF)] = 0
    sequence: Annotated[int, Field(ge=0, le=limits.SEQUENCE)]


class MessageSearch(Args):
    """A page of the messages of a key, or of an id, in all topics.

    `after` is `next` of the page before: the place where the search goes on.
    """

    key: Annotated[str, StringConstraints(min_length=1, max_length=limits.KEY)] | None = None
    id: MessageId | None = None
    after: tuple[TopicId, PartitionNumber, Position] | None = None
    limit: Limit = 100
    bodies: bool = False
    within_ms: Within | None = None


class MessageLife(Args):
    """One message by its place."""

    topic: Name
    partition: PartitionNumber
    offset: Position


class MessageDeliveries(Args):
    """Messages by their places, whose deliveries are looked for in the log.

    `after` and `known` are `next` and `known` of the reply before.
    """

    messages: Annotated[
        tuple[tuple[Name, PartitionNumber, Position], ...], Field(min_length=1, max_length=100)
    ]
    after: Position | None = None
    known: Annotated[tuple[KnownDelivery, ...], Field(max_length=1_000)] = ()
    within_ms: Within | None = None


class DelayedList(Args):
    """A page of delayed messages; `after` is `next` of the page before."""

    topic: Name | None = None
    after: tuple[Position, Position] | None = None
    limit: Limit = 100
