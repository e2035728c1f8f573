"""What a blocking consumer is, apart from its messages: a member of a group, with a thread that keeps it one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from threading import Condition
from typing import Self
from uuid import uuid4

from txmq.client.consumer_thread import ConsumerThread
from txmq.client.consuming.hands import AckAction, Delivered, Hands
from txmq.client.consuming.member import Member, Phase
from txmq.client.consuming.parcels import DeliveredMessage
from txmq.client.consuming.settings import Settings
from txmq.client.consuming.settling import Stats
from txmq.client.core import Core
from txmq.errors import BrokerUnavailable
from txmq.message import ReceivedMessage

CLOSE_S = 10.0


class ConsumerBase:
    """A member of a consumer group. For any number of threads, and for use with `with`."""

    def __init__(self, core: Core, settings: Settings) -> None:
        self.core, self.settings = core, settings
        self._changed = Condition()
        self._member = Member(settings, uuid4().hex, owner=self)
        self._hands = Hands(self._member)
        self._thread = ConsumerThread(self._member, core.dial, self._changed)
        self._handlers = 0  # threads that have messages in their handlers

    def join(self, timeout: float) -> None:
        """Becomes a member. Called once, by `consume`."""
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._member.phase is Phase.SERVING or self._member.failure, timeout)
            joined, failure = self._member.phase is Phase.SERVING, self._member.failure
        if not joined:
            self._thread.abandon()
            why = f": {self._thread.trouble}" if self._thread.trouble else ""
            raise failure or BrokerUnavailable(f"no broker let the consumer join within {timeout} s{why}")

    @property
    def group(self) -> str:
        """The group as the broker knows it: of a broadcast member its own, `group@member`."""
        seat = self._member.seat
        return self.settings.group if seat is None else seat.group

    @property
    def member(self) -> str:
        """The name of the member, given or made by the broker."""
        seat = self._member.seat
        return (self.settings.member or "") if seat is None else seat.member

    @property
    def epoch(self) -> int:
        """How many times the group was told to process messages once more: the inbox counts by it."""
        seat = self._member.seat
        return 0 if seat is None else seat.epoch

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

    def holds(self, message: ReceivedMessage) -> bool:
        """Whether the message is in hand, neither acked nor nacked."""
        with self._changed:
            return self._hands.holds(message)

    def epoch_of(self, message: ReceivedMessage) -> int:
        """The group's epoch when the message came."""
        return message.parcel.epoch if isinstance(message, DeliveredMessage) else self.epoch

    def count(self, *, duplicates: int = 0, retried: int = 0) -> None:
        """Adds to the stats what only handlers know."""
        with self._changed:
            self._member.stats.duplicates += duplicates
            self._member.stats.retried += retried

    def ack_actions(self, delivered: Delivered) -> Sequence[AckAction]:
        """Hands a message, or what is in hand of a batch, over to a transaction; returns what acks it there.

        Raises NotLeased where nothing of it is in hand.
        """
        with self._changed:
            return self._hands.lend(delivered)

    def transaction_over(self, delivered: Delivered, *, committed: bool | None) -> None:
        """The transaction has settled it; or it has not, and the message is in hand again; None = nobody knows."""
        with self._changed:
            self._hands.lent(delivered, time.monotonic(), committed=committed)
            self._changed.notify_all()

    @property
    def _gone(self) -> bool:
        return self._member.failure is not None or self._member.phase is Phase.GONE

    def close(self, timeout: float = CLOSE_S) -> None:
        """Leaves the group: handlers may finish, what was not begun is given back, acks reach the broker.

        For up to `timeout` seconds; after that the rest is left to the leases. Messages in hand that are neither acked
        nor nacked by then are delivered to others. Not for handlers, which have no way to outlive it.
        """
        if self._thread.abandoned:  # closed before
            return
        deadline = time.monotonic() + timeout
        with self._changed:
            self._member.close()
            self._changed.notify_all()
            self._thread.poke()
            self._changed.wait_for(lambda: not self._handlers, timeout)
            self._member.leave()
            self._thread.wake()
            self._changed.wait_for(self._is_settled, max(0.0, deadline - time.monotonic()))
        self._thread.abandon()

    def _is_settled(self) -> bool:
        """Whether nothing is left to say; a broker that is away need not hear the goodbye."""
        return self._gone or (self._member.phase is Phase.AWAY and self._member.settling.idle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
