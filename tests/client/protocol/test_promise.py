"""Promises behave as futures before, after and while they are resolved."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, as_completed, wait
from threading import Barrier, RLock

import pytest

from txmq.client.protocol.sender.promise import Promise, PromiseContext, resolve_promises
from txmq.testing.wait import PATIENCE_S


class Observations:
    """A context of promises, and the number of its observations."""

    def __init__(self) -> None:
        self.count = 0
        self.context = PromiseContext(RLock(), self._on_observed)

    def _on_observed(self) -> None:
        self.count += 1

    def promise(self) -> Promise[int]:
        return Promise(self.context)


def in_a_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_a_resolved_promise_is_a_finished_future() -> None:
    observations = Observations()
    promise = observations.promise()
    resolve_promises(observations.context, [promise], [7])
    assert isinstance(promise, Future)
    assert promise.result() == promise.result(0) == 7
    assert observations.count == 0  # to read it, nothing had to be made
    assert (promise.exception(), promise.done(), promise.running(), promise.cancelled()) == (
        None,
        True,
        False,
        False,
    )
    assert "finished returned int" in repr(promise)


def test_a_promise_waits_until_its_time_out() -> None:
    promise = Observations().promise()
    with pytest.raises(TimeoutError):
        promise.result(0.001)
    with pytest.raises(TimeoutError):
        promise.exception(0.001)
    assert not promise.done()


def test_the_first_observation_of_an_unresolved_promise_is_reported() -> None:
    observations = Observations()
    promise = observations.promise()
    assert observations.count == 0
    assert not promise.done()
    promise.add_done_callback(print)
    assert observations.count == 1


def test_a_failed_promise_raises_its_error() -> None:
    promise = Observations().promise()
    promise.set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        promise.result()
    assert isinstance(promise.exception(), ValueError)


def test_a_promise_cannot_be_cancelled() -> None:
    observations = Observations()
    promise = observations.promise()
    assert not promise.cancel()
    resolve_promises(observations.context, [promise], [1])
    assert not promise.cancel()
    assert promise.result() == 1


def test_callbacks_run_once_whether_added_before_or_after() -> None:
    observations = Observations()
    promise, called = observations.promise(), list[int]()
    promise.add_done_callback(lambda kept: called.append(kept.result()))
    resolve_promises(observations.context, [promise], [1])
    promise.add_done_callback(lambda kept: called.append(-kept.result()))
    assert called == [1, -1]


def test_wait_and_as_completed_accept_promises_beside_other_futures() -> None:
    observations = Observations()
    promises, other = [observations.promise() for _ in range(3)], Future[int]()
    resolve_promises(observations.context, promises[:1], [0])
    assert wait([*promises, other], return_when=FIRST_COMPLETED).done == {promises[0]}
    thread = in_a_thread(lambda: resolve_promises(observations.context, promises[1:], [1, 2]))
    other.set_result(3)
    assert sorted(done.result() for done in as_completed([*promises, other], PATIENCE_S)) == [
        0,
        1,
        2,
        3,
    ]
    thread.join()


def test_a_coroutine_can_await_a_promise() -> None:
    observations = Observations()

    async def awaited() -> int:
        promise = observations.promise()
        thread = in_a_thread(lambda: resolve_promises(observations.context, [promise], [5]))
        got = await asyncio.wait_for(asyncio.wrap_future(promise), PATIENCE_S)
        thread.join()
        return got

    assert asyncio.run(awaited()) == 5


def test_a_promise_has_no_other_attributes() -> None:
    promise = Observations().promise()
    with pytest.raises(AttributeError, match="colour"):
        getattr(promise, "colour")  # noqa: B009  # mypy knows that it does not exist


@pytest.mark.parametrize("look", ["result", "wait", "as_completed", "callback"])
def test_an_observer_at_the_moment_of_resolution_gets_the_result_once(look: str) -> None:
    rounds, size = 300, 8
    start, seen = Barrier(2), list[list[int]]()
    observations = Observations()
    batches = [[observations.promise() for _ in range(size)] for _ in range(rounds)]

    def watch(promises: list[Promise[int]]) -> list[int]:
        if look == "result":
            return [promise.result(PATIENCE_S) for promise in promises]
        if look == "wait":
            return [promise.result(0) for promise in wait(promises, PATIENCE_S, ALL_COMPLETED).done]
        if look == "as_completed":
            return [promise.result(0) for promise in as_completed(promises, PATIENCE_S)]
        called = list[int]()
        for promise in promises:
            promise.add_done_callback(lambda kept: called.append(kept.result(0)))
        wait(promises, PATIENCE_S)
        return called

    def watch_all() -> None:
        for promises in batches:
            start.wait(PATIENCE_S)
            seen.append(watch(promises))

    thread = in_a_thread(watch_all)
    for promises in batches:
        start.wait(PATIENCE_S)
        resolve_promises(observations.context, promises, range(size))
    thread.join()
    assert [sorted(values) for values in seen] == [list(range(size))] * rounds
