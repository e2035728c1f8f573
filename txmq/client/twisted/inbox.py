"""Handlers with an inbox, for the Twisted face: the work of the blocking one, in
threads of its own.

A transaction waits for its database, so it is not for the reactor's thread; and one
implementation of the inbox serves both faces. The threads ask the reactor for messages
and tell it what became of them: the consumer stays the reactor's. They are no pool's:
each keeps its connection to the database for as long as the work lasts, and a reactor
that is stopped meanwhile does not wait for a handler. What a thread has not committed
then is delivered again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from inspect import iscoroutine, iscoroutinefunction
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.threads import blockingCallFromThread
from twisted.python.failure import Failure

from txmq.client.blocking.consumer import runner
from txmq.client.twisted.protocols import Reactor
from txmq.errors import LocalProtocolError
from txmq.model.message import ReceivedMessage

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from txmq.client.blocking.core import Core
    from txmq.client.protocol.consumer.fetched import DeliveredMessage
    from txmq.client.protocol.consumer.settings import Settings
    from txmq.client.protocol.consumer.settling import Stats
    from txmq.client.twisted.consumer_base import ConsumerBase
    from txmq.client.twisted.runner import Limits

P = ParamSpec("P")
T = TypeVar("T")


class Source(Protocol):
    """What is asked of a consumer on the reactor's thread, be it of one broker or of
    several.
    """

    @property
    def settings(self) -> Settings: ...
    @property
    def closed(self) -> bool: ...
    @property
    def reactor(self) -> Reactor: ...
    @property
    def parts(self) -> Sequence[ConsumerBase]: ...
    def working(self) -> AbstractContextManager[None]: ...
    def receive_many(
        self, most: int, timeout: float | None = None, *, batch_wait: float = 0.0
    ) -> Deferred[list[DeliveredMessage]]: ...
    def ack_many(self, messages: Iterable[ReceivedMessage]) -> None: ...
    def nack_many(self, messages: Iterable[ReceivedMessage], *, error: BaseException) -> None: ...
    def give_back(self, messages: Iterable[ReceivedMessage]) -> None: ...
    def count(self, *, duplicates: int = 0, retried: int = 0) -> None: ...
    def epoch_of(self, message: ReceivedMessage) -> int: ...
    def inbox_of(self, message: ReceivedMessage) -> str: ...


def run_in_threads(
    consumer: Source,
    handler: Callable[..., object],
    connect: Callable[[], Connection],
    limits: Limits,
) -> Deferred[None]:
    """Fires when the work has ended, fails with what ended it. To cancel it is to let
    it end.

    Raises LocalProtocolError for a handler that is a coroutine.
    """
    from txmq.client.blocking.consumer.inbox import run_with_inbox  # psycopg2 only for those who need it

    if iscoroutinefunction(handler):
        raise _no_coroutine()
    bridge, stop, reactor = Bridge(consumer), Event(), consumer.reactor
    ended: Deferred[None] = Deferred(lambda _ended: stop.set())
    in_threads = runner.Limits(
        limits.workers, limits.batch, limits.batch_wait, limits.idle_exit, stop
    )

    def work() -> None:
        try:
            run_with_inbox(bridge, _waited_for(handler), connect, in_threads)
        except BaseException:  # raised where it can be seen: by whoever waits for the end
            reactor.callFromThread(ended.errback, Failure())
        else:
            reactor.callFromThread(ended.callback, None)

    Thread(target=work, name=f"txmq-{consumer.settings.group}-run", daemon=True).start()
    return ended


def _no_coroutine() -> LocalProtocolError:
    hint = "a function that returns once its statements are done; without inbox= handlers may be coroutines"
    return LocalProtocolError(
        "a handler with an inbox runs in a thread, and is no coroutine", hint=hint
    )


def _waited_for(handler: Callable[..., object]) -> Callable[..., object]:
    """The handler, of which nothing goes on once it has returned: then its transaction
    is committed.
    """

    def handle(messages: object, connection: Connection) -> None:
        answer = handler(messages, connection)
        if iscoroutine(answer):
            answer.close()
        if iscoroutine(answer) or isinstance(answer, Deferred):
            raise _no_coroutine()

    return handle


class Kept:
    """A member on the reactor, for the keeper of its inbox: only looked at, and the
    broker is asked in the thread.
    """

    def __init__(self, part: ConsumerBase) -> None:
        """Called on the reactor's thread."""
        self._part = part
        self.settings = part.settings
        self.core: Core = part.core.blocking.core

    @property
    def group(self) -> str:
        return self._part.group

    @property
    def inbox_name(self) -> str:
        return self._part.inbox_name

    @property
    def assignment(self) -> frozenset[tuple[str, int]]:
        return self._part.assignment

    @property
    def stats(self) -> Stats:
        return self._part.stats


class Bridge:
    """A consumer on the reactor as the threads see it; what they say arrives in the
    order in which they say it.
    """

    def __init__(self, consumer: Source) -> None:
        """Called on the reactor's thread."""
        self._consumer, self._reactor = consumer, consumer.reactor
        self.settings = consumer.settings
        self.parts = tuple(map(Kept, consumer.parts))

    @property
    def closed(self) -> bool:
        return self._consumer.closed

    @contextmanager
    def working(self) -> Iterator[None]:
        working = self._consumer.working()
        self._ask(working.__enter__)
        try:
            yield
        finally:
            self._reactor.callFromThread(working.__exit__, None, None, None)

    def receive_many(
        self, most: int, timeout: float, *, batch_wait: float = 0.0
    ) -> Sequence[DeliveredMessage]:
        return self._wait(self._consumer.receive_many, most, timeout, batch_wait=batch_wait)

    def ack_many(self, messages: Iterable[ReceivedMessage]) -> None:
        self._reactor.callFromThread(self._consumer.ack_many, list(messages))

    def nack_many(self, messages: Iterable[ReceivedMessage], *, error: BaseException) -> None:
        self._ask(self._consumer.nack_many, list(messages), error=error)

    def give_back(self, messages: Iterable[ReceivedMessage]) -> None:
        self._ask(self._consumer.give_back, list(messages))

    def count(self, *, duplicates: int = 0, retried: int = 0) -> None:
        self._reactor.callFromThread(
            lambda: self._consumer.count(duplicates=duplicates, retried=retried)
        )

    def epoch_of(self, message: ReceivedMessage) -> int:
        return self._consumer.epoch_of(message)

    def inbox_of(self, message: ReceivedMessage) -> str:
        return self._consumer.inbox_of(message)

    def _ask(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What the function returns, called on the reactor's thread."""

        def answer() -> Deferred[T]:
            return maybeDeferred(function, *args, **kwargs)

        return self._wait(answer)

    def _wait(self, function: Callable[P, Deferred[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """What the function's Deferred fires with."""
        call: Any = blockingCallFromThread  # whose overloads mypy takes for one another
        answer: T = call(self._reactor, function, *args, **kwargs)
        return answer
