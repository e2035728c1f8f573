"""Arguments of control calls about single messages (docs/FORMATS.md 2.3)."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints

from txmq.errors import LocalProtocolError
from txmq.model import limits
from txmq.model.content import MAX_CRITERION, Content, body_criterion, content_of
from txmq.model.message import parse_message_id
from txmq.wire.calls.arguments import Args, Limit, Name, Token


def _message_id(text: object) -> tuple[bytes, int]:
    try:
        return parse_message_id(text if isinstance(text, str) else "")
    except LocalProtocolError as error:
        raise ValueError(error.message) from None


def _criterion(text: str) -> str:
    try:
        body_criterion(text)
    except LocalProtocolError as error:
        raise ValueError(f"{error.message}: {error.hint}") from None
    return text


MessageId = Annotated[tuple[bytes, int], BeforeValidator(_message_id)]
Time = Annotated[int, Field(ge=0, le=limits.TIME)]
PartitionNumber = Annotated[int, Field(ge=0, le=4_095)]
Short = Annotated[str, StringConstraints(min_length=1, max_length=256)]
TopicId = Annotated[int, Field(ge=0, lt=1 << 32)]
Position = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]
BodyCriterion = Annotated[
    str, StringConstraints(min_length=1, max_length=MAX_CRITERION), AfterValidator(_criterion)
]
HeaderCriterion = tuple[
    Annotated[str, StringConstraints(min_length=1, max_length=1_024)],
    Annotated[str, StringConstraints(max_length=limits.HEADERS)] | None,
]
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


class MessageCriteria(Args):
    """Properties of the messages to find: all that are given.

    `start` (included) and `end` bound the time of storage. `body` is a text, or a path
    into JSON and a value: `$.customer.id=17`. `header` is a name and a value, null =
    any.
    """

    key: Annotated[str, StringConstraints(min_length=1, max_length=limits.KEY)] | None = None
    id: MessageId | None = None
    start: Time | None = None
    end: Time | None = None
    body: BodyCriterion | None = None
    header: HeaderCriterion | None = None

    @property
    def content(self) -> Content | None:
        """The content that the messages have to have; None = any."""
        return content_of(self.body, self.header)

    @property
    def judges_bodies(self) -> bool:
        return self.body is not None


class MessageFind(MessageCriteria):
    """A page of a topic's messages.

    `partition` and `offset` bound the position. `after` is `next` of the page before.
    """

    topic: Name
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


class MessageSearch(MessageCriteria):
    """A page of messages in all topics; an `id` is looked for alone.

    `correlations`: only what follows from the first messages with these ids, or has one
    of these headers. `after` is `next` of the page before: the place where the search
    goes on.
    """

    correlations: Annotated[tuple[Short, ...], Field(max_length=100)] = ()
    after: tuple[TopicId, PartitionNumber, Position] | None = None
    limit: Limit = 100
    bodies: bool = False
    within_ms: Within | None = None

    @property
    def content(self) -> Content | None:
        return content_of(self.body, self.header, self.correlations)


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
