"""What a blocking consumer is, apart from its messages: a member of a group, with a
thread that keeps it one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Self, TypeVar
from uuid import UUID, uuid4

from txmq.client.blocking.consumer.receiving import Changed, Taking
from txmq.client.blocking.consumer.thread import ConsumerThread
from txmq.client.blocking.core import Core
from txmq.client.protocol.consumer.fetched import DeliveredMessage
from txmq.client.protocol.consumer.member import Member, Phase
from txmq.client.protocol.consumer.membership import Seated
from txmq.client.protocol.consumer.operations import AckAction, Delivered, Hands
from txmq.client.protocol.consumer.settings import Settings
from txmq.client.protocol.consumer.settling import Stats
from txmq.errors import BrokerUnavailable, TxmqError
from txmq.model.message import ReceivedMessage

CLOSE_S = 10.0
T = TypeVar("T")


class ConsumerBase(Seated, Taking):
    """A member of a consumer group. For any number of threads, and for use with
    `with`.
    """

    def __init__(self, core: Core, settings: Settings, changed: Changed | None = None) -> None:
        """`changed` is given where it is one of several brokers' members that are
        waited for together.
        """
        self.core, self.settings = core, settings
        self._changed = changed or Changed()
        self._is_part = changed is not None
        self._member = Member(settings, uuid4().hex, owner=self)
        self._hands = Hands(self._member)
        self._acks = self._member.settling.acks
        self._thread = ConsumerThread(self._member, core.dial, self._changed)
        self._handlers = 0

    def join(self, timeout: float) -> None:
        """Becomes a member. Called once, by `consume`."""
        self.start()
        with self._changed:
            self._changed.wait_for(lambda: self.serving or self.failure, timeout)
            joined = self.serving
        if not joined:
            self.abandon()
            why = f": {self.trouble}" if self.trouble else ""
            raise self.failure or BrokerUnavailable(
                f"no broker let the consumer join within {timeout} s{why}"
            )

    def start(self) -> None:
        """Begins to become a member."""
        self._thread.start()

    def abandon(self) -> None:
        """Ends without a word to the broker."""
        self._thread.abandon()

    @property
    def serving(self) -> bool:
        """Whether it is a member as far as it knows, and connected."""
        return self._member.phase is Phase.SERVING

    @property
    def failure(self) -> TxmqError | None:
        """Why it cannot go on."""
        return self._member.failure

    @property
    def trouble(self) -> TxmqError | OSError | None:
        """What keeps it from its broker for now."""
        return self._thread.trouble

    @property
    def parts(self) -> Sequence[Self]:
        """The members that it is, one at each broker."""
        return (self,)

    @property
    def log_id(self) -> UUID:
        """The broker's log that its messages are of; asks for it if need be."""
        return self.core.log_id

    @property
    def inbox_name(self) -> str:
        """Its group as the inbox knows it: where there are several brokers, offsets are
        told apart by their log.
        """
        return f"{self.group}#{self.core.log_id}" if self._is_part else self.group

    def inbox_of(self, message: ReceivedMessage) -> str:
        """The group that the inbox counts the message in."""
        return self.inbox_name

    def taken(self, take: Callable[[Hands, float], T], now: float) -> T:
        """What `take` finds. Its `changed` is held. Raises why the consumer cannot go
        on.
        """
        found = take(self._hands, now)
        if found and self._member.may_fetch():
            self._thread.poke()
        return found

    def pause(self, *topics: str) -> None:
        """Hands out nothing of these topics, or of any where none is named, until
        `resume`; from when it returns on.

        Its partitions stay its own, and what waits here of them goes back to the group,
        as if it had not been delivered: no attempt is counted, no lease runs out.
        Messages in hand may be settled. It holds for this member alone, through
        rebalances and lost connections. For all, while this one is away: `txmq group
        pause`, or `close`. Raises LocalProtocolError for a topic that the consumer does
        not read.
        """
        self._pause(topics, paused=True)

    def resume(self, *topics: str) -> None:
        """Goes on with these topics after `pause(*topics)`, with all after `pause()`.

        Each undoes its own: after `pause()` and `resume()` topics that were paused by
        name still are.
        """
        self._pause(topics, paused=False)

    @property
    def paused(self) -> frozenset[str]:
        """The topics of which it hands out nothing for now; all that it reads, after
        `pause()`.
        """
        with self._changed:
            return self._member.intake.paused

    def _pause(self, topics: Collection[str], *, paused: bool) -> None:
        with self._changed:
            self._member.pause(topics, paused=paused)
            self._changed.notify_all()
            self._thread.poke()

    def take_no_more(self) -> None:
        """Hands out nothing more, and gives back what waits here."""
        with self._changed:
            self._member.close()
            self._changed.notify_all()
            self._thread.poke()

    @property
    def assignment(self) -> frozenset[tuple[str, int]]:
        """The partitions that are this member's, (topic, number), as last heard."""
        seat = self._member.seat
        return frozenset() if seat is None else seat.assignment

    @property
    def closed(self) -> bool:
        """Whether it hands out nothing more."""
        return self._member.closing

    @property
    def stats(self) -> Stats:
        """What it has done so far."""
        with self._changed:
            return replace(self._member.stats)

    def epoch_of(self, message: ReceivedMessage) -> int:
        """The group's epoch when the message came."""
        return message.parcel.epoch if isinstance(message, DeliveredMessage) else self.epoch

    def count(self, *, duplicates: int = 0, retried: int = 0) -> None:
        """Adds to the stats what only handlers know."""
        with self._changed:
            self._member.stats.duplicates += duplicates
            self._member.stats.retried += retried

    def ack_actions(self, delivered: Delivered) -> Sequence[AckAction]:
        """Hands a message, or what is in hand of a batch, over to a transaction;
        returns what acks it there.

        Raises NotLeased where nothing of it is in hand.
        """
        with self._changed:
            return self._hands.lend(delivered)

    def transaction_over(self, delivered: Delivered, *, committed: bool | None) -> None:
        """The transaction has settled it; or it has not, and the message is in hand
        again; None = nobody knows.
        """
        with self._changed:
            self._hands.lent(delivered, time.monotonic(), committed=committed)
            self._changed.notify_all()

    @property
    def _gone(self) -> bool:
        return self._member.failure is not None or self._member.phase is Phase.GONE

    def close(self, timeout: float = CLOSE_S) -> None:
        """Leaves the group: handlers may finish, what was not begun is given back, acks
        reach the broker.

        For up to `timeout` seconds; after that the rest is left to the leases. Messages
        in hand that are neither acked nor nacked by then are delivered to others. Not
        for handlers, which have no way to outlive it.
        """
        if self._thread.abandoned:  # closed before
            return
        deadline = time.monotonic() + timeout
        with self._changed:
            self.take_no_more()
            self._changed.wait_for(lambda: not self._handlers, timeout)
            self._member.leave()
            self._thread.wake()
            self._changed.wait_for(self._is_settled, max(0.0, deadline - time.monotonic()))
        self._thread.abandon()

    def _is_settled(self) -> bool:
        """Whether nothing is left to say; a broker that is away need not hear the
        goodbye.
        """
        return self._gone or (self._member.phase is Phase.AWAY and self._member.settling.idle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
