"""Futures that cost little until a caller inspects them.

A `concurrent.futures.Future` begins with a lock, a condition and two lists. It takes
the lock again to be resolved and to be read. That is a third of what a small message
costs its sender. A Promise has none of these parts until a caller observes it: waits
for it, asks for its state, or adds a callback. A thread that waits for an unobserved
promise may do the sender's work meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures._base import FINISHED, PENDING
from dataclasses import dataclass
from threading import RLock
from time import monotonic
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
CONDITION = "_condition"
_PARTS = frozenset(vars(Future[Any]()))  # the attributes of a future in this Python


def _no_assistance(promise: Promise[Any], timeout: float | None) -> None:
    """Let the waiting thread just wait."""


@dataclass(slots=True)
class PromiseContext:
    """State and callbacks that all promises of one sender share.

    `on_observed` is called when a caller observes a promise for the first time.
    `assist` is called by a thread that waits for an unobserved promise. It may do the
    sender's work for up to that many seconds. It returns once the promise is resolved,
    or once other threads have to do the rest.
    """

    lock: RLock
    on_observed: Callable[[], None]
    assist: Callable[[Promise[Any], float | None], None] = _no_assistance
    observed: int = 0  # promises that are observed and not resolved


class Promise(Future[T]):
    """The future of a reply. A request in flight cannot be cancelled, so `cancel` does
    nothing.

    An observed promise changes as every future does, under its own condition. An
    unobserved one changes under the lock of its context (see `resolve_promises`). The
    parts that make it observed are created under that lock too, so that both ways
    exclude each other.
    """

    _state = PENDING
    _result: T | None = None
    _exception: BaseException | None = None
    observed = False  # True once its parts exist

    def __init__(self, context: PromiseContext) -> None:
        self._context = context  # and no more: `__getattr__` creates the rest on demand

    @property
    def resolved(self) -> bool:
        """True once there is a result or an error. Unlike `done`, does not observe."""
        return self._state == FINISHED

    def cancel(self) -> bool:
        return False

    def result(self, timeout: float | None = None) -> T:
        if self._state != FINISHED and not self.observed:
            began = monotonic()
            self._context.assist(self, timeout)
            if timeout is not None:
                timeout = max(0.0, timeout - (monotonic() - began))
        if self._state == FINISHED and self._exception is None:
            return self._result  # type: ignore[return-value] # of a T that may be None
        return super().result(timeout)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # any attribute of a future
        if name not in _PARTS:
            raise AttributeError(f"a {type(self).__name__} has no attribute {name!r}")
        with self._context.lock:
            if not self.observed:
                self.observed = True
                self._context.observed += self._state != FINISHED
                parts = vars(Future())
                # The condition comes last: a thread that has it needs the lock no more,
                # and finds all other parts in place.
                for part in sorted(parts, key=CONDITION.__eq__):
                    self.__dict__.setdefault(part, parts[part])
        self._context.on_observed()
        return self.__dict__[name]


def promise_class(context: PromiseContext) -> Callable[[], Promise[Any]]:
    """Return a class of promises that belong to `context`.

    To create a promise and then set its context takes three times as long.
    """
    return type("Promise", (Promise,), {"_context": context, "__init__": object.__init__})


class FutureKind(Protocol):
    """A kind of futures: how an accumulator makes them and gives them their answers."""

    def create(self) -> Promise[Any]:
        """Return a new future."""

    def resolve(
        self, futures: Sequence[Promise[Any]], results: Sequence[Any], *, unobserved_only: bool
    ) -> bool:
        """Give each future its result; see `resolve_promises`."""

    def fail(self, futures: Sequence[Promise[Any]], error: BaseException) -> None:
        """Fail the futures."""


class Promises:
    """Promises of one context."""

    def __init__(self, context: PromiseContext) -> None:
        self._context = context
        self.create = promise_class(context)

    def resolve(
        self, futures: Sequence[Promise[Any]], results: Sequence[Any], *, unobserved_only: bool
    ) -> bool:
        return resolve_promises(self._context, futures, results, unobserved_only=unobserved_only)

    def fail(self, futures: Sequence[Promise[Any]], error: BaseException) -> None:
        fail_promises(self._context, futures, error)


def resolve_promises(
    context: PromiseContext,
    promises: Iterable[Promise[T]],
    results: Iterable[T],
    *,
    unobserved_only: bool = False,
) -> bool:
    """Give each promise of the context its result. A repetition does no harm.

    With `unobserved_only`, do nothing and return False while any promise of the context
    is observed: its callbacks must run on the sender's own thread.
    """
    observed: list[tuple[Promise[T], T]] = []
    with context.lock:
        if unobserved_only and context.observed:
            return False
        for promise, result in zip(promises, results, strict=True):
            if promise.observed:
                observed.append((promise, result))
            else:  # not in a method: this runs for every message
                promise._result = result  # noqa: SLF001  # Promise is of this module
                # After the result: the method `result` reads both without the lock.
                promise._state = FINISHED  # noqa: SLF001
    for promise, result in observed:  # without the lock: callbacks may do anything
        if _count_resolved(context, promise):
            promise.set_result(result)
    return True


def fail_promises(
    context: PromiseContext, promises: Iterable[Promise[Any]], error: BaseException
) -> None:
    """Fail promises, all of that context."""
    for promise in promises:
        with context.lock:
            if not promise.observed:
                promise._exception = error  # noqa: SLF001
                promise._state = FINISHED  # noqa: SLF001
                continue
        if _count_resolved(context, promise):
            promise.set_exception(error)


def _count_resolved(context: PromiseContext, promise: Promise[Any]) -> bool:
    """Count an observed promise as resolved. Return False if it is resolved already."""
    with context.lock:
        context.observed -= not promise.resolved
        return not promise.resolved
