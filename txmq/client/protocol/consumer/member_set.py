"""The members of one consumer: one at each broker, in all faces.

Each broker assigns its own partitions. A broker that is away stops only these; its
member rejoins by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from txmq.client.log import get_logger
from txmq.client.protocol.consumer.fetched import ReceivedBatch, owner_of
from txmq.client.protocol.consumer.in_place import InPlaceAttempts
from txmq.client.protocol.consumer.member import Member, MemberPhase
from txmq.client.protocol.consumer.membership import Membership
from txmq.client.protocol.consumer.operations import Operations
from txmq.client.protocol.consumer.pace import Pace
from txmq.client.protocol.consumer.settings import ConsumerSettings
from txmq.client.protocol.consumer.stats import ConsumerStats
from txmq.errors import BrokerUnavailable, LocalProtocolError, TxmqError
from txmq.model.message import ReceivedMessage
from txmq.model.retry import RetryPolicy
from txmq.model.topic_partition import PartitionName

log = get_logger()


class DrivenMember(Protocol):
    """A member with its driver. Each face has one, with its own way to wait.

    `trouble` is the last error of its connection, `failure` the error that ended it.
    """

    @property
    def member(self) -> Member: ...
    @property
    def group(self) -> str: ...
    @property
    def closing(self) -> bool: ...
    @property
    def serving(self) -> bool: ...
    @property
    def failure(self) -> TxmqError | None: ...
    @property
    def trouble(self) -> TxmqError | OSError | None: ...
    @property
    def stats(self) -> ConsumerStats: ...
    @property
    def paused(self) -> frozenset[str]: ...
    @property
    def membership(self) -> Membership | None: ...
    @property
    def operations(self) -> Operations: ...

    def set_workers(self, workers: int) -> None: ...
    def ack_many(self, messages: Iterable[ReceivedMessage]) -> None: ...
    def nack(
        self,
        message: ReceivedMessage,
        delay: float | None,
        error: BaseException | str | None,
        *,
        dead: bool = False,
    ) -> None: ...
    def nack_many(
        self,
        messages: Iterable[ReceivedMessage],
        delay: float | None,
        error: BaseException | str | None,
    ) -> None: ...
    def postpone(self, message: ReceivedMessage, delay: float | None) -> None: ...
    def extend(self, message: ReceivedMessage, seconds: float | None) -> None: ...
    def give_back(self, messages: Iterable[ReceivedMessage], *, rejoin: bool = False) -> None: ...
    def pause(self, topics: Sequence[str], *, paused: bool) -> None: ...
    def count(self, *, duplicates: int = 0, retried: int = 0) -> None: ...


class MemberState:
    """The part of a driven member that is the same in all faces."""

    member: Member

    @property
    def group(self) -> str:
        """The name of the group: for a broadcast member its own."""
        return self.member.group

    @property
    def owner(self) -> object:
        """The object that the member stores as owner in its batches."""
        return self

    @property
    def membership(self) -> Membership | None:
        """The member's place in its group, as the broker last reported it."""
        return self.member.membership

    @property
    def assignment(self) -> frozenset[PartitionName]:
        """The partitions assigned to this member."""
        return self.member.assignment

    @property
    def closing(self) -> bool:
        """True once nothing more is delivered."""
        return self.member.closing

    @property
    def serving(self) -> bool:
        """True while the member is connected and, as far as it knows, in its group,
        with its local stores open.
        """
        recovery = self.member.recovery
        return self.member.phase is MemberPhase.SERVING and (recovery is None or recovery.opened)

    @property
    def failure(self) -> TxmqError | None:
        """The error that ended the member."""
        return self.member.failure

    @property
    def rejoined(self) -> int:
        """The number of times that the member has joined its group again."""
        return self.member.stats.rejoined

    def counters(self) -> ConsumerStats:
        """Return a copy of the counters, with the figures of the local store."""
        recovery = self.member.recovery
        return replace(self.member.stats) if recovery is None else recovery.counters()


M = TypeVar("M", bound=DrivenMember)


class MemberSet(ABC, Generic[M]):
    """The members of one consumer, in the order of the brokers. `single`: the only
    one, if there never are others.
    """

    settings: ConsumerSettings

    def __init__(self, members: Sequence[M], *, of_several: bool = False) -> None:
        """`of_several`: brokers may be added."""
        self.members = tuple(members)
        self.single = None if of_several else self.members[0]
        self._turn = 0
        rate = self.settings.messages_per_s
        self.pace = None if rate is None else Pace(rate)
        self._workers = 1
        # called for members that are added, before their messages are delivered
        self.on_added: list[Callable[[M], object]] = []
        for member in self.members:
            member.operations.pace = self.pace

    def later_settings(self) -> ConsumerSettings:
        """Return the settings at a broker that is added while the consumer runs:
        others may have sent to it before.
        """
        return replace(self.settings, start="first")

    def add(self, member: M) -> None:
        """Have messages of a member delivered that has joined at another broker."""
        member.operations.pace = self.pace
        member.set_workers(self._workers)
        if paused := self.paused:
            member.pause(sorted(paused), paused=True)
        for begin in self.on_added:
            begin(member)
        self.members = (*self.members, member)

    @abstractmethod
    def stop_soon(self) -> None:
        """Deliver nothing more. Called in any thread."""

    @property
    def closed(self) -> bool:
        """True once nothing more is delivered."""
        return all(member.closing for member in self.members)

    @property
    def stats(self) -> ConsumerStats:
        """The sum of all members' counters."""
        return ConsumerStats.total(member.stats for member in self.members)

    def set_workers(self, workers: int) -> None:
        """Let so many handlers have messages of the local store at a time."""
        self._workers = workers
        for member in self.members:
            member.set_workers(workers)

    def in_place(self) -> InPlaceAttempts:
        """Return the attempts in place at the messages of one call of a handler."""
        settings, membership = self.settings, self.members[0].membership
        retry = settings.retry or RetryPolicy() if membership is None else membership.retry
        return InPlaceAttempts(settings.attempts_in_place, retry)

    @property
    def paused(self) -> frozenset[str]:
        """The paused topics of any member."""
        return frozenset().union(*(member.paused for member in self.members))

    def member_of(self, delivered: ReceivedMessage | ReceivedBatch) -> M:
        """Return the member that a message or batch was delivered to.

        Raises LocalProtocolError where there are several brokers, and another consumer
        received it.
        """
        if self.single is not None:
            return self.single
        owner = owner_of(delivered)
        for member in self.members:
            if member is owner:
                return member
        raise LocalProtocolError(
            "the message was delivered to another consumer",
            hint="settle the message object that a consumer delivered, at that consumer",
        )

    def ack_many(self, messages: Iterable[ReceivedMessage]) -> None:
        """Ack messages of any of the members."""
        for member, own in self._by_member(messages):
            member.ack_many(own)

    def nack_many(
        self,
        messages: Iterable[ReceivedMessage],
        delay: float | None = None,
        error: BaseException | str | None = None,
    ) -> None:
        """Nack messages of any of the members."""
        for member, own in self._by_member(messages):
            member.nack_many(own, delay, error)

    def give_back(self, messages: Iterable[ReceivedMessage], *, rejoin: bool = False) -> None:
        """Return messages of any of the members to the group."""
        for member, own in self._by_member(messages):
            member.give_back(own, rejoin=rejoin)

    def count(self, *, duplicates: int = 0, retried: int = 0) -> None:
        """Add to the counters of the inbox."""
        self.members[0].count(duplicates=duplicates, retried=retried)

    def _by_member(
        self, messages: Iterable[ReceivedMessage]
    ) -> Iterable[tuple[M, Iterable[ReceivedMessage]]]:
        if self.single is not None:
            return ((self.single, messages),)
        grouped: dict[M, list[ReceivedMessage]] = {}
        for message in messages:
            grouped.setdefault(self.member_of(message), []).append(message)
        return grouped.items()

    def in_turn(self) -> Sequence[M]:
        """Return the members, each time from another one on: a busy broker does not
        keep others waiting.
        """
        self._turn = (self._turn + 1) % len(self.members)
        return (*self.members[self._turn :], *self.members[: self._turn])

    def join_is_over(self) -> bool:
        """Return whether all members have joined, or one was refused."""
        return all(member.serving for member in self.members) or any(
            member.failure for member in self.members
        )

    def join_error(self, timeout: float) -> TxmqError | None:
        """Return the error that ends the consumer: a member was refused, or no broker
        let it join in time. Members of other brokers join when these are back.
        """
        away = [member for member in self.members if not member.serving]
        failure = next((one.failure for one in self.members if one.failure is not None), None)
        if failure is None and len(away) < len(self.members):
            for member in away:
                log.warning("consumer.broker_away", group=member.group, error=str(member.trouble))
            return None
        why = "; ".join(str(member.trouble) for member in away if member.trouble)
        return failure or BrokerUnavailable(
            f"no broker let the consumer join within {timeout:.3g} s" + (f": {why}" if why else "")
        )
