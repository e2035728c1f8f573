"""A member of a consumer group, without I/O: requests out, answers in, time as an
argument.

    AWAY ──connected──► JOINING ──► SERVING ──leave──► GONE
      ▲                                │
      └──── disconnected, refused ─────┘

On a lost connection, the READY messages of the local queue are dropped. The rejoin
claims the outstanding ones.

A driver holds the connection. It calls `connected`, sends `requests`, passes answers to
the requests' own callbacks, and calls `disconnected` when the connection ends. It ends
the connection where `needs_reconnect` says so, and asks for requests again at
`wake_at`. All calls come from one thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from enum import Enum, auto
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from txmq.client.log import get_logger
from txmq.client.protocol.consumer.acks import RANGES_PER_REQUEST, join
from txmq.client.protocol.consumer.consume_timeout import ConsumeTimeouts
from txmq.client.protocol.consumer.fetched import FetchedBatch
from txmq.client.protocol.consumer.fetcher import Fetcher
from txmq.client.protocol.consumer.local_queue import LocalQueue
from txmq.client.protocol.consumer.membership import Membership
from txmq.client.protocol.consumer.requests import (
    HeartbeatReply,
    JoinReply,
    Request,
    call_request,
    member_call,
)
from txmq.client.protocol.consumer.settings import ConsumerSettings
from txmq.client.protocol.consumer.settlement import Settlement
from txmq.client.protocol.consumer.stats import ConsumerStats
from txmq.client.protocol.sender.topics import warn_of_created
from txmq.errors import (
    BrokerFailed,
    RequestRejected,
    StaleGeneration,
    TxmqError,
    UnknownGroup,
    UnknownMember,
    UnknownTopic,
)
from txmq.model.topic_partition import PartitionName
from txmq.wire.chunks import Chunk, unpack_chunks
from txmq.wire.json import parse_as, parse_result

if TYPE_CHECKING:
    from txmq.client.protocol.consumer.local_recovery import LocalRecovery

BACK_OFF_S = 0.2  # after a refusal that may pass
log = get_logger()


def steady_wall_us() -> int:
    """Return the time of day, in µs, as the process knew it when it began."""
    return _WALL_AT_ZERO_US + time.monotonic_ns() // 1_000


_WALL_AT_ZERO_US = (time.time_ns() - time.monotonic_ns()) // 1_000


class MemberPhase(Enum):
    """The phase of a member's life."""

    AWAY = auto()
    JOINING = auto()
    SERVING = auto()
    GONE = auto()


class Member:
    """The state machine of a member.

    `instance` tells this process from others with the same member name. `owner` is
    stored in each fetched batch. `failure` is the error that ended the member.
    """

    def __init__(
        self,
        settings: ConsumerSettings,
        instance: str,
        *,
        owner: object = None,
        wall_us: Callable[[], int] = steady_wall_us,
    ) -> None:
        """`wall_us`: the time of day for the local store, in µs, never going back."""
        self.settings = settings
        self.stats = ConsumerStats()
        self.queue = LocalQueue(
            ordered=settings.ordered,
            tags=settings.tags,
            selector=settings.selector,
            keeps_bodies=settings.local_store is not None,
        )
        self.fetcher = Fetcher(settings, self.queue)
        self.settlement = Settlement(self.queue, self.stats, self.refused, ordered=settings.ordered)
        self.phase = MemberPhase.AWAY
        self.membership: Membership | None = None
        self.failure: TxmqError | None = None
        self.needs_reconnect = False
        self.closing = False  # nothing more is delivered
        self._rejoining = False  # it has ended its connection by itself
        self._instance, self.owner, self.wall_us = instance, owner, wall_us
        self._leaving = self._leave_sent = False
        self._heartbeat_in_flight = self._stale = False
        self._backed_off_until = self._next_heartbeat = 0.0
        self._timeouts = ConsumeTimeouts(self.queue)
        self._leases: dict[int, float] = {}  # when each was granted or last extended
        self._topics_described = False
        self._first: list[Request] = []  # to be sent before all others
        self.recovery = self._local_recovery()

    def _local_recovery(self) -> LocalRecovery | None:
        if self.settings.local_store is None:
            return None
        # The store's modules are for those who have one.
        from txmq.client.protocol.consumer.local_recovery import LocalRecovery  # noqa: PLC0415

        recovery = LocalRecovery(self)
        self.settlement.take = recovery.takes
        return recovery

    @property
    def group(self) -> str:
        """The name of the group: for a broadcast member its own, `group@member`."""
        return self.settings.group if self.membership is None else self.membership.group

    @property
    def name(self) -> str:
        """The name of the member, given or made by the broker."""
        return self.settings.member or "" if self.membership is None else self.membership.member

    @property
    def epoch(self) -> int:
        """The number of resets of the group that reprocess messages."""
        return 0 if self.membership is None else self.membership.epoch

    @property
    def assignment(self) -> frozenset[PartitionName]:
        """The partitions assigned to this member, as the broker last reported them."""
        return frozenset() if self.membership is None else self.membership.assignment

    def connected(self, now: float) -> None:
        """Begin on a new connection."""
        self.phase, self.needs_reconnect = MemberPhase.JOINING, False
        self._next_heartbeat = self._backed_off_until = now
        self._first = [self._first_request()]

    def disconnected(self, now: float) -> None:
        """End with the connection. Answers to what is in flight will not come."""
        if self.phase is MemberPhase.GONE:
            return
        self._rejoining &= self.phase is not MemberPhase.AWAY  # else that attempt has failed
        self.phase = MemberPhase.AWAY
        self._heartbeat_in_flight = self._stale = self._leave_sent = False
        self._first.clear()
        self.fetcher.forget()
        if self.recovery is not None:
            self.recovery.disconnected()
        self.settlement.disconnected(now)
        if self.recovery is not None:
            self.recovery.take_followers()
        self.queue.drop_ready()
        self.queue.drop_duplicates()

    def close(self) -> None:
        """Deliver nothing more, and return the READY messages of the local queue."""
        self.closing = True
        if self.recovery is not None:
            self.recovery.close()
        self.settlement.return_unprocessed(self.queue.drop_ready())

    def pause(self, topics: Collection[str] = (), *, paused: bool) -> None:
        """Pause these topics, or all, and return their READY messages. Or resume them.

        The broker is notified at once. Raises LocalProtocolError for a topic that the
        consumer does not read.
        """
        self.fetcher.pause(topics, paused=paused)
        self._return_paused()
        if self.settings.ordered and not paused and self.settlement.returning:
            self.rejoin()  # what is on its way may be behind returned messages of its key
        self._next_heartbeat = 0.0

    def _return_paused(self) -> None:
        self.settlement.return_unprocessed(self.queue.drop_ready(self.fetcher.is_paused))

    def fail(self, error: TxmqError) -> None:
        """End with an error, unless another one came before."""
        self.failure = self.failure or error

    def rejoin(self) -> None:
        """Join anew, on another connection. The broker delivers what this member does
        not claim, in order, and nothing that was on its way or waits here counts any
        more.
        """
        if not self.closing:  # at the end nothing more is delivered
            if self.is_connected and not self._rejoining:
                log.info("consumer.rejoining", group=self.settings.group)
            self.needs_reconnect = self._rejoining = True
            self.queue.drop_ready()

    def leave(self) -> None:
        """Leave the group once the broker has confirmed everything.

        Messages that are still outstanding are delivered to other members.
        """
        self.close()
        self._leaving = True

    @property
    def is_connected(self) -> bool:
        """True while it has a connection."""
        return self.phase in (MemberPhase.JOINING, MemberPhase.SERVING)

    @property
    def away(self) -> bool:
        """True while the broker is, as far as is known."""
        return self.phase is MemberPhase.AWAY and not self._rejoining

    @property
    def idle(self) -> bool:
        """True if the broker has confirmed everything."""
        return self.settlement.idle and (self.recovery is None or self.recovery.idle)

    @property
    def idle_without_broker(self) -> bool:
        """True if there is nothing that only the broker can take."""
        return self.settlement.idle and (self.recovery is None or self.recovery.written)

    def requests(self, now: float) -> list[Request]:
        """Return the requests to send now."""
        requests, self._first = self._first, []
        membership = self.membership
        if self.phase is not MemberPhase.SERVING or membership is None or self.needs_reconnect:
            return requests
        if now >= self._next_heartbeat and not self._heartbeat_in_flight:
            requests += self._heartbeat(membership, now)
        if now < self._backed_off_until:
            return requests
        if now >= self._timeouts.next_check:
            timeout_s = membership.consume_timeout_s
            self.settlement.nack_expired(self._timeouts.check(now, timeout_s), timeout_s)
        report_due = self._report_due_at()
        at_once = self.closing or (report_due is not None and report_due <= now)
        requests += self.settlement.requests(membership, now, at_once=at_once)
        if self.recovery is not None and not self.settlement.acks_go_first:
            requests += self.recovery.requests(membership, now)
        if self._leaving:
            requests += self._leave(membership)
        elif self.may_fetch():
            fetched = partial(self._fetched, membership)
            requests.append(self.fetcher.fetch(membership, fetched, self.refused))
        return requests

    def wake_at(self) -> float | None:
        """Return when the driver is to ask for requests, if nothing else happens
        before; None: at no time.
        """
        if self.needs_reconnect:
            return 0.0  # to end the connection
        if self.phase is not MemberPhase.SERVING:
            return 0.0 if self._first else None
        due = self.settlement.due_at()
        if due is None and self.may_fetch():
            due = 0.0
        dues = (due, self._report_due_at())
        due = min((one for one in dues if one is not None), default=None)
        check = self._timeouts.next_check
        times = [max(check if due is None else min(due, check), self._backed_off_until)]
        return min(
            times if self._heartbeat_in_flight else [*times, self._next_heartbeat], default=None
        )

    def _report_due_at(self) -> float | None:
        """Return when a report of a local store is due; None if there is none to send,
        or if it must wait for the answer to acks.
        """
        waits = self.settlement.acks_go_first and not self.settlement.acks.can_send
        return None if self.recovery is None or waits else self.recovery.due_at()

    def _first_request(self) -> Request:
        """Return a join. A broadcast member without a name of its own first asks
        whether the broker still has its group, and the name that the broker gave it.
        """
        membership = self.membership
        if (
            membership is None
            or self.settings.mode != "broadcast"
            or self.settings.member is not None
        ):
            return self._join()

        def forgotten(error: RequestRejected, now: float) -> None:
            del error, now
            self.membership = None
            self._first.append(self._join())

        return member_call(
            "consumer.heartbeat",
            membership,
            {},
            lambda _payload, _now: self._first.append(self._join()),
            forgotten,
        )

    def _join(self, *, claim: bool = True) -> Request:
        """Return a join. `claim`: outstanding messages stay leased to the member."""
        args = self.settings.join_args(self._instance) | {
            "member": self.settings.member,
            "held": None,
        }
        if self.membership is not None:
            args |= {"member": self.membership.member, "held": self._claims() if claim else []}
        return call_request("consumer.join", args, self._joined, self._join_refused)

    def _claims(self) -> list[tuple[str, int, int, int]] | None:
        """Return the unsettled ranges; None, where they are too many, claims all."""
        claims = join(chain(self.queue.unsettled(), self.settlement.acks.unconfirmed()))
        return list(map(tuple, claims)) if len(claims) <= RANGES_PER_REQUEST else None  # type: ignore[arg-type]

    def _joined(self, payload: bytes, now: float) -> None:
        reply = parse_as(JoinReply, payload)
        self.stats.rejoined += self.membership is not None
        joined = reply.membership(self._instance)
        self._move_to(joined, now)
        self.phase, self._rejoining = MemberPhase.SERVING, False
        if self.recovery is not None:
            self.recovery.joined(joined)
        self._next_heartbeat = now if self.fetcher.paused else now + joined.heartbeat_s
        log.info(
            "consumer.joined",
            group=reply.group,
            member=reply.member,
            partitions=len(reply.assignment),
        )

    def _join_refused(self, error: RequestRejected, now: float) -> None:
        missing = isinstance(error, UnknownTopic) and self.membership is None
        if missing and not self._topics_described:
            self._topics_described = True  # the broker may create topics at first use
            args = {"names": list(self.settings.topics), "create": True}
            self._first.append(
                call_request("topic.describe", args, self._join_described, self._join_refused)
            )
            return
        if isinstance(error, UnknownTopic) and self.membership is not None:
            # Deleted while the member was away: it joins once the topic is made again.
            log.warning("consumer.topic_missing", group=self.settings.group, error=error.message)
        else:
            self.refused(error, now)
        self.needs_reconnect = True

    def _join_described(self, payload: bytes, _now: float) -> None:
        warn_of_created(parse_result(payload))
        self._first.append(self._join())

    def refused(self, error: RequestRejected, now: float) -> None:
        """React to a refusal that concerns the member as a whole."""
        if isinstance(error, StaleGeneration):
            self._stale, self._next_heartbeat = True, now
        elif error.detail.get("replaced"):  # by another process with the name of this member
            self.failure = error
        elif isinstance(error, UnknownMember | UnknownGroup):
            log.warning("consumer.forgotten", group=self.settings.group, error=error.message)
            self.needs_reconnect = True
        elif error.retriable or isinstance(error, BrokerFailed):
            log.warning("consumer.paused", group=self.settings.group, error=error.message)
            self._backed_off_until = now + BACK_OFF_S
        else:
            self.failure = error

    def _heartbeat(self, membership: Membership, now: float) -> list[Request]:
        self._heartbeat_in_flight = True
        self._next_heartbeat = now + membership.heartbeat_s
        paused = {"paused": sorted(self.fetcher.paused)}
        answered, refused = self._heartbeat_answered, self._heartbeat_refused
        requests = [member_call("consumer.heartbeat", membership, paused, answered, refused)]
        live = self.queue.leases()
        self._leases = {lease: since for lease, since in self._leases.items() if lease in live}
        old = [
            lease for lease, since in self._leases.items() if now - since > membership.lease_s / 2
        ]
        if old:
            self._leases |= dict.fromkeys(old, now)
            leases = {"leases": old[:RANGES_PER_REQUEST]}
            requests.append(
                member_call(
                    "consumer.extend",
                    membership,
                    leases,
                    lambda _payload, _now: None,
                    self.refused,
                )
            )
        return requests

    def _heartbeat_refused(self, error: RequestRejected, now: float) -> None:
        self._heartbeat_in_flight = False
        self.refused(error, now)

    def _heartbeat_answered(self, payload: bytes, now: float) -> None:
        self._heartbeat_in_flight = self._stale = False
        before = self.membership
        if before is None:
            return
        after = parse_as(HeartbeatReply, payload).updated(before)
        self._move_to(after, now)
        if self.recovery is not None:
            self.recovery.updated(after)
        if after.generation != before.generation:
            log.info(
                "consumer.rebalanced",
                group=after.group,
                generation=after.generation,
                partitions=len(after.assignment),
            )
            self.settlement.return_unprocessed(self.queue.drop_ready(self._is_of_another_member))

    def _move_to(self, membership: Membership, now: float) -> None:
        """Go on with a membership. Partitions that were reset since, or whose topic was
        made again, are forgotten: the broker has ended their leases.
        """
        before, self.membership = self.membership, membership
        if before is None or before.identities == membership.identities:
            return
        old, new = before.identities, membership.identities
        over = {batch.partition_name for batch in self.queue.batches() if not self._is_known(batch)}
        over |= {name for name in new.resets if old.resets.get(name) != new.resets[name]}
        self.queue.forget(lambda batch: not self._is_known(batch), now=now)
        self.settlement.forget(over)

    def _is_known(self, batch: FetchedBatch) -> bool:
        assert self.membership is not None, "only members fetch"
        return self.membership.knows(batch.partition_name, batch.topic_id, batch.generation)

    def _is_of_another_member(self, batch: FetchedBatch) -> bool:
        """Return whether a batch is of a partition assigned to another member.

        A retry may stay here, unless the group keeps an order.
        """
        return batch.partition_name not in self.assignment and (
            self.settings.ordered or not batch.moved
        )

    def may_fetch(self) -> bool:
        """Return whether a fetch is due and allowed."""
        return (
            self.fetcher.is_due()  # the first, because each received message asks: mostly not
            and not (self.closing or self._stale or self.settlement.resending)
            and (self.recovery is None or not self.recovery.holds_back)
        )

    def _fetched(self, membership: Membership, payload: bytes, now: float) -> None:
        """Add what a fetch brings. The broker delivered it in the generation of that
        `membership`, which may be over by now.
        """
        if self.needs_reconnect:
            return  # the next join returns what it does not claim
        for chunk in unpack_chunks(payload).chunks:
            self._add(chunk, membership, now)
        if self.closing:
            self.settlement.return_unprocessed(self.queue.drop_ready())
        elif self.fetcher.paused:
            self._return_paused()

    def _add(self, chunk: Chunk, membership: Membership, now: float) -> None:
        identities = membership.identities
        name, first = (chunk.topic, chunk.partition), chunk.base_offset + chunk.first_row
        epoch = identities.epoch_of(name, first)
        whole = epoch == identities.epoch_of(name, first + chunk.rows - 1)
        batch = FetchedBatch(
            chunk,
            owner=self.owner,
            epoch=epoch if whole else None,
            epoch_at=partial(identities.epoch_of, name),
            now=now,
            topic_id=identities.topics[chunk.topic],
            generation=membership.generation,
        )
        if not self._is_known(batch):
            return
        self._leases.setdefault(chunk.lease_id, now)
        for unwanted in self.queue.add(batch):
            self.settlement.acks.add(*unwanted, now, filtered=True)
            self.stats.filtered += unwanted.end - unwanted.start

    def _leave(self, membership: Membership) -> list[Request]:
        """Return the requests that end the membership, once all is confirmed.

        With a fetch in flight, a rejoin comes first: it returns what that fetch brings.
        A static member does not leave: a rejoin without claims returns its messages,
        and the member is only away.
        """
        if not self.idle or self._leave_sent:
            return []
        self._leave_sent = True
        if self.fetcher.in_flight:
            rejoin = self._join()._replace(
                reply=self._fetch_ended, refused=lambda _error, now: self._fetch_ended(b"", now)
            )
            return [rejoin]
        if self.settings.static:
            return [self._join(claim=False)._replace(reply=self._left, refused=self._left)]
        args = {
            "group": membership.group,
            "member": membership.member,
            "instance": self._instance,
        }
        return [call_request("consumer.leave", args, self._left, self._left)]

    def _fetch_ended(self, payload: bytes, now: float) -> None:
        del payload, now
        self.fetcher.forget()
        self._leave_sent = False

    def leave_behind(self) -> None:
        """Report what the broker has not heard of though the time to leave is up."""
        nacks = self.settlement.unconfirmed_nacks
        if nacks and self.phase is not MemberPhase.GONE:
            log.warning(
                "consumer.left_behind",
                group=self.settings.group,
                nacks=nacks,
                hint="their messages are delivered again as if they had not failed",
            )

    def _left(self, answer: object, now: float) -> None:
        del answer, now
        self.phase = MemberPhase.GONE
        log.info("consumer.left", group=self.settings.group)
