"""Power cuts at every change: nothing is lost, nothing is invented.

The same check must find the bugs planted at the end of this module: a check that stays
green with a planted bug is broken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random

import pytest

from tests.store.log.harness import (
    History,
    check_power_cuts,
    check_recovery,
    new_disk,
    open_log,
    run_workload,
)
from tests.store.simfs import PowerCut, SimFile, SimFS, crash_points
from txmq.store.filesystem import FileSystem
from txmq.store.log import integrity, recovery, segment, writer
from txmq.store.log.log import Log


@pytest.mark.parametrize("seed", range(4))
def test_every_crash_point_of_a_life_keeps_the_promises(seed: int) -> None:
    assert check_power_cuts(partial(run_workload, seed=seed), images=4) > 300


def test_the_workload_leaves_torn_unfinished_and_dropped_segments() -> None:
    seen: Counter[str] = Counter()
    for fs, history in crash_points(new_disk(), partial(run_workload, seed=0), History):
        for seed in range(3):
            _, report = open_log(fs.crash(Random(3 * fs.calls + seed)))
            seen["torn"] += report.torn is not None
            seen["unfinished segment"] += report.unfinished is not None
            seen["segments dropped"] += report.first > 0
            seen["read from a snapshot on"] += (
                report.scanned_from > report.first + segment.HEADER_SIZE
            )
            seen["kept, not acknowledged"] += report.end > history.acknowledged
    assert min(seen.values()) > 0, seen


def test_recovery_may_be_interrupted_at_every_change() -> None:
    interrupted = 0
    for fs, history in crash_points(new_disk(), partial(run_workload, seed=2, steps=12), History):
        image = fs.crash(Random(fs.calls))
        for stopped, _ in crash_points(image, lambda disk, _: open_log(disk)[0].close(), History):
            interrupted += 1
            check_recovery(stopped.crash(Random(interrupted)), history.copy())
    assert interrupted > 500


def test_life_goes_on_after_each_of_many_crashes() -> None:
    rng = Random(11)
    disk, history = new_disk(), History()
    for life in range(100):
        disk.crash_at = rng.randrange(1, 60)
        try:
            run_workload(disk, history, seed=life, steps=8)
        except PowerCut:
            disk = disk.crash(rng)
        check_recovery(disk.restart(), history)
        disk = disk.copy()
    assert history.acknowledged > 50_000
    assert history.dropped > 40_000


def nothing(*_: object) -> None:
    """Stand in for the call that a planted bug leaves out."""


def ack_before_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer.LogWriter, "_sync", lambda self: setattr(self, "synced", self.end))


def no_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    class EqualToAll(int):
        """A checksum that equals every other."""

        __hash__ = int.__hash__

        def __ne__(self, other: object) -> bool:
            return False

    monkeypatch.setattr("txmq.store.log.record.value", lambda _: EqualToAll())


def no_sync_of_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimFS, "sync_directory", nothing)


def no_fsync_after_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    make_durable = recovery._make_durable

    def forgetful(fs: FileSystem, tail: segment.Segment, end: int) -> recovery.TornTail | None:
        with monkeypatch.context() as context:
            context.setattr(SimFile, "fsync", nothing)
            return make_durable(fs, tail, end)

    monkeypatch.setattr(recovery, "_make_durable", forgetful)


def segments_not_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    roll = writer.LogWriter._roll

    def careless(self: writer.LogWriter, run: writer.SegmentWrite) -> None:
        fsync = SimFile.fsync
        with monkeypatch.context() as context:
            context.setattr(
                SimFile, "fsync", lambda file: None if file is self._file else fsync(file)
            )
            roll(self, run)

    monkeypatch.setattr(writer.LogWriter, "_roll", careless)


def torn_tails_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_make_durable", nothing)


def torn_tails_taken_for_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrity.IntegrityChecker, "_was_durable", lambda *_: True)


def snapshots_not_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = SimFile.fsync
    monkeypatch.setattr(
        SimFile, "fsync", lambda self: None if self.path.endswith(".tmp") else fsync(self)
    )


def retention_takes_the_last_snapshots_word(monkeypatch: pytest.MonkeyPatch) -> None:
    release_before = Log.release_before
    monkeypatch.setattr(Log, "release_before", lambda self, _: release_before(self, self.durable))


PLANTED = [
    ack_before_fsync,
    no_checksum,
    no_sync_of_directories,
    no_fsync_after_recovery,
    segments_not_sealed,
    torn_tails_not_cut,
    torn_tails_taken_for_damage,
    snapshots_not_synced,
    retention_takes_the_last_snapshots_word,
]


@pytest.mark.parametrize("plant", PLANTED)
def test_the_check_finds_a_planted_bug(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        survive_some_lives()


def survive_some_lives() -> None:
    for seed in range(4):
        check_power_cuts(partial(run_workload, seed=seed), images=4)
