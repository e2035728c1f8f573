"""Control calls about single messages (docs/FORMATS.md 2.3)."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, StringConstraints

from txmq.errors import LocalProtocolError
from txmq.model import limits
from txmq.model.message import parse_message_id
from txmq.wire.args import Args, Limit, Name


def _message_id(text: object) -> tuple[bytes, int]:
    try:
        return parse_message_id(text if isinstance(text, str) else "")
    except LocalProtocolError as error:
        raise ValueError(error.message) from None


MessageId = Annotated[tuple[bytes, int], BeforeValidator(_message_id)]
Time = Annotated[int, Field(ge=0, le=limits.TIME)]
Position = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]


class MessageIds(Args):
    """Messages, by their ids."""

    ids: Annotated[tuple[MessageId, ...], Field(min_length=1, max_length=1_000)]


class MessageShow(Args):
    """One message, by its id."""

    id: MessageId
    bodies: bool = False


class MessageFind(Args):
    """A page of a topic's messages: with that key, of that id, stored from `start` on
    and before `end`, in that partition from `offset` on; `after` is `next` of the page
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


class DelayedList(Args):
    """A page of the messages that wait for their time; `after` is `next` of the page
    before.
    """

    topic: Name | None = None
    after: tuple[Position, Position] | None = None
    limit: Limit = 100
