"""Power cuts, kills and errors at every change of a life: nothing acknowledged is lost.

The same check must find the bugs planted at the end of this module.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from random import Random
from typing import Any

import pytest

from tests.recover.local_store.harness import (
    PATH,
    SIZES,
    STUCK,
    History,
    Life,
    SimIndex,
    check_power_cuts,
    check_recovery,
    new_disk,
    open_sim,
    run_life,
    steps_done,
)
from tests.recover.local_store.stores import FAILURE, message, place
from txmq.errors import DiskFull, StoreClosed, StoreError
from txmq.recover.local_store import Change, State
from txmq.recover.local_store.compaction import Compaction
from txmq.recover.local_store.records import CHANGED, StoredHead
from txmq.recover.local_store.state import StoreState
from txmq.recover.local_store.store import LocalStore
from txmq.store.log import writer
from txmq.store.log.record import Record
from txmq.store.log.segment import SegmentInfo
from txmq.testing.simfs import PowerCut, SimFS, crash_points

SEEDS = (22, 23)  # their lives relocate and remove


@pytest.mark.parametrize("seed", SEEDS)
def test_every_crash_point_of_a_life_keeps_the_promises(seed: int) -> None:
    assert check_power_cuts(partial(run_life, seed=seed), images=1) > 300


def test_the_lives_relocate_remove_and_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    relocate = Compaction._relocate

    def counted(self: Compaction, record: Record) -> None:
        before = self._log.end
        relocate(self, record)
        seen["relocated"] += self._log.end > before

    monkeypatch.setattr(Compaction, "_relocate", counted)
    for seed in SEEDS:
        history = History()
        store, _ = open_sim(new_disk(), history.index)
        Life(store, history, seed).run(60)
        seen["removed"] += store._log.first
        seen["committed"] += len(history.index.commits)
    assert min(seen["relocated"], seen["removed"], seen["committed"]) > 4, seen


def test_recovery_may_be_interrupted_at_every_change() -> None:
    interrupted = 0
    life = partial(run_life, seed=22, steps=25)
    for fs, history in crash_points(new_disk(), life, History):
        rng = Random(fs.calls)
        image = fs.crash(rng)

        def recover(disk: SimFS, past: History, before: History = history) -> None:
            past.index = before.index.copy()
            open_sim(disk, past.index)[0].close()

        for stopped, past in crash_points(image, recover, History):
            interrupted += 1
            past.steps, past.acknowledged = history.steps, history.acknowledged
            check_recovery(stopped.crash(rng), past)
    assert interrupted > 500


def test_life_goes_on_after_each_of_many_crashes() -> None:
    rng = Random(7)
    disk, history = new_disk(), History()
    for life in range(60):
        disk.crash_at = rng.randrange(1, 80)
        try:
            run_life(disk, history, seed=life, steps=20)
        except PowerCut:
            disk = disk.crash(rng)
            history.index = history.index.crash(rng)
        disk, history = disk.restart().copy(), survivors(disk, history)
    assert history.acknowledged > 100


def survivors(disk: SimFS, history: History) -> History:
    """Check what is on a disk, and return the history that led there."""
    check_recovery(disk.restart().copy(), history)
    store, _ = open_sim(disk.restart().copy(), history.index.copy())
    done = steps_done(store, history)
    store.close()
    return History(history.steps[:done], done, history.index)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_an_error_of_any_call_loses_nothing(number: int) -> None:
    rng = Random(number)
    refused: Counter[str] = Counter()
    for call in count(1, 3):
        disk, history = new_disk(), History()
        disk.errors = {call: number}
        try:
            run_life(disk, history, seed=22, steps=40)
        except StoreError as error:
            refused[type(error).__name__] += 1
        if disk.calls < call:
            break
        check_recovery(disk.restart().copy(), history.copy())
        check_recovery(disk.crash(rng), history.copy())
    assert refused["StoreClosed" if number == errno.EIO else "DiskFull"] > 0, refused


def test_an_error_of_the_disk_closes_the_store() -> None:
    disk = new_disk()
    history = History()
    store, _ = open_sim(disk, history.index)
    life = Life(store, history, 0)
    life.put()
    disk.errors = {disk.calls + n: errno.EIO for n in range(1, 9)}
    with pytest.raises(StoreClosed, match="the local store failed"):
        life.put()
    disk.errors = {}
    for method in (life.put, store.next_due, lambda: store.due(1, 1), lambda: store.untold(1)):
        with pytest.raises(StoreClosed, match="open it again"):
            method()
    store.close()
    check_recovery(disk.restart().copy(), history)


def test_a_full_disk_takes_outcomes_only_until_there_is_space() -> None:
    disk = new_disk(capacity=20_000)
    history = History()
    store, _ = open_sim(disk, history.index)
    life = Life(store, history, 0)
    with pytest.raises(DiskFull, match="free space"):
        put_much(life)
    assert store.stats().disk_full
    assert store.stats().full
    stored = store.stats().messages
    while due := store.due(STUCK - 1, 10):
        life.settle([Change(one.place, State.ACKED, 1, 0) for one in due])
    assert store.stats().messages < stored
    disk.capacity = 1 << 20
    life.put()
    assert not store.stats().disk_full
    store.close()
    check_recovery(disk.restart().copy(), history)


def put_much(life: Life) -> None:
    for _ in range(100):
        life.put()


def test_a_store_opens_on_a_full_disk_and_takes_outcomes() -> None:
    disk = new_disk(capacity=1 << 20)
    history = History()
    store, _ = open_sim(disk, history.index)
    life = Life(store, history, 0)
    for _ in range(8):
        life.put()
    store.close()
    disk = disk.restart()
    disk.capacity = disk.space("/").size - disk.space("/").free  # others took what was left
    store, _ = open_sim(disk, history.index)
    life = Life(store, history, 0)
    while due := store.due(STUCK - 1, 10):
        life.settle([Change(one.place, State.ACKED, 1, 0) for one in due])
    assert store.stats().disk_full
    assert store.stats().messages == 2  # those that are stuck
    store.close()
    check_recovery(disk.restart().copy(), history)


def test_a_stuck_message_does_not_keep_the_log_from_getting_smaller() -> None:
    disk = new_disk()
    store, _ = open_sim(disk, SimIndex())
    store.put([(message(1, "stuck", body=b"x" * 300), STUCK, FAILURE)])
    largest = 0
    for offset in range(100, 800):
        store.put([(message(offset, body=b"y" * 300), 0, FAILURE)])
        store.record([Change(place(offset), State.ACKED, 1, 0)])
        store.forget([place(offset)])
        largest = max(largest, store.stats().disk_bytes)
    assert store._log.end > 300_000
    assert largest < 4 * SIZES.segment + SIZES.behind + 2_000
    assert store.due(STUCK, 9) == [message(1, "stuck", body=b"x" * 300)]
    files = disk.listdir(f"{PATH}/log")
    assert len(files) <= 8, files
    store.close()


def ack_before_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer.LogWriter, "_sync", lambda self: setattr(self, "synced", self.end))


def index_ahead_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(self: LocalStore) -> None:
        self._freeze_index()
        frozen = self._frozen
        assert frozen is not None
        self._index.commit(frozen, durable=frozen.position)
        self._index.release(frozen)
        self._frozen = None

    monkeypatch.setattr(LocalStore, "_needs_maintenance", lambda _: True)
    monkeypatch.setattr(LocalStore, "_maintain_now", hasty)


def outcomes_forgotten_at_rebuild(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = StoreState.apply

    def forgetful(self: StoreState, record: Record) -> None:
        if record.kind != CHANGED:
            apply(self, record)

    monkeypatch.setattr(StoreState, "apply", forgetful)


def segments_removed_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    removable = Compaction.removable

    def early(self: Compaction, index_position: int) -> list[SegmentInfo]:
        live, self._state.live = self._state.live, {}
        try:
            return removable(self, index_position)
        finally:
            self._state.live = live

    monkeypatch.setattr(Compaction, "removable", early)


def segments_removed_before_it_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(self: Compaction, index_position: int) -> list[SegmentInfo]:
        first = min(self._state.live, default=self._log.segments()[-1].first)
        return self._log.release_before(min(first, index_position))

    monkeypatch.setattr(Compaction, "removable", silent)


def chains_by_due_time(monkeypatch: pytest.MonkeyPatch) -> None:
    store = StoreState.store

    def by_time(self: StoreState, head: StoredHead, *place: int, **how: bool) -> None:
        store(self, head._replace(run=head.due), *place, **how)

    monkeypatch.setattr(StoreState, "store", by_time)


def relocation_forgets_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    replace = StoredHead._replace

    def first_state(self: StoredHead, **changes: Any) -> StoredHead:
        return self if "state" in changes else replace(self, **changes)

    monkeypatch.setattr(StoredHead, "_replace", first_state)


PLANTED = [
    ack_before_fsync,
    index_ahead_of_the_log,
    outcomes_forgotten_at_rebuild,
    segments_removed_too_early,
    segments_removed_before_it_is_noted,
    chains_by_due_time,
    relocation_forgets_the_state,
]


@pytest.mark.parametrize("plant", PLANTED)
def test_the_check_finds_a_planted_bug(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        survive_some_lives()


def survive_some_lives() -> None:
    for seed in SEEDS:
        check_power_cuts(partial(run_life, seed=seed), images=2)
