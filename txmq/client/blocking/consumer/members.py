"""The members of a blocking consumer: threads wait here for messages of any of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import TypeVar

from txmq.client.blocking.after_fork import tell_after_fork
from txmq.client.blocking.concurrently import run_concurrently
from txmq.client.blocking.consumer.group_member import StateChanged, ThreadedMember
from txmq.client.blocking.core import BlockingCore
from txmq.client.log import get_logger
from txmq.client.protocol.consumer.fetched import DeliveredMessage
from txmq.client.protocol.consumer.member_set import MemberSet
from txmq.client.protocol.consumer.operations import Operations
from txmq.client.protocol.consumer.settings import ConsumerSettings
from txmq.client.protocol.settings import CLOSE_S

T = TypeVar("T")
log = get_logger()


class ThreadedMembers(MemberSet[ThreadedMember]):
    """The members at the brokers of `cores`."""

    def __init__(
        self,
        cores: Sequence[BlockingCore],
        settings: ConsumerSettings,
        *,
        of_several: bool = False,
    ) -> None:
        self.settings = settings
        self.changed = StateChanged()
        self._working = set[int]()  # threads, by their numbers
        self._leave_within: float | None = None  # once the last of them ends, seconds
        self._joining = set[BlockingCore]()
        members = [ThreadedMember(core, settings, self.changed) for core in cores]
        super().__init__(members, of_several=of_several)
        tell_after_fork(self)

    def after_fork(self) -> None:
        """Refuse everything in the child, whose messages would be the parent's too."""
        self.changed = StateChanged()
        for member in self.members:
            member.after_fork(self.changed)

    def join(self, timeout: float) -> None:
        """Join the group wherever a broker answers in time.

        Raises BrokerUnavailable where none does, and the refusal of a broker.
        """
        for member in self.members:
            member.thread.start()
        try:
            with self.changed:
                self.changed.wait_for(self.join_is_over, timeout)
                error = self.join_error(timeout)
        except BaseException:  # such as Ctrl-C
            self._abandon()
            raise
        if error is not None:
            self._abandon()
            # The last attempts are over now, and their errors are known.
            raise self.join_error(timeout) or error

    def _abandon(self) -> None:
        run_concurrently([member.abandon for member in self.members])

    def join_at(self, core: BlockingCore) -> None:
        """Join the group at a broker that was found, and wait until that is done. A
        refusal leaves the consumer as it is.
        """
        with self.changed:
            if self.closed or core in {one.core for one in self.members} | self._joining:
                return
            self._joining.add(core)
        member = ThreadedMember(core, self.later_settings(), self.changed)
        member.thread.start()
        with self.changed:
            self.changed.wait_for(lambda: member.serving or member.failure or self.closed)
            self._joining.remove(core)
            if member.serving and not self.closed:
                self.add(member)
                self.changed.notify_all()
                return
        if member.failure is not None:
            log.warning("consumer.not_joined", group=member.group, error=str(member.failure))
        member.leave(CLOSE_S)

    def receive(
        self, operation: Callable[[Operations, float], T], timeout: float | None
    ) -> T | None:
        """Return what the operation receives from a member; None after `timeout`
        seconds, and once the consumer is closed. Raises a member's failure.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        single = self.single
        with self.changed.lock:
            while not (self.closed if single is None else single.member.closing):
                if single is None:
                    received = self._receive_in_turn(operation)
                else:  # the hot path
                    received = single.receive(operation, time.monotonic())
                if received:
                    return received
                now = time.monotonic()
                left = None if deadline is None else deadline - now
                pause = 0.0 if self.pace is None else self.pace.pause(now)
                if left is not None and left <= 0:
                    return None
                if pause and (left is None or pause < left):
                    self.changed.wait(pause)
                elif not self.changed.wait(left):
                    return None
        return None

    def _receive_in_turn(self, operation: Callable[[Operations, float], T]) -> T | None:
        now = time.monotonic()
        received = (member.receive(operation, now) for member in self.in_turn())
        return next(filter(None, received), None)

    def receive_many(
        self, most: int, timeout: float | None, *, batch_wait: float = 0.0
    ) -> list[DeliveredMessage]:
        """Wait for a message; return it and others that wait, at most so many."""

        def operation(operations: Operations, now: float) -> list[DeliveredMessage]:
            return operations.receive_many(most - len(received), now)

        received: list[DeliveredMessage] = []
        received += self.receive(operation, timeout) or []
        if received and batch_wait:
            deadline = time.monotonic() + batch_wait
            while len(received) < most and (
                more := self.receive(operation, deadline - time.monotonic())
            ):
                received += more
        return received

    @contextmanager
    def working(self) -> Iterator[None]:
        """Receive messages and work on them inside the block; `close` waits for its
        end, but not for that of its own thread.
        """
        with self.changed:
            self._working.add(get_ident())
        try:
            yield
        finally:
            with self.changed:
                self._working.discard(get_ident())
                self.changed.notify_all()
                within, over = self._leave_within, not self._working
            if within is not None and over:
                self._leave(within)

    def stop_soon(self) -> None:
        with self.changed:
            for member in self.members:
                member.stop_delivery()

    def close(self, timeout: float) -> None:
        if all(member.thread.abandoned for member in self.members):  # closed before
            return
        deadline = time.monotonic() + timeout
        with self.changed:
            self.stop_soon()
            if get_ident() in self._working:  # a handler, or one of a signal on its thread
                self._leave_within = timeout
                return
            self.changed.wait_for(lambda: not self._working, timeout)
        self._leave(max(0.0, deadline - time.monotonic()))

    def _leave(self, timeout: float) -> None:
        run_concurrently([partial(member.leave, timeout) for member in self.members])
