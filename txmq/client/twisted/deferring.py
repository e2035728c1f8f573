"""Nouns of the asyncio face, as those of Twisted: see `txmq.faces`.

Each method is made from that of asyncio. It is called by its name, because an object
may have one of its own, such as one with spans.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial, wraps
from inspect import signature
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from twisted.internet.defer import Deferred

from txmq.client.twisted.bridge import Bridge

P = ParamSpec("P")
S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
T = TypeVar("T")
U = TypeVar("U")


class Adapted(Protocol[S_co]):
    """An object of the Twisted face."""

    @property
    def _bridge(self) -> Bridge: ...

    @property
    def _awaited(self) -> S_co:
        """The same noun on asyncio."""


def deferring(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Adapted[S], P], Deferred[T]]:
    """Return a coroutine method as one that returns a Deferred, with its arguments and
    docstring.
    """

    @wraps(method)
    def call(self: Adapted[S], /, *args: P.args, **options: P.kwargs) -> Deferred[T]:
        return self._bridge.defer(lambda: _of(self, method)(*args, **options))

    shown = signature(method)
    result = f"Deferred[{shown.return_annotation}]"
    call.__signature__ = shown.replace(return_annotation=result)  # type: ignore[attr-defined]  # of functions
    return call


def making(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
    kind: Callable[[Bridge, T], U],
) -> Callable[Concatenate[Adapted[S], P], Deferred[U]]:
    """Likewise, of a method whose result is another noun."""
    begin = deferring(method)

    @wraps(begin)
    def call(self: Adapted[S], /, *args: P.args, **options: P.kwargs) -> Deferred[U]:
        return begin(self, *args, **options).addCallback(partial(kind, self._bridge))

    return call


def at_once(
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[Adapted[S], P], T]:
    """Return a method that waits for nothing."""

    @wraps(method)
    def call(self: Adapted[S], /, *args: P.args, **options: P.kwargs) -> T:
        found: T = self._bridge.at_once(lambda: _of(self, method)(*args, **options))
        return found

    return call


def iterating(
    method: Callable[Concatenate[S, P], AsyncIterator[T]],
) -> Callable[Concatenate[Adapted[S], P], AsyncIterator[T]]:
    """Return a method that yields, for `async for` in coroutines of Deferreds."""

    @wraps(method)
    async def call(self: Adapted[S], /, *args: P.args, **options: P.kwargs) -> AsyncIterator[T]:
        found: AsyncIterator[T] = _of(self, method)(*args, **options)
        while ones := await self._bridge.defer(lambda: _next(found)):
            yield ones[0]

    return call


def _of(adapted: Adapted[S], method: Callable[..., Any]) -> Any:  # noqa: ANN401  # a method
    return getattr(adapted._awaited, method.__name__)  # noqa: SLF001  # of this face


async def _next(found: AsyncIterator[T]) -> tuple[T, ...]:
    async for one in found:
        return (one,)
    return ()
