"""Handlers in threads: each receives messages from the consumer, works on them, and
acks or nacks them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from math import inf
from threading import Event, Thread
from typing import Any, Protocol

from txmq.client.protocol.consumer.fetched import DeliveredMessage
from txmq.client.protocol.consumer.handlers import (
    HandlerOptions,
    failed_messages,
    require_finished,
)
from txmq.client.protocol.consumer.in_place import InPlaceAttempts
from txmq.client.protocol.consumer.settings import ConsumerSettings
from txmq.model.causation import current_cause
from txmq.model.message import ReceivedMessage

CHECK_EVERY_S = 0.25  # of `stop` and `idle_exit`, while there are no messages


class MessageSource(Protocol):
    """The members of a consumer, as handlers in threads use them."""

    @property
    def settings(self) -> ConsumerSettings: ...
    @property
    def closed(self) -> bool: ...
    def working(self) -> AbstractContextManager[None]: ...
    def in_place(self) -> InPlaceAttempts: ...
    def receive_many(
        self, most: int, timeout: float, *, batch_wait: float = 0.0
    ) -> Sequence[DeliveredMessage]: ...
    def ack_many(self, messages: Iterable[ReceivedMessage]) -> None: ...
    def nack_many(self, messages: Iterable[ReceivedMessage], *, error: BaseException) -> None: ...
    def count(self, *, duplicates: int = 0, retried: int = 0) -> None: ...


class Worker(Protocol):
    """The work of one thread. It settles its messages, whatever happens."""

    def __call__(self, messages: Sequence[DeliveredMessage]) -> None:
        """Process messages. Raises only what must end all threads."""

    def close(self) -> None:
        """End with the thread."""


class PlainWorker:
    """A worker that calls the handler; an exception is the failure of its messages."""

    def __init__(
        self,
        source: MessageSource,
        handler: Callable[[Any], object],
        stop: Event,
        *,
        batches: bool,
    ) -> None:
        self._source, self._handler, self._batches = source, handler, batches
        self._stop = stop

    def __call__(self, messages: Sequence[DeliveredMessage]) -> None:
        try:
            error = self._attempt(messages)
            if error is not None:
                self._attempt_again(messages, error)
        except SystemExit as error:  # counts as a failure, or the next process would end, too
            self._source.nack_many(failed_messages(messages, error), error=error)
            raise

    def _attempt(self, messages: Sequence[DeliveredMessage]) -> Exception | None:
        """Handle and ack the messages. Return the error if that fails."""
        cause = current_cause.set(None if self._batches else messages[0])
        try:
            require_finished(self._handler(messages if self._batches else messages[0]))
        except Exception as error:  # noqa: BLE001  # a handler may raise anything
            return error
        finally:
            current_cause.reset(cause)
        self._source.ack_many(messages)
        return None

    def _attempt_again(self, messages: Sequence[DeliveredMessage], failure: Exception) -> None:
        """Try in place as often as the consumer may, then nack."""
        attempts, error = self._source.in_place(), failure
        while (pause := attempts.pause_after(error, messages)) is not None:
            if self._stop.wait(pause) or self._source.closed:
                break
            self._source.count(retried=len(messages))
            again = self._attempt(messages)
            if again is None:
                return
            error = again
        self._source.nack_many(failed_messages(messages, error), error=error)

    def close(self) -> None:
        """There is nothing to end."""


def run_plain(
    source: MessageSource,
    handler: Callable[[Any], object],
    options: HandlerOptions,
    stop: Event,
) -> None:
    """Run a handler of messages without an inbox."""
    batches = options.batch is not None
    Runner(source, lambda: PlainWorker(source, handler, stop, batches=batches), options, stop).run()


class Runner:
    """The threads of one run. `make` makes each thread's worker."""

    def __init__(
        self,
        source: MessageSource,
        make: Callable[[], Worker],
        options: HandlerOptions,
        stop: Event,
    ) -> None:
        self._source, self._make, self._options, self._stop = source, make, options, stop
        self._ended = Event()
        # When each thread last had a message; infinity while it works on one.
        self._idle_since = [time.monotonic()] * options.workers
        self._error: BaseException | None = None

    def run(self) -> None:
        """Return when the work is stopped, or was idle for long enough. Raises the
        error that ended it.
        """
        if self._options.workers == 1:
            self._work(0)
        else:
            self._work_in_threads()
        if self._error is not None:
            raise self._error

    def fail(self, error: BaseException) -> None:
        """End all threads, from any other: `run` raises the error."""
        self._error = self._error or error
        self._ended.set()

    def _work_in_threads(self) -> None:
        name = self._source.settings.group
        threads = [
            Thread(target=self._guarded, args=(number,), name=f"txmq-{name}-{number}", daemon=True)
            for number in range(self._options.workers)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            self._ended.set()

    def _guarded(self, number: int) -> None:
        try:
            self._work(number)
        except BaseException as error:  # noqa: BLE001  # `run` raises it
            self.fail(error)
        finally:
            self._ended.set()

    def _work(self, number: int) -> None:
        worker, options, source = self._make(), self._options, self._source
        try:
            with source.working():
                while not self._is_over():
                    messages = source.receive_many(
                        options.batch or 1, CHECK_EVERY_S, batch_wait=options.batch_wait
                    )
                    if messages:
                        self._process(number, worker, messages)
                    elif self._is_idle():
                        return
        finally:
            worker.close()

    def _process(self, number: int, worker: Worker, messages: Sequence[DeliveredMessage]) -> None:
        self._idle_since[number] = inf
        try:
            worker(messages)
        finally:
            self._idle_since[number] = time.monotonic()

    def _is_over(self) -> bool:
        return self._stop.is_set() or self._ended.is_set() or self._source.closed

    def _is_idle(self) -> bool:
        longest = self._options.idle_exit
        return longest is not None and time.monotonic() - max(self._idle_since) >= longest
