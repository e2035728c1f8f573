"""Several threads at one store share a sync, and see only what is on disk."""

from __future__ import annotations

import os
import random
import threading
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.recover.local.model import FOREVER
from tests.recover.local.stores import Clock, acked, offsets, open_store, place, stored
from txmq.errors import StoreClosed
from txmq.recover.local import Change, LocalStore, State
from txmq.testing.wait import PATIENCE_S, wait_until


class Gate:
    """Commits of a store, which wait until the gate is open."""

    def __init__(self, store: LocalStore) -> None:
        self.opened, self.entered, self.count = threading.Event(), threading.Event(), 0
        commit = store._database._commit

        def gated() -> None:
            self.count += 1
            self.entered.set()
            assert self.opened.wait(PATIENCE_S)
            commit()

        store._database._commit = gated  # type: ignore[method-assign]


def test_puts_that_come_during_a_sync_share_the_next(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    store.put([stored(0)])
    gate = Gate(store)
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(store.put, [stored(1)])
        assert gate.entered.wait(PATIENCE_S)
        others = [pool.submit(store.put, [stored(offset)]) for offset in range(2, 10)]
        wait_until(lambda: len(store._database._jobs) == 8)
        assert not any(one.done() for one in (first, *others))
        gate.opened.set()
        for one in (first, *others):
            one.result(PATIENCE_S)
    assert gate.count == 2
    store.close()


def test_nothing_is_handed_out_or_told_before_it_is_on_disk(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    gate = Gate(store)
    with ThreadPoolExecutor(3) as pool:
        put = pool.submit(store.put, [stored(1)])
        assert gate.entered.wait(PATIENCE_S)
        due, untold = pool.submit(store.due, FOREVER, 9), pool.submit(store.untold, 9)
        assert not due.done()
        assert not untold.done()
        gate.opened.set()
        assert offsets(due.result(PATIENCE_S)) == [1]
        assert len(untold.result(PATIENCE_S)) == 1
        put.result(PATIENCE_S)
    store.close()


def test_threads_in_any_order_lose_nothing(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    handled: list[int] = []

    def put(thread: int) -> None:
        for n in range(0, 60, 3):
            store.put([stored(thread * 100 + n + i, f"key {thread}") for i in range(3)])

    def handle(seed: int) -> None:
        rng = random.Random(seed)
        while len(handled) < 240:
            for one in store.due(FOREVER, 7):
                if rng.random() < 0.1:
                    store.release(one.place)
                elif rng.random() < 0.2:
                    store.record([Change(one.place, State.STORED, one.attempt + 1, 0)])
                else:
                    handled.append(one.place.offset)
                    store.record([Change(one.place, State.ACKED, one.attempt, 0)])
            entries = store.untold(50)
            store.told(entries)
            store.forget([entry.place for entry in entries if entry.state is State.ACKED])

    run([lambda t=t: put(t) for t in range(4)] + [lambda s=s: handle(s) for s in range(3)])
    assert sorted(handled) == [t * 100 + n for t in range(4) for n in range(60)]
    for thread in range(4):
        own = [offset for offset in handled if offset // 100 == thread]
        assert own == sorted(own), "out of order"
    store.close()
    store, report = open_store(tmp_path)
    assert report.findings() == []
    assert store.stats().messages == 0
    store.close()


def run(bodies: Iterable[Callable[[], None]]) -> None:
    bodies = list(bodies)
    with ThreadPoolExecutor(len(bodies)) as pool:
        for one in [pool.submit(body) for body in bodies]:
            one.result(PATIENCE_S)


def test_whoever_waits_learns_that_the_store_was_closed(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    store.put([stored(1)])
    gate = Gate(store)
    with ThreadPoolExecutor(2) as pool:
        put = pool.submit(store.put, [stored(2)])
        assert gate.entered.wait(PATIENCE_S)
        closed = pool.submit(store.close)
        gate.opened.set()
        closed.result(PATIENCE_S)
        put.result(PATIENCE_S)  # it was on disk before
    for call in (store.next_due, lambda: store.record(acked(1)), lambda: store.forget([place(1)])):
        with pytest.raises(StoreClosed, match="is closed"):
            call()
    store, _ = open_store(tmp_path, now=Clock())
    assert isinstance(store, LocalStore)
    assert store.stats().messages == 2
    store.close()


def test_a_forked_process_does_not_write_into_the_store_of_its_parent(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path)
    store.put([stored(1)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of other tests
        child = os.fork()
    if not child:
        try:
            store.put([stored(2)])
        except StoreClosed as error:
            store.close()  # which leaves everything to the parent
            os._exit(7 if "belongs to process" in error.message else 8)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    store.put([stored(3)])
    assert offsets(store.due(FOREVER, 9)) == [1, 3]
    store.close()
