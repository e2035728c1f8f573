"""What a member asks of the broker, and who is told the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from txmq.errors import RequestRejected
from txmq.wire.calls import encode_call
from txmq.wire.headers import Ack, Acked, Fetch, Opcode, pack_ack, pack_fetch

Reply = Callable[[bytes, float], None]
Refusal = Callable[[RequestRejected, float], None]
RUN = 1_000  # messages that were stored one by one, and come as one batch
MOST = (1 << 32) - 1  # of messages, and of bytes, that a fetch can ask for
REPLY_S = 15.0  # within which an answer is due that waits for nothing but the disk


class Seat(NamedTuple):
    """A member's place in its group, as last heard. `group` is the name to use, which
    is its own in broadcast mode.
    """

    group: str
    member: str
    instance: str
    generation: int
    epoch: int
    assignment: frozenset[tuple[str, int]]
    session_s: float
    lease_s: float
    consume_timeout_s: float

    @property
    def beat_s(self) -> float:
        """Seconds between two heartbeats."""
        return min(self.session_s, self.lease_s) / 3


class Request(NamedTuple):
    """A request to send. Its answer goes to `reply` or `refused`, with the time; none
    where the connection is lost.

    An answer that is not there after `patience_s` seconds means that the connection is
    lost.
    """

    opcode: int
    payload: bytes
    reply: Reply
    refused: Refusal
    patience_s: float = REPLY_S


def call(name: str, args: dict[str, Any], reply: Reply, refused: Refusal) -> Request:
    """A control call."""
    return Request(Opcode.CALL, encode_call(name, args), reply, refused)


def member_args(seat: Seat) -> dict[str, Any]:
    """The arguments that every call of a member has."""
    return {
        "group": seat.group,
        "member": seat.member,
        "generation": seat.generation,
        "instance": seat.instance,
    }


def fetch(  # all that a fetch says
    seat: Seat,
    wait_s: float,
    messages: int,
    size: int,
    reply: Reply,
    refused: Refusal,
    *,
    tags: int = 0,
    without: tuple[str, ...] = (),
) -> Request:
    """A request for at most so many messages and bytes of batches, of those whose tag
    filter has a bit of `tags`; nothing of the topics `without`.
    """
    room = min(size, MOST), min(messages, MOST)
    wanted = Fetch(
        seat.generation, round(wait_s * 1_000), *room, seat.group, seat.member, tags, RUN, without
    )
    return Request(Opcode.FETCH, pack_fetch(wanted), reply, refused, wait_s + REPLY_S)


def ack(seat: Seat, ranges: Iterable[Acked], reply: Reply, refused: Refusal) -> Request:
    """Messages that are done with."""
    payload = pack_ack(Ack(seat.generation, seat.group, seat.member, tuple(ranges)))
    return Request(Opcode.ACK, payload, reply, refused)
