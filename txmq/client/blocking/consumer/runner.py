"""Handlers in threads: each takes messages from the consumer, works on them, and acks
or nacks them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from math import inf
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from txmq.client.log import get_logger
from txmq.errors import LocalProtocolError
from txmq.model.message import ReceivedMessage

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from psycopg2.extensions import connection as Connection

    from txmq.client.blocking.consumer.inbox_upkeep import Kept
    from txmq.client.protocol.consumer.fetched import DeliveredMessage
    from txmq.client.protocol.consumer.settings import Settings

LOOK_EVERY_S = 0.25  # at `stop` and `idle_exit`, while there are no messages
log = get_logger()


class Holder(Protocol):
    """Whoever has messages in hand that may fail."""

    def nack_many(self, messages: Iterable[ReceivedMessage], *, error: BaseException) -> None: ...


class Source(Holder, Protocol):
    """What handlers need of a consumer, be it of one broker or of several."""

    @property
    def settings(self) -> Settings: ...
    @property
    def closed(self) -> bool: ...
    @property
    def parts(self) -> Sequence[Kept]: ...
    def working(self) -> AbstractContextManager[None]: ...
    def receive_many(
        self, most: int, timeout: float, *, batch_wait: float = 0.0
    ) -> Sequence[DeliveredMessage]: ...
    def ack_many(self, messages: Iterable[ReceivedMessage]) -> None: ...
    def give_back(self, messages: Iterable[ReceivedMessage]) -> None: ...
    def count(self, *, duplicates: int = 0, retried: int = 0) -> None: ...
    def epoch_of(self, message: ReceivedMessage) -> int: ...
    def inbox_of(self, message: ReceivedMessage) -> str: ...


class Work(Protocol):
    """What one thread does with what it took. It settles the messages, whatever
    happens.
    """

    def __call__(self, messages: Sequence[DeliveredMessage]) -> None:
        """Raises only what must end all the work."""

    def close(self) -> None:
        """The thread ends."""


class Limits(NamedTuple):
    """How to run: so many `threads`, so many messages for one call of the handler, and
    when to end.
    """

    threads: int
    batch: int | None
    batch_wait: float
    idle_exit: float | None
    stop: Event


class PlainWork:
    """Calls the handler; what it raises is the failure of its messages."""

    def __init__(
        self, consumer: Source, handler: Callable[[Any], object], *, batches: bool
    ) -> None:
        self._consumer, self._handler, self._batches = consumer, handler, batches

    def __call__(self, messages: Sequence[DeliveredMessage]) -> None:
        consumer = self._consumer
        try:
            self._handler(messages if self._batches else messages[0])
        except Exception as error:  # whatever a handler raises, its messages failed
            nack_all(consumer, messages, error)
        else:
            consumer.ack_many(messages)

    def close(self) -> None:
        """Nothing is held."""


def nack_all(consumer: Holder, messages: Sequence[DeliveredMessage], error: BaseException) -> None:
    """The messages failed, in this order: later ones of a key find themselves parked
    behind the first.

    Those that their handler has nacked itself are done with.
    """
    held = [message for message in messages if message.in_hand]
    for message in held:
        place = f"{message.topic}/{message.partition}/{message.offset}"
        log.warning("message.failed", place=place, attempt=message.attempt, error=repr(error)[:200])
    consumer.nack_many(held, error=error)


class Runs:
    """What calls handlers with the messages that it takes."""

    def run(
        self: Source,
        handler: Callable[..., object],
        *,
        inbox: Callable[[], Connection] | None = None,
        threads: int = 1,
        batch: int | None = None,
        batch_wait: float = 0.0,
        idle_exit: float | None = None,
        stop: Event | None = None,
    ) -> None:
        """Calls the handler for each message, in so many threads, until `stop` is set
        or the consumer is closed.

        `handler(message)`: what it returns from is acked, what raises is nacked, and
        retried by the group's policy. `inbox`, a function that connects to PostgreSQL:
        then `handler(message, connection)` runs in a transaction that also remembers
        the message, and its effect comes exactly once, however often the message is
        delivered. The transaction is committed here; serialization failures and
        deadlocks are run again in place. `batch`: the handler gets lists of up to so
        many messages instead, and `batch_wait` seconds are waited for a list to fill.
        One that fails in the inbox is taken apart, so that only the messages that are
        to blame fail; where the handler nacks those itself, its transaction is rolled
        back, and it is called once more with the rest. `idle_exit`: seconds without a
        message after which to return.
        """
        run_handler(
            self,
            handler,
            inbox,
            threads=threads,
            batch=batch,
            batch_wait=batch_wait,
            idle_exit=idle_exit,
            stop=stop,
        )


def run_handler(  # the options of `run`
    consumer: Source,
    handler: Callable[..., object],
    inbox: Callable[[], Connection] | None,
    *,
    threads: int,
    batch: int | None,
    batch_wait: float,
    idle_exit: float | None,
    stop: Event | None,
) -> None:
    """What `Consumer.run` does. Raises LocalProtocolError for numbers that cannot be
    meant.
    """
    check_limits(threads, "threads", batch, batch_wait)
    limits = Limits(threads, batch, batch_wait, idle_exit, stop or Event())
    if inbox is None:
        run_plain(consumer, handler, limits)
    else:
        from txmq.client.blocking.consumer.inbox import run_with_inbox  # psycopg2 only for those who need it

        run_with_inbox(consumer, handler, inbox, limits)


def check_limits(count: int, what: str, batch: int | None, batch_wait: float) -> None:
    """Raises LocalProtocolError for numbers that cannot be meant."""
    if batch is not None and batch < 1:
        raise LocalProtocolError(f"batches of {batch}", hint="at least 1")
    if count < 1:
        raise LocalProtocolError(f"{count} {what}", hint="at least 1")
    if batch_wait < 0 or (batch_wait and batch is None):
        raise LocalProtocolError(
            f"batch_wait={batch_wait}", hint="seconds to wait for a batch: batch=50, batch_wait=0.1"
        )


def run_plain(consumer: Source, handler: Callable[[Any], object], limits: Limits) -> None:
    """Runs a handler of messages alone."""
    batches = limits.batch is not None
    Runner(consumer, lambda: PlainWork(consumer, handler, batches=batches), limits).run()


class Runner:
    """Keeps threads at work until they are to end. `make` makes each thread's Work."""

    def __init__(self, consumer: Source, make: Callable[[], Work], limits: Limits) -> None:
        self._consumer, self._make, self._limits = consumer, make, limits
        self._ended = Event()
        self._idle_since = [
            time.monotonic()
        ] * limits.threads  # of each thread; never, while it is at work
        self._trouble: BaseException | None = None

    def run(self) -> None:
        """Returns when it was told to, or all was idle for long enough. Raises what
        ended the work.
        """
        if self._limits.threads == 1:
            self._work(0)
            return
        name = self._consumer.settings.group
        threads = [
            Thread(target=self._guarded, args=(number,), name=f"txmq-{name}-{number}", daemon=True)
            for number in range(self._limits.threads)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            self._ended.set()
        if self._trouble is not None:
            raise self._trouble

    def _guarded(self, number: int) -> None:
        try:
            self._work(number)
        except BaseException as error:  # raised where it can be seen: by `run`
            self._trouble = self._trouble or error
        finally:
            self._ended.set()

    def _work(self, number: int) -> None:
        work, limits, consumer = self._make(), self._limits, self._consumer
        try:
            with consumer.working():
                while not self._is_over():
                    messages = consumer.receive_many(
                        limits.batch or 1, LOOK_EVERY_S, batch_wait=limits.batch_wait
                    )
                    if messages:
                        self._step(number, work, messages)
                    elif self._is_idle():
                        return
        finally:
            work.close()

    def _step(self, number: int, work: Work, messages: Sequence[DeliveredMessage]) -> None:
        self._idle_since[number] = inf
        try:
            work(messages)
        finally:
            self._idle_since[number] = time.monotonic()

    def _is_over(self) -> bool:
        return self._limits.stop.is_set() or self._ended.is_set() or self._consumer.closed

    def _is_idle(self) -> bool:
        longest = self._limits.idle_exit
        return longest is not None and time.monotonic() - max(self._idle_since) >= longest
