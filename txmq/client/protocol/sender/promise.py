"""Futures as cheap as most of them are used: kept for a while, and read once the answer
is there.

A `concurrent.futures.Future` begins with a lock, a condition and two lists, and takes
the lock again to be resolved and once more to be read: a third of what a small message
costs its sender. A Promise has none of these until somebody waits for it, asks it
something before its time, or wants to be called. And who waits for one alone may help
to keep it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures._base import FINISHED, PENDING
from dataclasses import dataclass
from threading import RLock
from time import monotonic
from typing import Any, TypeVar

T = TypeVar("T")
CONDITION = "_condition"
_PARTS = frozenset(vars(Future[Any]()))  # what a future of this Python is made of


def _no_help(promise: Promise[Any], timeout: float | None) -> None:
    """The waiter just waits."""


@dataclass(slots=True)
class Guard:
    """What the promises of one sender share. `looked_at` is called when somebody looks
    at one for the first time.

    `help` is called by who waits for a result that nobody has looked at: it may do what
    there is to do for it, for up to that many seconds, and returns when the promise is
    kept or the rest is better left to others.
    """

    lock: RLock
    looked_at: Callable[[], None]
    help: Callable[[Promise[Any], float | None], None] = _no_help
    watched: int = 0  # promises that somebody looks at and that are not kept


class Promise(Future[T]):
    """An answer to come. What is under way cannot be taken back, so `cancel` does
    nothing.

    Somebody looks at it: then it changes as every future does, under its own condition.
    Nobody has looked yet: then under the lock that it shares with others (see
    `resolve`), and that the parts needed to look are made under. So it never changes
    the one way while it is looked at in the other.
    """

    _state = PENDING
    _result: T | None = None
    _exception: BaseException | None = None
    watched = False  # whether its parts are made

    def __init__(self, guard: Guard) -> None:
        self._guard = guard  # and no more: `__getattr__` makes the rest when it is needed

    @property
    def kept(self) -> bool:
        """Whether the answer is there. Unlike `done`, it is no look."""
        return self._state == FINISHED

    def cancel(self) -> bool:
        return False

    def result(self, timeout: float | None = None) -> T:
        if self._state != FINISHED and not self.watched:
            began = monotonic()
            self._guard.help(self, timeout)
            if timeout is not None:
                timeout = max(0.0, timeout - (monotonic() - began))
        if self._state == FINISHED and self._exception is None:
            return self._result  # type: ignore[return-value] # of a T that may be None
        return super().result(timeout)

    def __getattr__(self, name: str) -> Any:  # whatever a future has
        if name not in _PARTS:
            raise AttributeError(f"a {type(self).__name__} has no attribute {name!r}")
        with self._guard.lock:
            if not self.watched:
                self.watched = True
                self._guard.watched += self._state != FINISHED
                parts = vars(Future())
                # Last of all the condition: who has that one needs the lock no more,
                # and finds everything else made.
                for part in sorted(parts, key=CONDITION.__eq__):
                    self.__dict__.setdefault(part, parts[part])
        self._guard.looked_at()
        return self.__dict__[name]


def promises(guard: Guard) -> Callable[[], Promise[Any]]:
    """The promises of a guard, as a class: to make one, and give it its guard, would
    take three times as long.
    """
    return type("Promise", (Promise,), {"_guard": guard, "__init__": object.__init__})


def resolve(
    guard: Guard, promises: Iterable[Promise[T]], results: Iterable[T], *, alone: bool = False
) -> bool:
    """Gives each promise its result; all are of that guard. Again is fine.

    `alone`: not where somebody looks at any promise of the guard, whose callbacks
    belong to another thread. Then nothing is done, and False returned.
    """
    watched: list[tuple[Promise[T], T]] = []
    with guard.lock:
        if alone and guard.watched:
            return False
        for promise, result in zip(promises, results, strict=True):
            if promise.watched:
                watched.append((promise, result))
            else:  # not by a method: this is done for every message
                promise._result = result
                promise._state = FINISHED  # after the result: `result` looks without the lock
    for promise, result in watched:  # without the lock: callbacks may do anything
        if _no_longer_watched(guard, promise):
            promise.set_result(result)
    return True


def fail(guard: Guard, promises: Iterable[Promise[Any]], error: BaseException) -> None:
    """Breaks promises; all are of that guard."""
    for promise in promises:
        with guard.lock:
            if not promise.watched:
                promise._exception = error
                promise._state = FINISHED
                continue
        if _no_longer_watched(guard, promise):
            promise.set_exception(error)


def _no_longer_watched(guard: Guard, promise: Promise[Any]) -> bool:
    """Counts a promise that is about to be kept; False where it is."""
    with guard.lock:
        guard.watched -= not promise.kept
        return not promise.kept
