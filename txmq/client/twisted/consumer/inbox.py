"""Handlers with an inbox, for consumers on the reactor: the blocking implementation, in
threads of its own.

A transaction waits for its database, so it must not run on the reactor's thread. One
implementation serves the blocking face and this one. Its threads call the consumer
through the reactor. They are not from a thread pool: each keeps its connection to the
database for as long as the work lasts, and a reactor that is stopped meanwhile does not
wait for a handler. What a thread has not committed by then is delivered again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from uuid import UUID

from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.threads import blockingCallFromThread

from txmq.client.blocking.core import BlockingCore, core_of
from txmq.client.protocol.consumer.fetched import DeliveredMessage
from txmq.client.protocol.consumer.handlers import HandlerOptions
from txmq.client.protocol.consumer.in_place import InPlaceAttempts
from txmq.client.protocol.consumer.membership import Membership
from txmq.client.protocol.consumer.stats import ConsumerStats
from txmq.client.twisted.consumer.group_member import ReactorMember
from txmq.client.twisted.consumer.members import ReactorMembers
from txmq.client.twisted.consumer.runner import Run
from txmq.client.twisted.protocols import Reactor
from txmq.model.message import ReceivedMessage

if TYPE_CHECKING:
    from txmq.tx.postgres.driver import BlockingConnection

P = ParamSpec("P")
T = TypeVar("T")


def run_with_inbox(
    members: ReactorMembers,
    handler: Callable[..., object],
    connect: Callable[[], BlockingConnection],
    options: HandlerOptions,
) -> Run:
    """Run a handler in threads. To cancel the run ends the work; handlers finish."""
    # psycopg2 is for those who have a database.
    from txmq.client.blocking.consumer import inbox  # noqa: PLC0415

    bridge, stop, reactor = ThreadBridge(members), Event(), members.reactor
    run = Run(stop.set)

    def work() -> None:
        try:
            inbox.run_with_inbox(bridge, handler, connect, options, stop)
        except BaseException as error:  # noqa: BLE001  # the run fails with it
            reactor.callFromThread(run.end, error)
        else:
            reactor.callFromThread(run.end)

    Thread(target=work, name=f"txmq-{members.settings.group}-run", daemon=True).start()
    return run


class BridgedMember:
    """A member as the upkeep of its inbox reads it in a thread.

    Requests to the broker go through the blocking client.
    """

    def __init__(self, member: ReactorMember, reactor: Reactor) -> None:
        """To be called on the reactor's thread."""
        self._member, self._reactor = member, reactor
        self.settings = member.settings
        self.core: BlockingCore = core_of(member.core.blocking)

    @property
    def group(self) -> str:
        return self._member.group

    @property
    def owner(self) -> object:
        return self._member

    @property
    def log_id(self) -> UUID | None:
        return self._member.log_id

    @property
    def membership(self) -> Membership | None:
        return self._member.membership

    @property
    def stats(self) -> ConsumerStats:
        return self._member.stats

    def rejoin(self) -> None:
        self._reactor.callFromThread(self._member.rejoin)


class ThreadBridge:
    """The members of a consumer on the reactor, for threads.

    Calls arrive on the reactor in the order in which they are made.
    """

    def __init__(self, members: ReactorMembers) -> None:
        """To be called on the reactor's thread."""
        self._members, self._reactor = members, members.reactor
        self.settings = members.settings
        self.members = tuple(BridgedMember(one, members.reactor) for one in members.members)

    @property
    def closed(self) -> bool:
        return self._members.closed

    def in_place(self) -> InPlaceAttempts:
        return self._members.in_place()

    @contextmanager
    def working(self) -> Iterator[None]:
        working = self._members.working()
        self._call(working.__enter__)
        try:
            yield
        finally:
            self._reactor.callFromThread(working.__exit__, None, None, None)

    def receive_many(
        self, most: int, timeout: float, *, batch_wait: float = 0.0
    ) -> Sequence[DeliveredMessage]:
        return self._wait(self._members.receive_many, most, timeout, batch_wait=batch_wait)

    def ack_many(self, messages: Iterable[ReceivedMessage]) -> None:
        self._reactor.callFromThread(self._members.ack_many, list(messages))

    def nack_many(self, messages: Iterable[ReceivedMessage], *, error: BaseException) -> None:
        self._call(self._members.nack_many, list(messages), error=error)

    def give_back(self, messages: Iterable[ReceivedMessage], *, rejoin: bool = False) -> None:
        self._call(self._members.give_back, list(messages), rejoin=rejoin)

    def count(self, *, duplicates: int = 0, retried: int = 0) -> None:
        self._reactor.callFromThread(
            lambda: self._members.count(duplicates=duplicates, retried=retried)
        )

    def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what the function returns on the reactor's thread."""

        def answer() -> Deferred[T]:
            return maybeDeferred(function, *args, **kwargs)

        return self._wait(answer)

    def _wait(self, function: Callable[P, Deferred[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of the function's Deferred."""
        call: Any = blockingCallFromThread  # mypy confuses its overloads
        answer: T = call(self._reactor, function, *args, **kwargs)
        return answer
