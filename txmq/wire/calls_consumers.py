"""Control calls of consumer groups and dead letters (docs/FORMATS.md 2.3)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from txmq.errors import ConfigError
from txmq.model import limits
from txmq.model.message import is_name
from txmq.model.retry import RetryPolicy
from txmq.wire.args import Args, Limit, Name, Text


def _group(text: str) -> str:
    parent, has_member, member = text.partition("@")
    if not is_name(parent) or (has_member and not is_name(member)):
        raise ValueError("is no name of a consumer group: GROUP, or GROUP@MEMBER in broadcast mode")
    return text


GroupName = Annotated[str, AfterValidator(_group)]
Ms = Annotated[int, Field(ge=0, le=366 * 24 * 3600 * 1000)]
Offset = Annotated[int, Field(ge=0, le=limits.SEQUENCE)]
Partition = Annotated[int, Field(ge=0, le=4_095)]
Place = tuple[Name, Partition, Offset]
ErrorClasses = Annotated[
    tuple[Annotated[str, StringConstraints(min_length=1, max_length=256)], ...],
    Field(max_length=100),
]


class Retry(Args):
    """A retry policy (`txmq.model.retry.RetryPolicy`): delays in microseconds;
    `attempts` null = one for each delay.
    """

    delays: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1, max_length=1_000)
    ]
    attempts: int | None = None
    jitter: float = 0.0
    dead: ErrorClasses = ()
    postpone: ErrorClasses = ()

    @model_validator(mode="after")
    def _is_a_policy(self) -> Self:
        try:
            self.policy()
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    def policy(self) -> RetryPolicy:
        """What it describes."""
        return RetryPolicy(self.delays, self.attempts, self.jitter, self.dead, self.postpone)


class Wanted(Args):
    """Settings of a group; null = no opinion, it has its own or the default."""

    on_exhausted: Literal["park", "block", "skip"] | None = None
    retry: Retry | None = None
    lease_ms: Ms | None = None
    session_ms: Ms | None = None
    max_parked: Annotated[int, Field(ge=0, le=100_000_000)] | None = None
    flood_keys: Annotated[int, Field(ge=0, le=1_000)] | None = None
    span: Annotated[int, Field(ge=0, le=100_000_000)] | None = None
    consume_timeout_ms: Ms | None = None


class Join(Wanted):
    """Become a member of a consumer group; null = no opinion, the group has its own or
    the default.
    """

    group: Name
    member: Name | None = (
        None  # null = a name is made, and in broadcast mode forgotten with the member
    )
    instance: Annotated[
        str, StringConstraints(min_length=1, max_length=64)
    ]  # tells two processes of one name apart
    mode: Literal["concurrent", "ordered", "broadcast"] = "concurrent"
    topics: Annotated[tuple[Name, ...], Field(min_length=1, max_length=1_000)]
    start: Literal["first", "last"] | int | None = (
        None  # int: microseconds since the epoch, or if negative, from now
    )
    strategy: Literal["average", "circular", "consistent", "sticky"] | None = None
    static: bool = False  # its partitions wait for it as long as its session lasts
    held: (
        Annotated[tuple[tuple[Name, Partition, Offset, Offset], ...], Field(max_length=10_000)]
        | None
    ) = None


class Member(Args):
    """A member, by the group's name that the join gave."""

    group: GroupName
    member: Name
    instance: str = ""


class OfGeneration(Member):
    """A member and the generation it last heard of."""

    generation: int


class Heartbeat(OfGeneration):
    """A member is there; `paused` are topics that it does not fetch for now."""

    paused: Annotated[tuple[Name, ...], Field(max_length=1_000)] = ()


class Failure(Args):
    """What went wrong with a message, as its handler saw it."""

    type: Annotated[str, StringConstraints(max_length=256)] = ""
    text: Text = ""
    fingerprint: Annotated[str, StringConstraints(max_length=64)] = ""
    bases: ErrorClasses = ()  # of the error's class, the nearest first


class Nack(OfGeneration):
    """A message failed, or (`postpone`) is to come again later without being
    counted.
    """

    topic: Name
    partition: Partition
    offset: Offset
    delay_ms: Ms | None = None
    error: Failure = Failure()
    dead: bool = False
    postpone: bool = False


class Return(OfGeneration):
    """Messages given back un-started: (topic, partition, start, end)."""

    ranges: Annotated[tuple[tuple[Name, Partition, Offset, Offset], ...], Field(max_length=10_000)]


class Extend(OfGeneration):
    """The member is still at work."""

    leases: Annotated[tuple[int, ...], Field(max_length=10_000)] = ()  # none named = all


class Group(Args):
    """One consumer group."""

    group: GroupName


class Operation(Group):
    """What an operator does to a group; who and why are kept in the log."""

    operator: Name | None = None
    reason: Text = ""


class GroupReset(Operation):
    """Where a group goes on."""

    topic: Name
    to: Literal["first", "last"] | int | dict[int, Offset] = (
        "first"  # int: microseconds; dict: offset by partition
    )
    reprocess: bool = False  # let the inbox take again what it has seen
    dry_run: bool = False


class GroupPause(Operation):
    """Which deliveries stop, or go on: of one topic, or (null) all."""

    topic: Name | None = None


class GroupClone(Operation):
    """A new group that goes on where this one stands."""

    to: Name


class GroupAlter(Operation, Wanted):
    """What an operator sets."""


class DlqList(Group):
    """A page of dead letters."""

    after: int = 0
    limit: Limit = 100
    bodies: bool = False


class DlqShow(Group):
    """One dead letter."""

    topic: Name
    partition: Partition
    offset: Offset


class DlqReplay(Operation):
    """Letters to deliver again."""

    letters: Annotated[tuple[Place, ...], Field(min_length=1, max_length=10_000)]


class DlqAbandon(DlqReplay):
    """Letters to close for ever."""

    reason: Annotated[str, StringConstraints(min_length=1, max_length=4_096)]
