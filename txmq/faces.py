"""Nouns that are stated once, as coroutines: asyncio awaits them, the blocking face
runs them at once.

What a coroutine of the blocking face awaits does its work inside of its call and never
suspends. So `run` has the result without a loop, and a blocking method is made from the
coroutine by `blocking`, or by `iterating` where it yields.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import wraps
from inspect import signature
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
T = TypeVar("T")


class Awaited(Protocol[S_co]):
    """An object of the blocking face."""

    @property
    def _awaited(self) -> S_co:
        """The same noun as all faces have it, over what blocks."""


def run(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never suspends."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    work.close()
    raise AssertionError("what blocks does not suspend")


def blocking(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Awaited[S], P], T]:
    """Return a method as a blocking one, with its signature and docstring."""

    @wraps(method)
    def call(self: Awaited[S], /, *args: P.args, **options: P.kwargs) -> T:
        return run(method(self._awaited, *args, **options))

    return call


def iterating(
    method: Callable[Concatenate[S, P], AsyncIterator[T]],
) -> Callable[Concatenate[Awaited[S], P], Iterator[T]]:
    """Return a method that yields as a blocking one, likewise."""

    @wraps(method)
    def call(self: Awaited[S], /, *args: P.args, **options: P.kwargs) -> Iterator[T]:
        found = method(self._awaited, *args, **options)
        while True:
            try:
                yield run(_next(found))
            except StopAsyncIteration:
                return

    shown = signature(method)
    returned = str(shown.return_annotation).removeprefix("Async")
    call.__signature__ = shown.replace(return_annotation=returned)  # type: ignore[attr-defined]  # of functions
    return call


@contextmanager
def block(work: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Return a block that never suspends as one of `with`."""
    entered = run(work.__aenter__())
    try:
        yield entered
    except BaseException as error:
        if not run(work.__aexit__(type(error), error, error.__traceback__)):
            raise
    else:
        run(work.__aexit__(None, None, None))


async def _next(found: AsyncIterator[T]) -> T:
    return await anext(found)
