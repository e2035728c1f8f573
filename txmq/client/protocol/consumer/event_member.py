"""Members of a consumer group on an event loop."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol
from uuid import UUID

from txmq.client.protocol.consumer.member_set import MemberState
from txmq.client.protocol.consumer.operations import Delivered, Operations
from txmq.client.protocol.consumer.settings import ConsumerSettings
from txmq.client.protocol.consumer.stats import ConsumerStats
from txmq.model.actions import AckAction
from txmq.model.message import ReceivedMessage

if TYPE_CHECKING:
    from txmq.client.protocol.consumer.store_jobs import JobResult, StoreJob


class KnownLog(Protocol):
    """The core of a face."""

    @property
    def known_log_id(self) -> UUID | None: ...


class Worker(Protocol):
    """A thread that does the work of the local store."""

    def submit(self, job: StoreJob, /) -> None: ...
    def stop(self) -> None: ...


class EventMember(MemberState):
    """A member at one broker. What changes it takes a step, which sends the requests
    that are due.
    """

    settings: ConsumerSettings
    operations: Operations
    _log: KnownLog
    _store_thread: Worker | None

    @abstractmethod
    def now(self) -> float:
        """Return the time of the loop, in seconds."""

    @abstractmethod
    def step(self) -> None:
        """Deliver messages that have come, and send requests that are due."""

    @abstractmethod
    def step_soon(self) -> None:
        """Take a step, once the calls of this turn of the loop are made or before."""

    @abstractmethod
    def open_stores(self) -> Worker:
        """Return a thread for the local store, whose results come to
        `on_store_result` on the loop.
        """

    @property
    def paused(self) -> frozenset[str]:
        """The paused topics."""
        return self.member.fetcher.paused

    @property
    def stats(self) -> ConsumerStats:
        """A copy of the counters."""
        return self.counters()

    @property
    def log_id(self) -> UUID | None:
        """The broker's log that the messages are of; None before the first
        connection.
        """
        return self._log.known_log_id

    def set_workers(self, workers: int) -> None:
        """Let so many handlers have messages of the local store at a time."""
        if self.member.recovery is not None:
            self.member.recovery.capacity = workers

    def _submit_store_jobs(self) -> None:
        """Have the local store's work done, in a thread."""
        recovery = self.member.recovery
        for job in [] if recovery is None else recovery.jobs(self.now()):
            self._store_thread = self._store_thread or self.open_stores()
            self._store_thread.submit(job)

    def on_store_result(self, result: JobResult | None) -> None:
        """Go on with a result of the store's thread; None: some time has passed."""
        recovery = self.member.recovery
        if recovery is not None and result is not None:
            recovery.finished(result, self.now())
            self.step()
        elif recovery is not None:
            recovery.tick(self.now())

    def acks_added(self, *, wait: bool = False) -> None:
        """Have new acks sent; at once for a caller that is going to `wait`."""
        self.member.settlement.flush_now |= wait
        self.step_soon()

    def ack_many(self, messages: Iterable[ReceivedMessage]) -> None:
        self.operations.ack_many(messages, self.now())
        self.step_soon()

    def nack(
        self,
        message: ReceivedMessage,
        delay: float | None,
        error: BaseException | str | None,
        *,
        dead: bool = False,
    ) -> None:
        self.operations.nack(message, delay, error, dead=dead)
        self.step_soon()

    def nack_many(
        self,
        messages: Iterable[ReceivedMessage],
        delay: float | None,
        error: BaseException | str | None,
    ) -> None:
        self.operations.nack_many(messages, delay, error)
        self.step_soon()

    def postpone(self, message: ReceivedMessage, delay: float | None) -> None:
        self.operations.postpone(message, delay)
        self.step_soon()

    def extend(self, message: ReceivedMessage, seconds: float | None) -> None:
        self.operations.extend(message, seconds, self.now())

    def give_back(self, messages: Iterable[ReceivedMessage], *, rejoin: bool = False) -> None:
        for message in messages:
            self.operations.give_back(message, self.now(), rejoin=rejoin)
        self.step_soon()

    def rejoin(self) -> None:
        """Join the group anew, and deliver nothing before."""
        self.member.rejoin()
        self.step_soon()

    def pause(self, topics: Sequence[str], *, paused: bool) -> None:
        self.member.pause(topics, paused=paused)
        self.step_soon()

    def count(self, *, duplicates: int = 0, retried: int = 0) -> None:
        """Add to the counters of the inbox."""
        self.member.stats.duplicates += duplicates
        self.member.stats.retried += retried

    def ack_actions(self, delivered: Delivered) -> Sequence[AckAction]:
        """Leave the outstanding messages to a transaction; return the actions that ack
        them in it. Raises NotLeased where there are none.
        """
        return self.operations.add_to_transaction(delivered)

    def transaction_ended(self, delivered: Delivered, *, committed: bool | None) -> None:
        """Settle the messages of a transaction, or make them outstanding again. None:
        its outcome is unknown.
        """
        self.operations.transaction_ended(delivered, self.now(), committed=committed)
        self.step_soon()

    def stop_delivery(self) -> None:
        """Deliver nothing more, and return what waits in the local queue."""
        self.member.close()
        self.step()
