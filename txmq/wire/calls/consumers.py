"""Arguments of control calls of consumer groups and dead letters."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from txmq.errors import ConfigError
from txmq.model import limits
from txmq.model.message import is_name
from txmq.model.retry import RetryPolicy
from txmq.model.units import DAY, MILLISECOND
from txmq.wire.calls.arguments import Args, Name, Text


def _group(text: str) -> str:
    parent, has_member, member = text.partition("@")
    if not is_name(parent) or (has_member and not is_name(member)):
        raise ValueError(
            "invalid name of a consumer group: use GROUP, or GROUP@MEMBER in broadcast mode"
        )
    return text


GroupName = Annotated[str, AfterValidator(_group)]
Ms = Annotated[int, Field(ge=0, le=366 * DAY // MILLISECOND)]
Offset = Annotated[int, Field(ge=0, le=limits.SEQUENCE)]
Partition = Annotated[int, Field(ge=0, le=4_095)]
MessagePlace = tuple[Name, Partition, Offset]
ErrorClasses = Annotated[
    tuple[Annotated[str, StringConstraints(min_length=1, max_length=256)], ...],
    Field(max_length=100),
]


class RetryArgs(Args):
    """A retry policy (`txmq.model.retry.RetryPolicy`).

    `retries` null = one for each delay.
    """

    delays_us: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1, max_length=1_000)
    ]
    retries: int | None = None
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
        """Return the policy described."""
        return RetryPolicy.of_row(**self.model_dump())


class GroupSettingsArgs(Args):
    """Settings of a group; null = keep the group's own, or the default."""

    on_exhausted: Literal["park", "block", "skip"] | None = None
    retry: RetryArgs | None = None
    lease_ms: Ms | None = None
    session_ms: Ms | None = None
    max_parked: Annotated[int, Field(ge=0, le=100_000_000)] | None = None
    flood_keys: Annotated[int, Field(ge=0, le=1_000)] | None = None
    span: Annotated[int, Field(ge=0, le=100_000_000)] | None = None
    consume_timeout_ms: Ms | None = None


class Join(GroupSettingsArgs):
    """Join a consumer group; null settings = keep the group's own, or the default."""

    group: Name
    # null = the broker generates one, and in broadcast mode drops it with the member
    member: Name | None = None
    # distinguishes processes of one member name
    instance: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    mode: Literal["concurrent", "ordered", "broadcast"] = "concurrent"
    topics: Annotated[tuple[Name, ...], Field(min_length=1, max_length=1_000)]
    # int: microseconds since the epoch, or if negative, from now
    start: Literal["first", "last"] | int | None = None
    strategy: Literal["average", "circular", "consistent", "sticky"] | None = None
    static: bool = False  # keeps its partitions as long as its session lasts
    version: Annotated[str, StringConstraints(max_length=128)] = ""  # of its program
    filter: Annotated[str, StringConstraints(max_length=256)] = ""  # what it takes; "" = all
    held: (
        Annotated[tuple[tuple[Name, Partition, Offset, Offset], ...], Field(max_length=10_000)]
        | None
    ) = None


class MemberArgs(Args):
    """A member; `group` is the name that the join returned."""

    group: GroupName
    member: Name
    instance: str = ""


class GenerationArgs(MemberArgs):
    """A member and the last generation that it received."""

    generation: int


class Heartbeat(GenerationArgs):
    """Keep the session alive; the member fetches nothing of the topics `paused`."""

    paused: Annotated[tuple[Name, ...], Field(max_length=1_000)] = ()


class FailureArgs(Args):
    """A handler's error for one message."""

    type: Annotated[str, StringConstraints(max_length=256)] = ""
    text: Text = ""
    fingerprint: Annotated[str, StringConstraints(max_length=64)] = ""
    bases: ErrorClasses = ()  # base classes of the error, nearest first


class Nack(GenerationArgs):
    """A failed message, or one to `postpone` without counting the attempt."""

    topic: Name
    partition: Partition
    offset: Offset
    delay_ms: Ms | None = None
    error: FailureArgs = FailureArgs()
    dead: bool = False
    postpone: bool = False


class Return(GenerationArgs):
    """Give back messages that were not started: (topic, partition, start, end)."""

    ranges: Annotated[tuple[tuple[Name, Partition, Offset, Offset], ...], Field(max_length=10_000)]


class Extend(GenerationArgs):
    """Extend leases of a member that is still processing."""

    leases: Annotated[tuple[int, ...], Field(max_length=10_000)] = ()  # none named = all


class GroupArgs(Args):
    """One consumer group."""

    group: GroupName


class OperatorArgs(GroupArgs):
    """An operator's action on a group; operator and reason are stored in the log."""

    operator: Name | None = None
    reason: Text = ""


class GroupReset(OperatorArgs):
    """Move a group to another position."""

    topic: Name
    # int: microseconds since the epoch; dict: offsets by partition
    to: Literal["first", "last"] | int | dict[int, Offset] = "first"
    reprocess: bool = False  # inboxes accept messages again that they have processed
    dry_run: bool = False


class GroupPause(OperatorArgs):
    """Pause or resume the deliveries of one topic, or (null) of all."""

    topic: Name | None = None


class GroupClone(OperatorArgs):
    """Create a group that starts at this group's position."""

    to: Name


class GroupAlter(OperatorArgs, GroupSettingsArgs):
    """Change the settings of a group."""

    # dead letters, whatever their retention
    keep_until_exported: bool | None = None
    messages_per_s: Annotated[int, Field(ge=0, le=1_000_000_000)] | None = None
    cold_bytes_per_s: Annotated[int, Field(ge=0, le=1_000_000_000_000)] | None = None
    # of alarms about its letters, keys and stores
    alarm_severity: Literal["default", "critical", "warning", "off"] | None = None


class InboxArgs(GroupArgs):
    """A partition of a topic, as the inbox of a member knows it."""

    topic: Name
    topic_id: Annotated[int, Field(ge=1)]
    partition: Partition


OffsetRanges = Annotated[tuple[tuple[Offset, Offset], ...], Field(max_length=10_000)]


class InboxOpen(InboxArgs):
    """An inbox with the effects of these ranges."""

    applied: OffsetRanges


class InboxRestore(InboxArgs):
    """Ranges whose effects an inbox lacks; `lost`: give up those that are not
    retained.
    """

    ranges: OffsetRanges
    lost: bool = False
