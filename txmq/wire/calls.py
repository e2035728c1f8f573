"""Control calls (docs/FORMATS.md 2.3): the arguments of each, checked strictly before anything acts on them."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import Field, StringConstraints

from txmq import limits
from txmq.errors import RemoteProtocolError
from txmq.wire import calls_xa as xa
from txmq.wire.args import Args, Limit, Name, Text, Token
from txmq.wire.json import WireModel, dump, parse, parse_as

MemberName = Annotated[str, StringConstraints(pattern=rf"^[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{limits.NAME - 1}}}$")]
GroupName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,126}(@[A-Za-z0-9_-][A-Za-z0-9._-]{0,126})?$")
]
Ms = Annotated[int, Field(ge=0, le=366 * 24 * 3600 * 1000)]
Offset = Annotated[int, Field(ge=0, le=limits.SEQUENCE)]
Partition = Annotated[int, Field(ge=0, le=4_095)]
Place = tuple[Name, Partition, Offset]


class NoArgs(Args):
    """For calls that take none."""


class TopicName(Args):
    """One topic, or one mark."""

    name: Name


class TopicShape(TopicName):
    """A topic and its number of partitions."""

    partitions: Annotated[int, Field(ge=1, le=4_096)]


class TopicNames(Args):
    """Several topics; `create` makes the missing ones, where the broker allows it."""

    names: Annotated[tuple[Name, ...], Field(max_length=10_000)]
    create: bool = False


class Retry(Args):
    """A retry policy (`txmq.retry.RetryPolicy`): delays in microseconds; `attempts` null = one for each delay."""

    delays: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1, max_length=1_000)]
    attempts: int | None = None
    jitter: float = 0.0


class Join(Args):
    """Become a member of a consumer group; null = no opinion, the group has its own or the default."""

    group: Name
    member: MemberName | None = None  # null = a name is made, and in broadcast mode forgotten with the member
    instance: Annotated[str, StringConstraints(min_length=1, max_length=64)]  # tells two processes of one name apart
    mode: Literal["concurrent", "ordered", "broadcast"] = "concurrent"
    topics: Annotated[tuple[Name, ...], Field(min_length=1, max_length=1_000)]
    start: Literal["first", "last"] | int | None = (
        None  # int: microseconds since the epoch; null = no opinion, as below
    )
    on_exhausted: Literal["park", "block", "skip"] | None = None
    retry: Retry | None = None
    lease_ms: Ms | None = None
    session_ms: Ms | None = None
    strategy: Literal["average", "circular", "consistent", "sticky"] | None = None
    static: bool = False  # its partitions wait for it as long as its session lasts
    held: Annotated[tuple[tuple[Name, Partition, Offset, Offset], ...], Field(max_length=10_000)] | None = None


class Member(Args):
    """A member, by the group's name that the join gave."""

    group: GroupName
    member: MemberName
    instance: str = ""


class Heartbeat(Member):
    """A member and the generation it last heard of."""

    generation: int


class Failure(Args):
    """What went wrong with a message, as its handler saw it."""

    type: Annotated[str, StringConstraints(max_length=256)] = ""
    text: Text = ""
    fingerprint: Annotated[str, StringConstraints(max_length=64)] = ""


class Nack(Heartbeat):
    """A message failed."""

    topic: Name
    partition: Partition
    offset: Offset
    delay_ms: Ms | None = None
    error: Failure = Failure()
    dead: bool = False


class Return(Heartbeat):
    """Messages given back un-started: (topic, partition, start, end)."""

    ranges: Annotated[tuple[tuple[Name, Partition, Offset, Offset], ...], Field(max_length=10_000)]


class Extend(Heartbeat):
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
    to: Literal["first", "last"] | int | dict[int, Offset] = "first"  # int: microseconds; dict: offset by partition
    reprocess: bool = False  # let the inbox take again what it has seen
    dry_run: bool = False


class TxList(Args):
    """Which transactions to list."""

    state: Literal["undecided", "in-doubt", "waiting", "open", "conflicts"] = "undecided"
    limit: Limit = 100


class TokenArgs(Args):
    """One transaction or job."""

    token: Token


class TxShow(TokenArgs):
    """One transaction; `detail`: with its neighbours, contradictions and messages, a page of them with their bodies or
    without.
    """

    detail: bool = False
    after: Annotated[int, Field(ge=0)] = 0  # messages of the pages before
    limit: Limit = 100
    bodies: bool = False


class TxDecide(TokenArgs):
    """An operator's decision."""

    outcome: Literal["COMMIT", "ROLLBACK"]
    operator: Name
    reason: Annotated[str, StringConstraints(min_length=1, max_length=4_096)]


class TxCheck(Args):
    """What to ask about now; null = all that is undecided."""

    token: Token | None = None


class JobDecide(TokenArgs):
    """One decision over many groups."""

    outcome: Literal["COMMIT", "ROLLBACK"]
    winners: Annotated[tuple[Token, ...], Field(max_length=100_000)] = ()


class ChecksWait(Args):
    """A long poll of a service's checker."""

    service: Name
    max: Limit = 16
    wait_ms: Annotated[int, Field(ge=0, le=60_000)] = 20_000


class ChecksAnswer(TokenArgs):
    """A checker's answer."""

    answer: Literal["COMMIT", "ROLLBACK", "UNKNOWN"]
    reason: Text = ""  # of an UNKNOWN


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


A = TypeVar("A", bound=Args)


class Call(WireModel, Generic[A]):
    """The payload of a CALL frame."""

    call: str
    args: A


CALLS: dict[str, type[Args]] = {
    "topic.create": TopicShape,
    "topic.describe": TopicNames,
    "topic.list": NoArgs,
    "topic.show": TopicName,
    "topic.grow": TopicShape,
    "topic.delete": TopicName,
    "consumer.join": Join,
    "consumer.heartbeat": Heartbeat,
    "consumer.leave": Member,
    "consumer.nack": Nack,
    "consumer.return": Return,
    "consumer.extend": Extend,
    "group.list": NoArgs,
    "group.show": Group,
    "group.delete": Operation,
    "group.reset": GroupReset,
    "group.pause": Operation,
    "group.resume": Operation,
    "tx.list": TxList,
    "tx.show": TxShow,
    "tx.decide": TxDecide,
    "tx.check": TxCheck,
    "tx.oldest": NoArgs,
    "mark.show": TopicName,
    "producer.register": xa.ProducerRegister,
    "xa.list": xa.XaList,
    "xa.decided": xa.XaDecided,
    "xa.find": xa.XaFind,
    "xa.outcome": xa.XaOutcome,
    "xa.heuristic": xa.XaHeuristic,
    "xa.forget": xa.XaForget,
    "job.show": TokenArgs,
    "job.decide": JobDecide,
    "checks.wait": ChecksWait,
    "checks.answer": ChecksAnswer,
    "dlq.list": DlqList,
    "dlq.show": DlqShow,
    "dlq.stats": Group,
    "dlq.replay": DlqReplay,
    "dlq.abandon": DlqAbandon,
    "broker.show": NoArgs,
    "broker.alarms": NoArgs,
}


def encode_call(name: str, args: dict[str, object]) -> bytes:
    """The payload of a call; its arguments are checked by the broker."""
    return dump({"call": name, "args": args})


def decode_call(payload: bytes) -> tuple[str, Args]:
    """Name and checked arguments of a call. Raises RemoteProtocolError for an unknown one, or wrong arguments."""
    tree = parse(payload)
    name = tree.get("call") if isinstance(tree, dict) else None
    if not isinstance(name, str) or name not in CALLS:
        hint = "client and broker must be of one version"
        raise RemoteProtocolError(f"there is no call {str(name)[:64]!r}", hint=hint)
    return name, parse_as(_envelope(name), payload).args


@cache
def _envelope(name: str) -> type[Call[Any]]:
    return Call[CALLS[name]]  # type: ignore[valid-type] # made at run time
