"""Control calls (docs/FORMATS.md 2.3): the arguments of each, checked strictly before
anything acts on them.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import Field, StringConstraints, ValidationError

from txmq.errors import RemoteProtocolError
from txmq.errors.validation import first_mistake
from txmq.wire import calls_consumers as consumers
from txmq.wire import calls_messages as messages
from txmq.wire import calls_topics as topics
from txmq.wire import calls_xa as xa
from txmq.wire.args import Args, Limit, Name, Text, Token
from txmq.wire.calls_alarms import AlarmsReport
from txmq.wire.json import WireModel, dump, parse

ARGUMENTS = "docs/FORMATS.md 2.3 tells what the calls take"


class NoArgs(Args):
    """For calls that take none."""


class Stats(Args):
    """Statistics; of the topics and groups so many, the busiest first."""

    limit: Limit = 100


class TxList(Args):
    """Which transactions to list."""

    state: Literal["undecided", "in-doubt", "waiting", "open", "conflicts"] = "undecided"
    limit: Limit = 100


class TokenArgs(Args):
    """One transaction or job."""

    token: Token


class TxShow(TokenArgs):
    """One transaction; `detail`: with its neighbours, contradictions and messages, a
    page of them with their bodies or without.
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
    """A long poll of a process of a service that has these checkers; none named =
    all.
    """

    service: Name
    checkers: Annotated[tuple[Name, ...], Field(max_length=1_000)] = ()
    max: Limit = 16
    wait_ms: Annotated[int, Field(ge=0, le=60_000)] = 20_000


class ChecksAnswer(TokenArgs):
    """A checker's answer."""

    answer: Literal["COMMIT", "ROLLBACK", "UNKNOWN"]
    reason: Text = ""  # of an UNKNOWN


A = TypeVar("A", bound=Args)


class Call(WireModel, Generic[A]):
    """The payload of a CALL frame."""

    call: str
    args: A


CALLS: dict[str, type[Args]] = {
    "topic.create": topics.TopicCreate,
    "topic.alter": topics.TopicAlter,
    "topic.describe": topics.TopicNames,
    "topic.list": NoArgs,
    "topic.show": topics.TopicName,
    "topic.grow": topics.TopicShape,
    "topic.delete": topics.TopicName,
    "consumer.join": consumers.Join,
    "consumer.heartbeat": consumers.Heartbeat,
    "consumer.leave": consumers.Member,
    "consumer.nack": consumers.Nack,
    "consumer.return": consumers.Return,
    "consumer.extend": consumers.Extend,
    "group.list": NoArgs,
    "group.show": consumers.Group,
    "group.alter": consumers.GroupAlter,
    "group.delete": consumers.Operation,
    "group.reset": consumers.GroupReset,
    "group.clone": consumers.GroupClone,
    "group.pause": consumers.GroupPause,
    "group.resume": consumers.GroupPause,
    "tx.list": TxList,
    "tx.show": TxShow,
    "tx.decide": TxDecide,
    "tx.check": TxCheck,
    "tx.oldest": NoArgs,
    "mark.show": topics.TopicName,
    "producer.register": xa.ProducerRegister,
    "xa.list": xa.XaList,
    "xa.decided": xa.XaDecided,
    "xa.committed": xa.XaCommitted,
    "xa.find": xa.XaFind,
    "xa.outcome": xa.XaOutcome,
    "xa.heuristic": xa.XaHeuristic,
    "xa.forget": xa.XaForget,
    "job.show": TokenArgs,
    "job.decide": JobDecide,
    "checks.wait": ChecksWait,
    "checks.answer": ChecksAnswer,
    "dlq.list": consumers.DlqList,
    "dlq.show": consumers.DlqShow,
    "dlq.stats": consumers.Group,
    "dlq.replay": consumers.DlqReplay,
    "dlq.abandon": consumers.DlqAbandon,
    "message.recall": messages.MessageIds,
    "message.delayed": messages.DelayedList,
    "message.show": messages.MessageShow,
    "message.find": messages.MessageFind,
    "broker.show": NoArgs,
    "broker.alarms": NoArgs,
    "broker.stats": Stats,
    "alarms.report": AlarmsReport,
}


def encode_call(name: str, args: dict[str, object]) -> bytes:
    """The payload of a call; its arguments are checked by the broker."""
    return dump({"call": name, "args": args})


def decode_call(payload: bytes) -> tuple[str, Args]:
    """Name and checked arguments of a call. Raises RemoteProtocolError for an unknown
    one, or wrong arguments.
    """
    tree = parse(payload)
    name = tree.get("call") if isinstance(tree, dict) else None
    if not isinstance(name, str) or name not in CALLS:
        hint = "client and broker must be of one version"
        raise RemoteProtocolError(f"there is no call {str(name)[:64]!r}", hint=hint)
    try:
        return name, _envelope(name).model_validate_json(payload).args
    except ValidationError as error:
        where, why = first_mistake(error, unit="argument")
        field = ".".join(part for part in where if part != "args") or "the whole"
        raise RemoteProtocolError(f"{name}: {field}: {why}", hint=ARGUMENTS) from None


@cache
def _envelope(name: str) -> type[Call[Any]]:
    return Call[CALLS[name]]  # type: ignore[valid-type] # made at run time
