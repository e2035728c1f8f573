"""Arguments of control calls about local stores of consumers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from txmq.model import limits
from txmq.wire.calls.arguments import Args, Limit, Name, Text, Token
from txmq.wire.calls.consumers import (
    GenerationArgs,
    GroupArgs,
    GroupName,
    Offset,
    OperatorArgs,
    Partition,
)

MAX_ENTRIES = 1_000  # of one call
TopicId = Annotated[int, Field(ge=0, lt=2**32)]
Attempts = Annotated[int, Field(ge=0, le=2**31)]
Count = Annotated[int, Field(ge=0, le=2**62)]
Time = Annotated[int, Field(ge=0, le=limits.SEQUENCE)]
Failure = tuple[
    Annotated[str, StringConstraints(max_length=256)],
    Text,
    Annotated[str, StringConstraints(max_length=64)],
]
State = Literal["stored", "acked", "dead", "returned"]
# topic, its id, partition, offset, state, attempt, due, failure; the generation and the
# epoch in which the message was delivered, 0 = not known
Entry = tuple[Name, TopicId, Partition, Offset, State, Attempts, Time, Failure | None, Count, Count]
Entries = Annotated[tuple[Entry, ...], Field(max_length=MAX_ENTRIES)]


class ConsumerStored(GenerationArgs):
    """Report of a member's local store; without entries it asks for orders."""

    store: Token
    host: Annotated[str, StringConstraints(max_length=255)] = ""
    entries: Entries = ()


class RecoverList(Args):
    """A page of the stores with messages, of one group or (null) of all; `after` is
    GROUP/STORE.
    """

    group: GroupName | None = None
    after: Text = ""
    limit: Limit = 1_000


class StoreArgs(GroupArgs):
    """A consumer's store by its id."""

    store: Token


class RecoverShow(StoreArgs):
    """A page of the messages of a store; `after`: topic id, partition and offset."""

    after: tuple[TopicId, Partition, Offset] | None = None
    limit: Limit = 100
    bodies: bool = False


class RecoverAdopt(OperatorArgs):
    """Adopt a store; `force`: though its owner is a member."""

    store: Token
    force: bool = False


class RecoverTell(RecoverAdopt):
    """Report of a copy of a store."""

    entries: Entries
