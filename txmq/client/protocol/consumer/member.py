"""A member of a consumer group, without I/O: requests out, answers in, time as an
argument.

    AWAY ──connected──► JOINING ──► SERVING ──close──► GONE
      ▲                                │
      └──────── lost, refused ─────────┘        what waited here is forgotten, what is in hand is claimed by the rejoin

A driver holds the connection: it calls `connected`, sends what `requests` gives, hands
answers to the requests' own callbacks, calls `lost` when the connection ends, and ends
it where `wants_reconnect` says so. `wake_at` is when to ask for requests again.
Everything is called by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import Enum, auto
from itertools import chain

from txmq.client.log import get_logger
from txmq.client.protocol.consumer.acks import RANGES_AT_ONCE, join
from txmq.client.protocol.consumer.fetched import Parcel
from txmq.client.protocol.consumer.fetcher import Intake
from txmq.client.protocol.consumer.local_queue import Holdings
from txmq.client.protocol.consumer.overdue import Overdue
from txmq.client.protocol.consumer.replies import Beat, Joined
from txmq.client.protocol.consumer.requests import Request, Seat, call, member_args
from txmq.client.protocol.consumer.settings import Settings
from txmq.client.protocol.consumer.settling import Settling, Stats
from txmq.errors import (
    BrokerFailed,
    RequestRejected,
    StaleGeneration,
    TxmqError,
    UnknownGroup,
    UnknownMember,
    UnknownTopic,
)
from txmq.wire.chunks import Chunk, unpack_chunks
from txmq.wire.json import parse_as

PAUSE_S = 0.2  # where the broker asks for one
log = get_logger()


class Phase(Enum):
    """Where a member is in its life."""

    AWAY = auto()
    JOINING = auto()
    SERVING = auto()
    GONE = auto()


class Member:
    """See the module's docstring. `instance` tells this process from others with the
    same member name.
    """

    def __init__(self, settings: Settings, instance: str, *, owner: object = None) -> None:
        self.settings = settings
        self.stats = Stats()
        self.holdings = Holdings(
            ordered=settings.ordered, tags=settings.tags, selector=settings.selector
        )
        self.intake = Intake(settings, self.holdings)
        self.settling = Settling(self.holdings, self.stats, self._refused, ordered=settings.ordered)
        self.phase = Phase.AWAY
        self.seat: Seat | None = None
        self.failure: TxmqError | None = None  # why it cannot go on
        self.wants_reconnect = False
        self._instance, self._owner = instance, owner
        self._closing = self._leaving = self._said_goodbye = False
        self._beating = self._stale = False
        self._paused_until = self._beat_at = 0.0
        self._overdue = Overdue(self.holdings)
        self._leases: dict[int, float] = {}  # since when, or extended when
        self._asked_for_topics = False
        self._queue: list[Request] = []  # to be sent before all else

    def connected(self, now: float) -> None:
        """There is a connection."""
        self.phase, self.wants_reconnect = Phase.JOINING, False
        self._beat_at = self._paused_until = now
        self._queue = [self._first_request()]

    def lost(self, now: float) -> None:
        """The connection is gone, and with it what was under way."""
        if self.phase is Phase.GONE:
            return
        self.phase = Phase.AWAY
        self._beating = self._stale = self._said_goodbye = False
        self._queue.clear()
        self.intake.lost()
        self.settling.lost(now)
        self.holdings.drop_ready()

    @property
    def closing(self) -> bool:
        """Whether it hands out nothing more."""
        return self._closing

    def close(self) -> None:
        """Hands out nothing more, and gives back what waits here."""
        self._closing = True
        self.settling.give_back(self.holdings.drop_ready())

    def pause(self, topics: Collection[str] = (), *, paused: bool) -> None:
        """Hands out nothing for a while, of these topics or at all, and gives back what
        waits here of it; or goes on.

        The broker is told at once. Raises LocalProtocolError for a topic that it does
        not read.
        """
        self.intake.pause(topics, paused=paused)
        self._give_back_paused()
        self._beat_at = 0.0

    def _give_back_paused(self) -> None:
        self.settling.give_back(self.holdings.drop_ready(self.intake.leaves_out))

    def leave(self) -> None:
        """Goes, once the broker has confirmed everything. What is still in hand is
        delivered to others.
        """
        self.close()
        self._leaving = True

    def requests(self, now: float) -> Iterator[Request]:
        """What is to be sent now."""
        queue, self._queue = self._queue, []
        yield from queue
        if self.phase is not Phase.SERVING or self.seat is None or self.wants_reconnect:
            return
        if now >= self._beat_at and not self._beating:
            yield from self._beat(self.seat, now)
        if now < self._paused_until:
            return
        self.settling.give_up(
            self._overdue.look(now, self.seat.consume_timeout_s), self.seat.consume_timeout_s
        )
        yield from self.settling.requests(self.seat, now, at_once=self._closing)
        if self._leaving:
            yield from self._goodbye(self.seat)
        elif self.may_fetch():
            yield self.intake.fetch(self.seat, self._fetched, self._refused)

    def wake_at(self) -> float | None:
        """When to ask for requests without another reason; None = there is no such
        time.
        """
        if self.phase is not Phase.SERVING or self.wants_reconnect:
            return 0.0 if self._queue else None
        due = self.settling.due_at()
        if due is None and self.may_fetch():
            due = 0.0
        look_at = self._overdue.look_at
        times = [max(look_at if due is None else min(due, look_at), self._paused_until)]
        return min(times if self._beating else [*times, self._beat_at], default=None)

    def _first_request(self) -> Request:
        """A rejoin; but a broadcast member without a name of its own may have been
        forgotten, name and all.
        """
        seat = self.seat
        if seat is None or self.settings.mode != "broadcast" or self.settings.member is not None:
            return self._join()

        def forgotten(error: RequestRejected, now: float) -> None:
            del error, now
            self.seat = None
            self._queue.append(self._join())

        return call(
            "consumer.heartbeat",
            member_args(seat),
            lambda _payload, _now: self._queue.append(self._join()),
            forgotten,
        )

    def _join(self, *, claim: bool = True) -> Request:
        """`claim`: what is in hand stays leased."""
        args = self.settings.join_args(self._instance) | {
            "member": self.settings.member,
            "held": None,
        }
        if self.seat is not None:
            args |= {"member": self.seat.member, "held": self._held() if claim else []}
        return call("consumer.join", args, self._joined, self._join_refused)

    def _held(self) -> list[tuple[str, int, int, int]] | None:
        """What is in hand; None, which claims everything, where that is too much to
        name.
        """
        held = join(chain(self.holdings.taken(), self.settling.acks.ranges()))
        return list(map(tuple, held)) if len(held) <= RANGES_AT_ONCE else None  # type: ignore[arg-type]

    def _joined(self, payload: bytes, now: float) -> None:
        reply = parse_as(Joined, payload)
        self.stats.rejoined += self.seat is not None
        self.seat = reply.seat(self._instance)
        self.phase = Phase.SERVING
        self._beat_at = now if self.intake.paused else now + self.seat.beat_s
        log.info(
            "consumer.joined",
            group=reply.group,
            member=reply.member,
            partitions=len(reply.assignment),
        )

    def _join_refused(self, error: RequestRejected, now: float) -> None:
        if isinstance(error, UnknownTopic) and not self._asked_for_topics:
            self._asked_for_topics = True  # the broker may make topics at first use
            args = {"names": list(self.settings.topics), "create": True}
            self._queue.append(
                call(
                    "topic.describe",
                    args,
                    lambda _payload, _now: self._queue.append(self._join()),
                    self._join_refused,
                )
            )
            return
        self._refused(error, now)
        self.wants_reconnect = True

    def _refused(self, error: RequestRejected, now: float) -> None:
        """A refusal that concerns the member as a whole."""
        if isinstance(error, StaleGeneration):
            self._stale, self._beat_at = True, now
        elif error.detail.get("replaced"):  # by another process with the name of this member
            self.failure = error
        elif isinstance(error, UnknownMember | UnknownGroup):
            log.warning("consumer.forgotten", group=self.settings.group, error=error.message)
            self.wants_reconnect = True
        elif error.retriable or isinstance(error, BrokerFailed):
            log.warning("consumer.paused", group=self.settings.group, error=error.message)
            self._paused_until = now + PAUSE_S
        else:
            self.failure = error

    def _beat(self, seat: Seat, now: float) -> Iterator[Request]:
        self._beating = True
        self._beat_at = now + seat.beat_s
        args = member_args(seat) | {"paused": sorted(self.intake.paused)}
        yield call("consumer.heartbeat", args, self._beaten, self._beat_refused)
        alive = self.holdings.leases()
        self._leases = {lease: since for lease, since in self._leases.items() if lease in alive}
        old = [lease for lease, since in self._leases.items() if now - since > seat.lease_s / 2]
        if old:
            self._leases |= dict.fromkeys(old, now)
            args = member_args(seat) | {"leases": old[:RANGES_AT_ONCE]}
            yield call("consumer.extend", args, lambda _payload, _now: None, self._refused)

    def _beat_refused(self, error: RequestRejected, now: float) -> None:
        self._beating = False
        self._refused(error, now)

    def _beaten(self, payload: bytes, now: float) -> None:
        self._beating = self._stale = False
        reply, seat = parse_as(Beat, payload), self.seat
        if seat is None:
            return
        before, self.seat = seat, reply.seat(seat)
        seat = self.seat
        if seat.epoch != before.epoch:  # what waits here counts by the old one
            self.settling.give_back(self.holdings.drop_ready())
        elif seat.generation != before.generation:
            log.info(
                "consumer.rebalanced",
                group=seat.group,
                generation=seat.generation,
                partitions=len(seat.assignment),
            )
            self.settling.give_back(self.holdings.drop_ready(self._not_mine))

    def _not_mine(self, parcel: Parcel) -> bool:
        """Whether another member should have it: a single retry may stay, unless it has
        to keep its order.
        """
        assert self.seat is not None, "only members have heartbeats"
        return parcel.spot not in self.seat.assignment and (
            self.settings.ordered or not parcel.moved
        )

    def may_fetch(self) -> bool:
        """Whether there is room for more, and nothing against it."""
        return not (self._closing or self._stale) and self.intake.wanted()

    def _fetched(self, payload: bytes, now: float) -> None:
        for chunk in unpack_chunks(payload).chunks:
            self._take_in(chunk, now)
        if self._closing:
            self.settling.give_back(self.holdings.drop_ready())
        elif self.intake.paused:
            self._give_back_paused()

    def _take_in(self, chunk: Chunk, now: float) -> None:
        assert self.seat is not None, "only members fetch"
        self._leases.setdefault(chunk.lease_id, now)
        parcel = Parcel(chunk, owner=self._owner, epoch=self.seat.epoch, now=now)
        for unwanted in self.holdings.add(parcel):
            self.settling.acks.add(*unwanted, now)
            self.stats.filtered += unwanted.end - unwanted.start

    def _goodbye(self, seat: Seat) -> Iterator[Request]:
        """Once all is confirmed, the end. Before it, if a fetch is under way, a rejoin
        gives back what that brings.

        A static member does not leave: a rejoin gives back all that is leased to it,
        and it is only away.
        """
        if not self.settling.idle or self._said_goodbye:
            return
        self._said_goodbye = True
        if self.intake.under_way:
            yield self._join()._replace(
                reply=self._parted, refused=lambda _error, now: self._parted(b"", now)
            )
            return
        if self.settings.static:
            yield self._join(claim=False)._replace(reply=self._left, refused=self._left)
            return
        args = {"group": seat.group, "member": seat.member, "instance": self._instance}
        yield call("consumer.leave", args, self._left, self._left)

    def _parted(self, payload: bytes, now: float) -> None:
        del payload, now
        self.intake.lost()
        self._said_goodbye = False

    def _left(self, answer: object, now: float) -> None:
        del answer, now
        self.phase = Phase.GONE
        log.info("consumer.left", group=self.settings.group)
