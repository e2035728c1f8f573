"""Refusals of a broker: one class per status on the wire (`txmq.wire.status`)."""

from __future__ import annotations

from math import ceil
from typing import Self

from txmq.errors.base import LogChanged, TxmqError


class RequestRejected(TxmqError):
    """The broker refused the request and did nothing; `detail` has the fields."""

    def __init__(
        self, message: str, *, hint: str = "", detail: dict[str, object] | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.detail = detail or {}


class BadRequest(RequestRejected):
    """The request is malformed or a value in it is out of range."""


class UnknownTopic(RequestRejected):
    """The topic does not exist and the broker does not create topics on first use."""


class UnknownPartition(RequestRejected):
    """The topic has no such partition."""


class StaleTopic(RequestRejected):
    """The topic has grown since the sender fetched its metadata.

    Fetch the metadata and send again.
    """

    retriable = True


class TopicExists(RequestRejected):
    """A topic of that name exists with other settings."""


class IncompatibleSchema(RequestRejected):
    """A change of a topic's schema breaks its rule of compatibility, or cannot be
    judged; `detail` lists what it breaks.
    """


class RecallTooLate(RequestRejected):
    """The message is not waiting for its time of delivery: published, or unknown."""


class UnknownGroup(RequestRejected):
    """The consumer group does not exist."""


class UnknownMember(RequestRejected):
    """The member is not, or no longer, part of the consumer group; join again."""

    retriable = True


class StaleGeneration(RequestRejected):
    """The member's generation is over; others may have its partitions and leases."""


class GroupMismatch(RequestRejected):
    """The consumer group exists with another mode or other settings."""


class NotLeased(RequestRejected):
    """The message is not leased to this member: acked, moved, or its lease ended."""


class TopicReplaced(RequestRejected):
    """The topic was deleted, and another one has its name: positions do not hold."""


class OffsetOutOfRange(RequestRejected):
    """The offset is below what is retained or above the end of the partition."""


class TopicClosed(RequestRejected):
    """An operator has closed the topic for writing, or for reading."""


class MessagesDamaged(RequestRejected):
    """Stored messages cannot be read any more.

    `detail` names them, and the `next` offset after them.
    """


class MessageTooLarge(RequestRejected):
    """A message or frame exceeds the broker's limit."""


class Throttled(RequestRejected):
    """The broker is over a budget; try again after a pause of `retry_after_s`.

    Clients do so by themselves until their time is up.
    """

    retriable = True

    @classmethod
    def after(cls, seconds: float, message: str, *, hint: str = "") -> Self:
        """Return the refusal that asks for a pause of so many seconds."""
        return cls(message, hint=hint, detail={"retry_after_ms": ceil(seconds * 1_000)})

    @property
    def retry_after_s(self) -> float:
        """The pause that the broker asks for, 0.0 = it names none; a minute at most."""
        asked = self.detail.get("retry_after_ms", 0)
        return min(60.0, asked / 1_000) if isinstance(asked, int) and asked > 0 else 0.0


class ReadOnly(RequestRejected):
    """The broker's disk is full: it serves reads and refuses writes."""

    retriable = True


class NotLeader(RequestRejected):
    """The node follows the leader of its cluster, and answers for nothing.

    `detail` has the addresses of nodes, that of the leader first if it is known.
    Clients go there by themselves until their time is up.
    """

    retriable = True

    @property
    def nodes(self) -> tuple[str, ...]:
        """Addresses of nodes, that of the leader first if it is known."""
        nodes = self.detail.get("nodes")
        return tuple(map(str, nodes)) if isinstance(nodes, list) else ()


class SequenceGap(RequestRejected):
    """A producer's sequence skipped numbers: an earlier send is missing."""


class UnknownProducer(RequestRejected):
    """A send was repeated by a producer that the broker has forgotten."""

    outcome = "unknown"


class ProducerFenced(RequestRejected):
    """A newer incarnation of this producer instance has taken over."""


class NoResolver(RequestRejected):
    """The broker has no resolver for the database that decides this transaction."""


class NotPermitted(RequestRejected):
    """The login does not allow this call on this resource."""


class AccessDenied(NotPermitted):
    """The user lacks a permission.

    `detail` has the verb, the resource and the user; the hint says how to grant it.
    """


class LoginFailed(RequestRejected):
    """The broker asks for a login, and there was none, or a wrong one."""


class UnknownUser(RequestRejected):
    """There is no such user."""


class UnknownLetter(RequestRejected):
    """There is no such dead letter."""


class UnknownPlan(RequestRejected):
    """There is no such replay plan."""


class Conflict(RequestRejected):
    """The transaction has the other outcome already; the contradiction was recorded."""


class HeuristicOutcome(Conflict):
    """An operator decided the transaction the other way; `detail` has the outcome."""


class DuplicateXid(RequestRejected):
    """The Xid belongs to another transaction (XAER_DUPID)."""


class OtherLog(RequestRejected, LogChanged):
    """The request is for a broker with another log."""


class DigestMismatch(RequestRejected):
    """The token was used before, for other contents."""


class BrokerFailed(RequestRejected):
    """The broker failed while it worked on the request; its log names the cause."""

    outcome = "unknown"
