"""The settlement of messages with the broker: acks, nacks, and unprocessed returns.

A message counts as settled only when the broker has confirmed it. After a lost
connection everything unconfirmed is sent again before anything is fetched; the broker
recognises what it has already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import count
from math import inf
from typing import NamedTuple

from txmq.client.log import get_logger
from txmq.client.protocol.consumer.acks import RANGES_PER_REQUEST, PendingAcks, join
from txmq.client.protocol.consumer.consume_timeout import ExpiredMessage, timeout_failure
from txmq.client.protocol.consumer.fetched import DUPLICATE, NACKED, OUTSTANDING
from txmq.client.protocol.consumer.local_queue import LocalQueue
from txmq.client.protocol.consumer.membership import Membership
from txmq.client.protocol.consumer.requests import (
    NackReply,
    Request,
    ack_request,
    member_call,
)
from txmq.client.protocol.consumer.stats import ConsumerStats
from txmq.errors import NotLeased, RequestRejected, UnknownMember
from txmq.model.retry import FailureReport
from txmq.model.topic_partition import PartitionName
from txmq.wire.data_requests import AckedRange, unpack_refused
from txmq.wire.json import parse_as

NACKS_IN_FLIGHT = 1_024  # each waits for a sync, which those on their way share
ANY_LEASE = 1 << 63
LINGER_S = 0.01  # that an ack waits for others to share its request
TIMED_OUT = 1_000  # expired messages that are remembered, to log late acks of them
log = get_logger()


class PendingNack(NamedTuple):
    """A failed message at `place`.

    `delay_ms` None: the group's policy decides. `dead`: to the dead letters at once.
    `postpone`: it did not fail, and this delivery does not count. `generation`: that of
    the delivery, so that no newer one takes the nack.
    """

    place: AckedRange
    key: str | None
    delay_ms: int | None
    failure: FailureReport
    dead: bool = False
    postpone: bool = False
    generation: int = 0


class Settlement:
    """Acks, nacks and returns that are on their way to the broker.

    `refused` is called for refusals that concern the member as a whole. `flush_now`: a
    caller waits for an ack. `timed_out`: messages that exceeded the consume timeout.
    """

    def __init__(
        self,
        queue: LocalQueue,
        stats: ConsumerStats,
        refused: Callable[[RequestRejected, float], None],
        *,
        ordered: bool,
    ) -> None:
        self._queue, self._stats, self._ordered = queue, stats, ordered
        self._refused = refused
        self._nacks: deque[PendingNack] = deque()
        self._behind: list[PendingNack] = []  # earlier messages of their keys
        self._returns_behind: list[AckedRange] = []  # those nacks
        self._nacks_in_flight: dict[int, PendingNack] = {}
        self._nack_numbers = count()
        self._returns: list[AckedRange] = []
        self._returns_in_flight = 0
        self._repeating = False  # until all that a lost connection left is answered
        # Puts a failed message into the local store; returns whether it does.
        self.take: Callable[[PendingNack], bool] | None = None
        self.acks = PendingAcks()
        self.flush_now = False
        self.timed_out: deque[AckedRange] = deque(maxlen=TIMED_OUT)

    @property
    def idle(self) -> bool:
        """True if the broker has confirmed everything."""
        return self.acks.empty and not (
            self._nacks or self._nacks_in_flight or self._returns or self._returns_in_flight
        )

    @property
    def unconfirmed_nacks(self) -> int:
        """The number of nacks that the broker has not answered, or not got yet."""
        return len(self._nacks) + len(self._nacks_in_flight) + len(self._behind)

    @property
    def returning(self) -> bool:
        """True while the broker has not confirmed that it has messages back."""
        return bool(self._returns or self._returns_in_flight)

    @property
    def resending(self) -> bool:
        """True while nacks wait to be sent, and after a lost connection until all is
        answered. A fetch before might lease their messages anew: a nack that has been
        counted would be counted again, and acked messages come again behind later ones.
        """
        return bool(self._nacks) or self._repeating

    def nack(self, nack: PendingNack) -> None:
        """Send a nack, or store the message. Until the broker confirms that, it blocks
        its key.
        """
        delivery = self._queue.delivery(nack.place, NACKED)
        assert delivery is not None, "the caller has changed its state"
        self._nack(nack._replace(generation=delivery.generation))

    def _nack(self, nack: PendingNack) -> None:
        """Send a nack, unless an earlier message of its key is in hand: if this process
        died now, that one would be delivered again behind this one.
        """
        if self._queue.has_earlier_in_hand(nack.place):
            self._behind.append(nack)
        elif self.take is None or not self.take(nack):
            self._nacks.append(nack)

    def release_nacks(self) -> None:
        """Send the nacks that have waited for earlier messages of their keys."""
        behind, self._behind = self._behind, []
        for nack in behind:
            if self._queue.delivery(nack.place, NACKED) is not None:
                self._nack(nack)
        if not self._behind and self._returns_behind:
            returns, self._returns_behind = self._returns_behind, []
            self.return_unprocessed(returns)

    def give_back(self, place: AckedRange, key: str | None, now: float) -> None:
        """Return a message in hand, in an ordered group with those behind it: a nack of
        its key that has waited for it is not sent.
        """
        ranges, key = [place], key if self._ordered else None
        behind = [one for one in self._behind if (one.key, one.place[:2]) == (key, place[:2])]
        for nack in behind if key else ():
            if nack.place.start > place.start:
                self._behind.remove(nack)
                self._queue.settle(nack.place, now=now, old=NACKED)
                ranges.append(nack.place)
        if key:
            ranges[:0] = self._queue.drop_key(place.topic, key, ANY_LEASE)
        if key and any(nack.place.start < place.start for nack in behind):
            self._returns_behind += ranges
        else:
            self.return_unprocessed(ranges)
        self._queue.settle(place, now=now)

    def nack_at_broker(self, nack: PendingNack) -> None:
        """Send a nack of a message that the local store does not take."""
        self._nacks.append(nack)

    def nack_expired(self, expired: Sequence[ExpiredMessage], timeout_s: float) -> None:
        """Nack messages that exceeded the consume timeout.

        Later acks and nacks of their handlers have no effect.
        """
        for place, key in expired:
            if self._queue.redeliver(place):
                self.timed_out.append(place)
            elif self._queue.change(place, OUTSTANDING, NACKED):
                log.warning("message.timed_out", place=place_name(place), after_s=timeout_s)
                self.timed_out.append(place)
                self.nack(PendingNack(place, key, None, timeout_failure(timeout_s)))

    def return_unprocessed(self, ranges: Sequence[AckedRange]) -> None:
        """Return messages to the group as if they had not been delivered."""
        self._returns += ranges
        self._stats.returned += sum(end - start for _topic, _partition, start, end in ranges)

    def forget(self, partitions: Collection[PartitionName]) -> None:
        """Send no more of what was said of these partitions: it is about leases that
        are over, and would be taken for an answer to newer ones.
        """
        self.acks.forget(partitions)
        self._nacks = deque(nack for nack in self._nacks if nack.place[:2] not in partitions)
        self._behind = [nack for nack in self._behind if nack.place[:2] not in partitions]
        self._returns_behind = [one for one in self._returns_behind if one[:2] not in partitions]
        self._returns = [one for one in self._returns if one[:2] not in partitions]

    def disconnected(self, now: float) -> None:
        """Send again what is not confirmed, on the next connection. Failed messages go
        to the local store, if there is one.
        """
        self._repeating = not self.idle
        self.acks.resend(now)
        self.flush_now = True
        self._nacks.extendleft(reversed(self._nacks_in_flight.values()))
        self._nacks_in_flight.clear()
        if self.take is not None:
            self._nacks = deque(nack for nack in list(self._nacks) if not self.take(nack))
        self._returns.clear()  # the rejoin returns what it does not claim
        self._returns_behind.clear()
        self._returns_in_flight = 0

    def due_at(self) -> float | None:
        """Return when a request is due; None if there is nothing to send."""
        nacks_wait = self.acks_go_first and not self.acks.can_send
        if self._returns or (self._has_nacks_to_send and not nacks_wait):
            return 0.0
        if self.acks.since is None or not self.acks.can_send:
            return None
        return 0.0 if self.flush_now else self.acks.since + LINGER_S

    @property
    def _has_nacks_to_send(self) -> bool:
        return bool(self._nacks) and len(self._nacks_in_flight) < NACKS_IN_FLIGHT

    @property
    def acks_go_first(self) -> bool:
        """True while acks wait that nacks and reports of an ordered group must not
        overtake: if the process died between them, an earlier message would be
        delivered again behind the failed one.
        """
        return self._ordered and self.acks.since is not None

    def requests(self, membership: Membership, now: float, *, at_once: bool) -> list[Request]:
        """Return the requests to send now; `at_once`: acks do not linger."""
        requests: list[Request] = []
        self.release_nacks()
        self._repeating &= not self.idle
        due_at = self.due_at()
        if due_at is None:
            return requests
        waiting = self.acks.since is not None and self.acks.can_send
        if waiting and (at_once or due_at <= now):  # at once where nacks wait behind them
            self.flush_now = False
            acks = self.acks.begin_request()
            requests.append(ack_request(membership, *acks, self._acked, self._ack_refused))
        while self._has_nacks_to_send and not self.acks_go_first:
            number, nack = next(self._nack_numbers), self._last_delivered(self._nacks.popleft())
            self._nacks_in_flight[number] = nack
            nacked, refused = partial(self._nacked, number), partial(self._nack_refused, number)
            requests.append(
                member_call("consumer.nack", membership, _nack_args(nack), nacked, refused)
            )
        if self._returns:
            returned = join(self._returns)
            self._returns = returned[RANGES_PER_REQUEST:]
            self._returns_in_flight += 1
            args = {"ranges": returned[:RANGES_PER_REQUEST]}
            requests.append(
                member_call(
                    "consumer.return", membership, args, self._returned, self._return_refused
                )
            )
        return requests

    def _last_delivered(self, nack: PendingNack) -> PendingNack:
        """Return a nack that names the last delivery which its message stands for."""
        held = self._queue.delivery(nack.place, NACKED)
        last = 0 if held is None else held.generation_of(nack.place.start)
        return nack._replace(generation=last) if last > nack.generation else nack

    def _acked(self, payload: bytes, now: float) -> None:
        del now
        refused = unpack_refused(payload)
        self.acks.confirm(refused)
        if refused:
            self._stats.refused += sum(one.end - one.start for one in refused)
            log.warning("ack.refused", place=place_name(refused[0]))

    def _ack_refused(self, error: RequestRejected, now: float) -> None:
        self.acks.resend(now)
        self._refused(error, now)

    def _nacked(self, number: int, payload: bytes, now: float) -> None:
        reply = parse_as(NackReply, payload)
        nack = self._nacks_in_flight.pop(number)
        self._stats.nacked += not nack.postpone
        self._stats.postponed += nack.postpone
        self._stats.dead_lettered += reply.moved == "letter"
        if not nack.postpone:  # which is no failure: the end of a run postpones, too
            log.info(
                "message.nacked",
                place=place_name(nack.place),
                moved=reply.moved,
                attempt=reply.attempt,
                error=nack.failure.type,
            )
        self._settle_nacked(nack, reply.fence_lease, now)
        if reply.guarded:
            self.return_unprocessed(self._queue.drop_ready())

    def _nack_refused(self, number: int, error: RequestRejected, now: float) -> None:
        nack = self._nacks_in_flight.pop(number)
        if isinstance(error, UnknownMember) or error.retriable:
            self._nacks.append(nack)
            self._refused(error, now)
            return
        log.warning("message.nack_refused", place=place_name(nack.place), error=error.message)
        lease, after = ANY_LEASE, inf
        if isinstance(error, NotLeased):  # the lease had run out: it is delivered again
            lease = int(str(error.detail.get("fence_lease", ANY_LEASE)))
            after = nack.generation  # the broker has judged no lease of later ones
        else:
            self._refused(error, now)
        duplicate = self._queue.delivery(nack.place, DUPLICATE, lease, after)
        if duplicate is None:
            self._settle_nacked(nack, lease, now)
            return
        # The refusal is about the old delivery. The message has failed all the same,
        # and has been leased anew since: that lease takes the nack. But if earlier
        # messages of the key were leased anew as well, it is processed behind those.
        self._return_key(nack, lease)
        if not self._queue.redeliver(nack.place, old=NACKED):
            self._nacks.appendleft(nack._replace(generation=duplicate.generation))

    def _settle_nacked(self, nack: PendingNack, fence_lease: int, now: float) -> None:
        self._return_key(nack, fence_lease)
        self._queue.settle(nack.place, now=now, old=NACKED)

    def _return_key(self, nack: PendingNack, fence_lease: int) -> None:
        """Return later messages of the key under leases below `fence_lease`: they must
        not be processed now.
        """
        if self._ordered and nack.key and fence_lease:
            self.return_unprocessed(self._queue.drop_key(nack.place.topic, nack.key, fence_lease))

    def _returned(self, payload: bytes, now: float) -> None:
        del payload, now
        self._returns_in_flight -= 1

    def _return_refused(self, error: RequestRejected, now: float) -> None:
        """Leave the messages to their leases: the group gets them when these end."""
        self._returns_in_flight -= 1
        self._refused(error, now)


def place_name(place: AckedRange) -> str:
    """Return the first message of a range, as topic/partition/offset."""
    return f"{place.topic}/{place.partition}/{place.start}"


def _nack_args(nack: PendingNack) -> dict[str, object]:
    topic, partition, offset, _end = nack.place
    return {
        "topic": topic,
        "partition": partition,
        "offset": offset,
        "generation": nack.generation,
        "delay_ms": nack.delay_ms,
        "error": nack.failure._asdict(),
        "dead": nack.dead,
        "postpone": nack.postpone,
    }
