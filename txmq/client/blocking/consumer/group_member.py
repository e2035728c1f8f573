"""A member of a consumer group with the thread that drives it, for any number of
threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from threading import Condition, RLock
from typing import TYPE_CHECKING, NoReturn, TypeVar
from uuid import UUID, uuid4

from txmq.client.blocking.after_fork import forked
from txmq.client.blocking.consumer.thread import MemberThread
from txmq.client.blocking.core import BlockingCore
from txmq.client.protocol.consumer.checked_operations import operations_type
from txmq.client.protocol.consumer.member import Member, MemberPhase, steady_wall_us
from txmq.client.protocol.consumer.member_set import MemberState
from txmq.client.protocol.consumer.operations import (
    Delivered,
    Operations,
    ack_error,
)
from txmq.client.protocol.consumer.settings import ConsumerSettings
from txmq.client.protocol.consumer.stats import ConsumerStats
from txmq.errors import RequestTimeout, TxmqError
from txmq.model.actions import AckAction
from txmq.model.message import ReceivedMessage

if TYPE_CHECKING:
    from txmq.client.blocking.consumer.local_stores import StoreThread
    from txmq.client.protocol.consumer.store_jobs import JobResult

ACK_S = 10.0  # for the confirmation of an ack that a caller waits for
T = TypeVar("T")


class ForkedOperations(Operations):
    """The operations in the child of a fork: each raises LocalProtocolError."""

    def __init__(self) -> None:
        """There is no member."""

    def __getattr__(self, name: str) -> NoReturn:
        raise forked("consumer")


class StateChanged(Condition):
    """The lock of a consumer's members, and notifications of their changes.

    `with changed.lock` does what `with changed` does in half the time, for what is done
    once a message. `waiting` counts waiting threads: without any, there is no need to
    notify. `told` is called at each notification.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        super().__init__(self.lock)
        self.waiting = 0
        self.told: Callable[[], object] | None = None

    def notify_all(self) -> None:
        """Notify all that wait, and who wants to be told."""
        super().notify_all()
        if self.told is not None:
            self.told()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait as any Condition does."""
        self.waiting += 1
        try:
            return super().wait(timeout)
        finally:
            self.waiting -= 1


class ThreadedMember(MemberState):
    """A member at one broker.

    `changed` guards it; where a consumer has several members, they share it.
    """

    def __init__(
        self,
        core: BlockingCore,
        settings: ConsumerSettings,
        changed: StateChanged,
    ) -> None:
        self.core, self.settings, self.changed = core, settings, changed
        self.member = Member(settings, uuid4().hex, owner=self)
        self.operations = operations_type(settings)(self.member)
        self.acks = self.member.settlement.acks
        self.thread = MemberThread(self.member, core.open_connection, changed)
        self._store_thread: StoreThread | None = None
        if self.member.recovery is not None:
            self.member.recovery.work_added = self._submit_store_jobs

    def after_fork(self, changed: StateChanged) -> None:
        """Refuse everything: the member, its messages and its thread are the
        parent's.
        """
        self.changed, self.operations = changed, ForkedOperations()
        self.member.failure = forked("consumer")
        self.thread.forget_after_fork()
        self._store_thread = None  # the parent's, too
        self.member.recovery = None

    @property
    def trouble(self) -> TxmqError | OSError | None:
        """The error that keeps the member from its broker for now."""
        return self.thread.trouble

    @property
    def paused(self) -> frozenset[str]:
        """The paused topics."""
        with self.changed:
            return self.member.fetcher.paused

    @property
    def stats(self) -> ConsumerStats:
        """A copy of the counters."""
        with self.changed:
            return self.counters()

    @property
    def log_id(self) -> UUID:
        """The broker's log that the messages are of; a request if it is not known."""
        return self.core.log_id

    def set_workers(self, workers: int) -> None:
        """Let so many handlers have messages of the local store at a time."""
        with self.changed:
            if self.member.recovery is not None:
                self.member.recovery.capacity = workers

    def _submit_store_jobs(self) -> None:
        """Have the local store's work done. `changed` is held."""
        recovery = self.member.recovery
        for job in [] if recovery is None else recovery.jobs(time.monotonic()):
            if self._store_thread is None:
                # The store's modules are for those who have one.
                from txmq.client.blocking.consumer.local_stores import (  # noqa: PLC0415
                    LocalStores,
                    StoreThread,
                )

                stores = LocalStores(self.settings, lambda: self.core.known_log_id, steady_wall_us)
                self._store_thread = StoreThread(stores, self._on_store_result)
            self._store_thread.submit(job)

    def _on_store_result(self, result: JobResult | None) -> None:
        """Go on with a result of the store's thread; None: some time has passed."""
        with self.changed:
            recovery = self.member.recovery
            if recovery is None:
                return
            if result is None:
                recovery.tick(time.monotonic())
            else:
                recovery.finished(result, time.monotonic())
                self.changed.notify_all()
                self.thread.poke()

    def receive(self, operation: Callable[[Operations, float], T], now: float) -> T:
        """Return what the operation returns. `changed` is held. Raises the member's
        failure.
        """
        received = operation(self.operations, now)
        if (received and self.member.may_fetch()) or self.operations.has_refused:
            self.operations.has_refused = False
            self.thread.poke()
        return received

    def acks_added(self, *, wait: bool = False) -> None:
        """Have new acks sent; at once for a caller that is going to `wait`. `changed`
        is held.
        """
        if self.changed.waiting and self.settings.ordered:
            self.changed.notify_all()  # the next message of the key may be received
        if wait or self.acks.needs_wakeup:
            self.member.settlement.flush_now |= wait
            self.acks.needs_wakeup = False
            self.thread.poke()

    def wait_confirmed(self, number: int, delivered: Delivered) -> None:
        """Wait until the broker has the ack of that number in its log. `changed` is
        held.

        Raises NotLeased, RequestTimeout, or the member's failure.
        """
        self.changed.wait_for(lambda: self.acks.is_confirmed(number) or self._is_over, ACK_S)
        if not self.acks.is_confirmed(number):
            raise self.member.failure or RequestTimeout(
                f"the broker did not confirm the ack within {ACK_S:g} s",
                hint="if the ack is lost, the message is delivered again",
            )
        error = ack_error(self.operations, number, delivered)
        if error is not None:
            raise error

    def ack_many(self, messages: Iterable[ReceivedMessage]) -> None:
        with self.changed.lock:
            self.operations.ack_many(messages, time.monotonic())
            self.acks_added()

    def nack(
        self,
        message: ReceivedMessage,
        delay: float | None,
        error: BaseException | str | None,
        *,
        dead: bool = False,
    ) -> None:
        with self.changed:
            self.operations.nack(message, delay, error, dead=dead)
            self.thread.poke()

    def nack_many(
        self,
        messages: Iterable[ReceivedMessage],
        delay: float | None,
        error: BaseException | str | None,
    ) -> None:
        with self.changed:
            self.operations.nack_many(messages, delay, error)
            self.thread.poke()

    def postpone(self, message: ReceivedMessage, delay: float | None) -> None:
        with self.changed:
            self.operations.postpone(message, delay)
            self.thread.poke()

    def extend(self, message: ReceivedMessage, seconds: float | None) -> None:
        with self.changed:
            self.operations.extend(message, seconds, time.monotonic())

    def give_back(self, messages: Iterable[ReceivedMessage], *, rejoin: bool = False) -> None:
        with self.changed:
            for message in messages:
                self.operations.give_back(message, time.monotonic(), rejoin=rejoin)
            self.changed.notify_all()
            self.thread.poke()

    def rejoin(self) -> None:
        """Join the group anew, and deliver nothing before."""
        with self.changed:
            self.member.rejoin()
            self.thread.poke()

    def pause(self, topics: Sequence[str], *, paused: bool) -> None:
        with self.changed:
            self.member.pause(topics, paused=paused)
            self.changed.notify_all()
            self.thread.poke()

    def count(self, *, duplicates: int = 0, retried: int = 0) -> None:
        """Add to the counters of the inbox."""
        with self.changed:
            self.member.stats.duplicates += duplicates
            self.member.stats.retried += retried

    def ack_actions(self, delivered: Delivered) -> Sequence[AckAction]:
        """Leave the outstanding messages to a transaction; return the actions that ack
        them in it. Raises NotLeased where there are none.
        """
        with self.changed:
            return self.operations.add_to_transaction(delivered)

    def transaction_ended(self, delivered: Delivered, *, committed: bool | None) -> None:
        """Settle the messages of a transaction, or make them outstanding again. None:
        its outcome is unknown.
        """
        with self.changed:
            self.operations.transaction_ended(delivered, time.monotonic(), committed=committed)
            self.changed.notify_all()

    def stop_delivery(self) -> None:
        """Deliver nothing more, and return what waits in the local queue."""
        with self.changed:
            self.member.close()
            self.changed.notify_all()
            self.thread.poke()

    def leave(self, timeout: float) -> None:
        """Leave the group once the broker has everything, within `timeout` seconds.

        After that the rest is left to the leases.
        """
        if self.thread.abandoned:  # left before
            return
        with self.changed:
            self.member.leave()
            self.thread.wake()
            self.changed.wait_for(self._has_left, timeout)
            self.member.leave_behind()
        self.abandon()

    def abandon(self) -> None:
        """End without a request to the broker. What is in the local store stays."""
        self.thread.abandon()
        if self._store_thread is not None:
            self._store_thread.stop()

    @property
    def _is_over(self) -> bool:
        return self.member.failure is not None or self.member.phase is MemberPhase.GONE

    def _has_left(self) -> bool:
        """Return whether there is nothing left to send. A broker that is away need not
        get the leave request.
        """
        return self._is_over or (self.member.away and self.member.idle_without_broker)
