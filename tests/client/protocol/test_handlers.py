"""Functions that a consumer takes for handlers, and what it makes of their results."""

from __future__ import annotations

from asyncio import new_event_loop
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
from twisted.internet.defer import Deferred

from txmq.client.protocol.consumer.handlers import require_finished, require_handler
from txmq.errors import LocalProtocolError


async def coroutine(*_arguments: object) -> None: ...


def generator(*_arguments: object) -> Iterator[None]:
    yield


async def async_generator(*_arguments: object) -> AsyncIterator[None]:
    yield


def plain(*_arguments: object) -> str:
    return "an ordinary result is ignored"


class Methods:
    """Handlers that are methods or objects."""

    async def coroutine(self, _message: object) -> None: ...

    def plain(self, _message: object) -> None: ...


class CalledCoroutine:
    """An object whose call is a coroutine."""

    async def __call__(self, _message: object) -> None: ...


class CalledGenerator:
    """An object whose call is a generator."""

    def __call__(self, _message: object) -> Iterator[None]:
        yield


COROUTINES = [coroutine, Methods().coroutine, partial(partial(coroutine), 1), CalledCoroutine()]


@pytest.mark.parametrize("handler", COROUTINES)
def test_a_coroutine_is_refused_where_nobody_would_await_it(handler: Any) -> None:
    with pytest.raises(LocalProtocolError, match="is a coroutine: a call runs nothing") as refused:
        require_handler(handler)
    assert "returns when its work is done" in refused.value.hint
    require_handler(handler, coroutines=True)


@pytest.mark.parametrize("coroutines", [False, True])
@pytest.mark.parametrize(
    "handler", [generator, async_generator, partial(generator, 1), CalledGenerator()]
)
def test_a_generator_is_refused_everywhere(handler: Any, coroutines: bool) -> None:  # noqa: FBT001
    with pytest.raises(LocalProtocolError, match="is a generator: a call runs nothing"):
        require_handler(handler, coroutines=coroutines)


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="the handler is of type str"):
        require_handler("work")


def test_an_inbox_is_a_function() -> None:
    with pytest.raises(LocalProtocolError, match="the inbox is of type str") as refused:
        require_handler(plain, "host=db")
    assert "inbox=lambda: psycopg2.connect(DSN)" in refused.value.hint


@pytest.mark.parametrize(
    ("handler", "inbox", "count"),
    [(lambda: None, None, 1), (Methods().plain, plain, 2), (lambda _a, _b: None, None, 1)],
)
def test_a_handler_that_takes_other_arguments_is_refused(
    handler: Callable[..., object], inbox: object, count: int
) -> None:
    with pytest.raises(LocalProtocolError, match=r"cannot be called: .*argument") as refused:
        require_handler(handler, inbox)
    assert ("connection" in refused.value.hint) == (count == 2)


@pytest.mark.parametrize("handler", [plain, partial(plain, 1), Methods().plain, str, print])
def test_functions_methods_and_classes_are_handlers(handler: Callable[..., object]) -> None:
    require_handler(handler)
    require_finished(handler(1))


def awaitable_of_asyncio() -> object:
    loop = new_event_loop()
    try:
        return loop.create_future()
    finally:
        loop.close()


def lazy_map() -> object:
    return map(print, [1])


@pytest.mark.parametrize(
    "answer",
    [coroutine, generator, async_generator, Future, Deferred, awaitable_of_asyncio, lazy_map],
)
def test_work_left_in_a_result_is_a_failure(answer: Callable[[], object]) -> None:
    with pytest.raises(LocalProtocolError, match=r"the handler returned a .* may not be done"):
        require_finished(answer())
