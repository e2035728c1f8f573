"""How messages leave a member: acked, nacked, or given back un-started.

Nothing is settled until the broker has confirmed it: after a lost connection everything
unconfirmed goes out again, before anything is fetched, and the broker tells what it has
already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import NamedTuple

from txmq.client.log import get_logger
from txmq.client.protocol.consumer.acks import RANGES_AT_ONCE, AckBook, join
from txmq.client.protocol.consumer.failure import Failure
from txmq.client.protocol.consumer.fetched import NACKED, STARTED
from txmq.client.protocol.consumer.local_queue import Holdings
from txmq.client.protocol.consumer.overdue import Late, cause
from txmq.client.protocol.consumer.replies import Nacked
from txmq.client.protocol.consumer.requests import Request, Seat, ack, call, member_args
from txmq.errors import NotLeased, RequestRejected, UnknownMember
from txmq.wire.headers import Acked, unpack_refused
from txmq.wire.json import parse_as

NACKS_AT_ONCE = 64
ANY_LEASE = 1 << 63
LINGER_S = 0.01  # how long an ack waits for company
GIVEN_UP = 1_000  # messages that are remembered, so that the log tells of a late ack
log = get_logger()


class Nack(NamedTuple):
    """A message at `place` that failed. `delay_ms` None = by the group's policy; `dead`
    = to the dead letters at once; `postpone` = it did not fail, and this delivery does
    not count.
    """

    place: Acked
    key: str | None
    delay_ms: int | None
    failure: Failure
    dead: bool = False
    postpone: bool = False


@dataclass(slots=True)
class Stats:
    """Counts since the consumer was made; `duplicates` were dropped by the inbox,
    `retried` run again in place.

    `refused` were acked too late: their leases had run out, and they come again, to
    whomever.
    """

    delivered: int = 0
    acked: int = 0
    nacked: int = 0
    dead_lettered: int = 0
    postponed: int = 0
    filtered: int = 0
    returned: int = 0
    duplicates: int = 0
    retried: int = 0
    rejoined: int = 0
    refused: int = 0


class Settling:
    """What has left the user's hands. `refused` is told of refusals that concern the
    member as a whole.
    """

    def __init__(
        self,
        holdings: Holdings,
        stats: Stats,
        refused: Callable[[RequestRejected, float], None],
        *,
        ordered: bool,
    ) -> None:
        self._holdings, self._stats, self._ordered = holdings, stats, ordered
        self._refused = refused
        self._nacks: deque[Nack] = deque()
        self._nacking: dict[int, Nack] = {}
        self._nack_numbers = count()
        self._returns: list[Acked] = []
        self._returning = 0
        self.acks = AckBook()
        self.hurry = False  # somebody waits for an ack
        self.given_up: deque[Acked] = deque(
            maxlen=GIVEN_UP
        )  # because handlers have held them for too long

    @property
    def idle(self) -> bool:
        """Whether the broker has confirmed everything."""
        return self.acks.empty and not (
            self._nacks or self._nacking or self._returns or self._returning
        )

    def nack(self, nack: Nack) -> None:
        """Takes a nack in. The message stays in hand, and keeps its key back, until the
        broker has it.
        """
        self._nacks.append(nack)

    def give_up(self, found: Sequence[Late], timeout_s: float) -> None:
        """Nacks messages that handlers have held for too long; what these say of them
        later is of no effect.
        """
        for place, key in found:
            if self._holdings.change(place, STARTED, NACKED):
                log.warning("message.timed_out", place=name_of(place), after_s=timeout_s)
                self.given_up.append(place)
                self.nack(Nack(place, key, None, cause(timeout_s)))

    def give_back(self, ranges: Sequence[Acked]) -> None:
        """Hands messages back un-started."""
        self._returns += ranges
        self._stats.returned += sum(end - start for _topic, _partition, start, end in ranges)

    def lost(self, now: float) -> None:
        """The connection is gone: what is not confirmed goes out again."""
        self.acks.put_back(now)
        self._nacks.extendleft(reversed(self._nacking.values()))
        self._nacking.clear()
        self._returns.clear()  # whatever the rejoin does not claim is given back by it
        self._returning = 0

    def due_at(self) -> float | None:
        """When there is something to send."""
        if self._returns or (self._nacks and len(self._nacking) < NACKS_AT_ONCE):
            return 0.0
        if not self.acks.due or self.acks.since is None:
            return None
        return 0.0 if self.hurry else self.acks.since + LINGER_S

    def requests(self, seat: Seat, now: float, *, at_once: bool) -> Iterator[Request]:
        """What is to be sent now; `at_once`: without waiting for company."""
        due_at = self.due_at()
        if due_at is None:
            return
        if self.acks.due and (at_once or due_at <= now):
            self.hurry = False
            yield ack(seat, self.acks.take(), self._acked, self._ack_refused)
        while self._nacks and len(self._nacking) < NACKS_AT_ONCE:
            number, nack = next(self._nack_numbers), self._nacks.popleft()
            self._nacking[number] = nack
            nacked, refused = partial(self._nacked, number), partial(self._nack_refused, number)
            yield call("consumer.nack", _nack_args(seat, nack), nacked, refused)
        if self._returns:
            ranges = join(self._returns)
            self._returns = ranges[RANGES_AT_ONCE:]
            self._returning += 1
            args = member_args(seat) | {"ranges": ranges[:RANGES_AT_ONCE]}
            yield call("consumer.return", args, self._returned, self._return_refused)

    def _acked(self, payload: bytes, now: float) -> None:
        del now
        refused = unpack_refused(payload)
        self.acks.confirm(refused)
        if refused:
            self._stats.refused += sum(one.end - one.start for one in refused)
            log.warning(
                "ack.refused", place=f"{refused[0].topic}/{refused[0].partition}/{refused[0].start}"
            )

    def _ack_refused(self, error: RequestRejected, now: float) -> None:
        self.acks.put_back(now)
        self._refused(error, now)

    def _nacked(self, number: int, payload: bytes, now: float) -> None:
        reply = parse_as(Nacked, payload)
        nack = self._nacking.pop(number)
        self._stats.nacked += not nack.postpone
        self._stats.postponed += nack.postpone
        self._stats.dead_lettered += reply.moved == "letter"
        place = name_of(nack.place)
        log.info(
            "message.nacked",
            place=place,
            moved=reply.moved,
            attempt=reply.attempt,
            error=nack.failure.type,
        )
        self._gone(nack, reply.fence_lease, now)
        if reply.guarded:
            self.give_back(self._holdings.drop_ready())

    def _nack_refused(self, number: int, error: RequestRejected, now: float) -> None:
        nack = self._nacking.pop(number)
        if isinstance(error, UnknownMember) or error.retriable:
            self._nacks.append(nack)
            self._refused(error, now)
            return
        log.warning("message.nack_refused", place=name_of(nack.place), error=error.message)
        lease = ANY_LEASE
        if isinstance(error, NotLeased):  # its lease had lapsed: it comes again, to whomever
            lease = int(str(error.detail.get("fence_lease", ANY_LEASE)))
        else:
            self._refused(error, now)
        self._gone(nack, lease, now)

    def _gone(self, nack: Nack, fence_lease: int, now: float) -> None:
        """The message has left; later ones of its key with a lease below `fence_lease`
        must not be processed now.
        """
        if self._ordered and nack.key and fence_lease:
            self.give_back(self._holdings.drop_key(nack.place.topic, nack.key, fence_lease))
        self._holdings.settle(nack.place, now=now, old=NACKED)

    def _returned(self, payload: bytes, now: float) -> None:
        del payload, now
        self._returning -= 1

    def _return_refused(self, error: RequestRejected, now: float) -> None:
        """They come back to the group by themselves, when their leases end."""
        self._returning -= 1
        self._refused(error, now)


def name_of(place: Acked) -> str:
    """The first message of a range, for people."""
    return f"{place.topic}/{place.partition}/{place.start}"


def _nack_args(seat: Seat, nack: Nack) -> dict[str, object]:
    topic, partition, offset, _end = nack.place
    place = {"topic": topic, "partition": partition, "offset": offset}
    how = {
        "delay_ms": nack.delay_ms,
        "error": nack.failure._asdict(),
        "dead": nack.dead,
        "postpone": nack.postpone,
    }
    return member_args(seat) | place | how
