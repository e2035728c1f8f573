"""The requests of a member, and the replies to them (docs/FORMATS.md 2.3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from txmq.client.protocol.consumer.membership import Identities, Membership, PartitionReset
from txmq.errors import RequestRejected
from txmq.model.retry import RetryPolicy
from txmq.model.topic_partition import PartitionName
from txmq.wire.calls.encoding import encode_call
from txmq.wire.data_requests import Ack, AckedRange, Fetch, Opcode, pack_ack, pack_fetch

OnReply = Callable[[bytes, float], None]
OnRefusal = Callable[[RequestRejected, float], None]
RUN = 1_000  # messages stored one by one that the broker may send as one chunk
LIMIT = (1 << 32) - 1  # of messages, and of bytes, in one fetch: both are 32-bit fields
REPLY_S = 15.0  # for a reply that waits for nothing but the disk
# So long before a reply is overdue, other nodes are asked who leads.
DOUBT_S = 10.0


class Request(NamedTuple):
    """A request to send, with the callbacks for its answer and the time of the answer.

    Neither callback is called if the connection is lost. An answer that is missing
    after `timeout_s` seconds means that the connection is lost.
    """

    opcode: int
    payload: bytes
    reply: OnReply
    refused: OnRefusal
    timeout_s: float = REPLY_S


def call_request(name: str, args: dict[str, Any], reply: OnReply, refused: OnRefusal) -> Request:
    """Return the request of a control call."""
    return Request(Opcode.CALL, encode_call(name, args), reply, refused)


def member_call(
    name: str,
    membership: Membership,
    args: dict[str, Any],
    reply: OnReply,
    refused: OnRefusal,
) -> Request:
    """Return the request of a member's call; it also carries the membership."""
    member = {
        "group": membership.group,
        "member": membership.member,
        "generation": membership.generation,
        "instance": membership.instance,
    }
    return call_request(name, member | args, reply, refused)


def fetch_request(
    membership: Membership,
    wait_s: float,
    messages: int,
    size: int,
    reply: OnReply,
    refused: OnRefusal,
    *,
    tags: int = 0,
    without: tuple[str, ...] = (),
) -> Request:
    """Return a request for at most so many messages and so many bytes of batches.

    The broker leaves out batches whose tag filter has no bit of `tags`, and the topics
    in `without`.
    """
    room = min(size, LIMIT), min(messages, LIMIT)
    header = Fetch(
        membership.generation,
        round(wait_s * 1_000),
        *room,
        membership.group,
        membership.member,
        tags,
        RUN,
        without,
    )
    return Request(Opcode.FETCH, pack_fetch(header), reply, refused, wait_s + REPLY_S)


def ack_request(
    membership: Membership,
    ranges: tuple[AckedRange, ...],
    filtered: tuple[AckedRange, ...],
    reply: OnReply,
    refused: OnRefusal,
) -> Request:
    """Return the request that acks these ranges, some as filtered."""
    payload = pack_ack(
        Ack(membership.generation, membership.group, membership.member, ranges, filtered)
    )
    return Request(Opcode.ACK, payload, reply, refused)


class MemberReply(BaseModel):
    """A reply. Fields that a newer broker adds are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class GroupRetry(MemberReply):
    """The retry policy of a group (`RetryPolicy.to_json`)."""

    delays_us: tuple[int, ...]
    retries: int
    jitter: float
    dead: tuple[str, ...]
    postpone: tuple[str, ...]


class IdentifyingReply(MemberReply):
    """A reply with the identities of the member's topics and partitions.

    `retry` is the group's policy. `resets` has topic, partition, the generation of the
    last reset, and (offset, epoch from there on).
    """

    generation: int
    epoch: int
    assignment: tuple[PartitionName, ...]
    consume_timeout_ms: Annotated[int, Field(gt=0)]
    topics: dict[str, int]
    resets: tuple[tuple[str, int, int, tuple[tuple[int, int], ...]], ...]
    retry: GroupRetry

    @property
    def policy(self) -> RetryPolicy:
        """The group's retry policy."""
        return RetryPolicy.of_row(**self.retry.model_dump())

    @property
    def identities(self) -> Identities:
        """The identities of the member's topics and partitions."""
        return Identities(
            self.topics,
            {
                (topic, partition): PartitionReset(generation, steps)
                for topic, partition, generation, steps in self.resets
            },
        )


class JoinReply(IdentifyingReply):
    """A member's place in its group. `group` is the name to use from now on."""

    group: str
    member: str
    session_ms: Annotated[int, Field(gt=0)]
    lease_ms: Annotated[int, Field(gt=0)]

    def membership(self, instance: str) -> Membership:
        """Return the membership that begins with this reply."""
        return Membership(
            group=self.group,
            member=self.member,
            instance=instance,
            generation=self.generation,
            epoch=self.epoch,
            assignment=frozenset(self.assignment),
            session_s=self.session_ms / 1_000,
            lease_s=self.lease_ms / 1_000,
            consume_timeout_s=self.consume_timeout_ms / 1_000,
            identities=self.identities,
            retry=self.policy,
        )


class HeartbeatReply(IdentifyingReply):
    """The present generation and the member's assignment in it."""

    def updated(self, membership: Membership) -> Membership:
        """Return the membership as it is from now on."""
        return membership._replace(
            generation=self.generation,
            epoch=self.epoch,
            identities=self.identities,
            retry=self.policy,
            assignment=frozenset(self.assignment),
            consume_timeout_s=self.consume_timeout_ms / 1_000,
        )


class NackReply(MemberReply):
    """The state of a failed message after a nack.

    The member returns messages of the same key under leases below `fence_lease`. Where
    the circuit breaker of the group is open (`guarded`), it returns all that waits.
    """

    moved: str
    attempt: int
    fence_lease: int = 0
    guarded: bool = False
