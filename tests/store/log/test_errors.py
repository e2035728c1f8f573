"""Disk errors at every call: the log stops or waits for space, and loses nothing."""

from __future__ import annotations

import errno
from pathlib import Path
from random import Random

import pytest

from tests.store.log.harness import (
    DIRECTORY,
    SEGMENT,
    STEP,
    History,
    append,
    check_recovery,
    entry,
    flush,
    new_disk,
    open_log,
    retain,
    run_workload,
)
from tests.store.simfs import SimFS
from txmq.errors import DiskFull, StoreClosed, StoreError
from txmq.store import filesystem
from txmq.store.filesystem import RealFileSystem
from txmq.store.log.log import Log
from txmq.store.log.segment import list_segments


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_an_error_at_any_call_loses_nothing(number: int) -> None:
    undisturbed = new_disk()
    run_workload(undisturbed, History())
    failed = 0
    for call in range(1, undisturbed.calls + 1):
        fs, history = new_disk(), History()
        fs.errors = {call: number}
        try:
            run_workload(fs, history)
        except StoreError:
            failed += 1
        for seed in range(2):
            check_recovery(fs.crash(Random(seed)), history.copy())
        check_recovery(fs.restart(), history)
    assert failed > undisturbed.calls * 0.9


def failing(fs: SimFS, name: str, number: int, after: int = 0) -> None:
    """Make a call of that name fail: the next one, or a later one."""

    class Errors(dict[int, int]):
        """Chooses the error for the call under way."""

        seen = 0

        def __contains__(self, call: object) -> bool:
            self.seen += fs.trace[-1].startswith(name)
            return fs.trace[-1].startswith(name) and self.seen == after + 1

        def __getitem__(self, call: int) -> int:
            return number

    fs.errors = Errors()


@pytest.mark.parametrize("name", ["pwrite", "fdatasync"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_after_a_failed_write_or_sync_nothing_is_tried_again(name: str, number: int) -> None:
    fs = new_disk()
    log, _ = open_log(fs)
    log.try_space()
    history = History()
    append(log, history, Random(1))
    pending = log.cut()
    assert pending is not None
    failing(fs, name, number)
    with pytest.raises(StoreError):
        log.write(pending)
    calls = fs.calls
    for refused in (
        lambda: log.write(pending),
        log.sync,
        log.try_space,
        lambda: append(log, history, Random(1)),
    ):
        with pytest.raises(StoreClosed, match="failed") as raised:
            refused()
        assert raised.value.hint
    assert fs.calls == calls
    assert (log.complete(pending), log.settle(), log.read_only) == (64, 64, False)


def test_what_was_durable_can_be_read_after_a_failure() -> None:
    fs = new_disk()
    log, _ = open_log(fs)
    history = History()
    append(log, history, Random(1))
    flush(log)
    failing(fs, "fdatasync", errno.EIO)
    append(log, history, Random(2))
    with pytest.raises(StoreError):
        flush(log)
    assert entry(log.record_at(64)) == history.entries[0]


def fill(fs: SimFS, log: Log, history: History) -> None:
    """Append until there is no space."""
    rng = Random(3)
    while not log.read_only:
        append(log, history, rng)
        flush(log)
        assert log.try_space() is not log.read_only


def test_a_full_disk_refuses_records_and_serves_until_there_is_space() -> None:
    fs = new_disk()
    fs.capacity = SEGMENT + STEP
    log, _ = open_log(fs)
    history = History()
    fill(fs, log, history)
    end = log.end
    with pytest.raises(DiskFull, match="no space for the log") as raised:
        append(log, history, Random(1))
    assert raised.value.hint
    assert raised.value.retriable
    assert (log.end, log.durable) == (end, end)
    assert [entry(record) for record in log.scan(0)] == history.entries
    assert not log.try_space()
    fs.capacity = 10 * SEGMENT
    assert log.try_space()
    assert not log.read_only
    append(log, history, Random(1))
    flush(log)
    assert [entry(record) for record in log.scan(0)] == history.entries


@pytest.mark.parametrize("capacity", range(600, 5_000, 400))
def test_a_flush_that_found_no_room_is_given_again(capacity: int) -> None:
    fs = new_disk()
    log, _ = open_log(fs)
    history, rng = History(), Random(capacity)
    fs.capacity = capacity
    for _ in range(40):
        append(log, history, rng)
    pending = log.cut()
    assert pending is not None
    with pytest.raises(DiskFull):
        log.write(pending)
    assert log.read_only
    assert log.complete(pending) <= log.end
    check_recovery(fs.crash(rng), history.copy())
    with pytest.raises(DiskFull):
        append(log, history, rng)
    fs.capacity = None
    log.write(pending)
    assert log.complete(pending) == log.end
    assert log.try_space()
    append(log, history, rng)
    flush(log)
    assert [entry(record) for record in log.scan(0)] == history.entries
    history.acknowledged = log.durable
    check_recovery(fs.crash(rng), history)


def test_a_segment_that_could_not_be_made_is_made_when_there_is_space() -> None:
    fs = new_disk()
    log, _ = open_log(fs)
    log.append(1, b"", bytes(SEGMENT - 200), stored_at=1, boot_epoch=1)
    flush(log)
    log.append(2, b"", bytes(200), stored_at=1, boot_epoch=1)
    pending = log.cut()
    assert pending is not None
    for name in ("create", "pwrite", "fsync", "sync_directory"):
        failing(fs, name, errno.ENOSPC, after=1 if name == "fsync" else 0)
        with pytest.raises(DiskFull):
            log.write(pending)
        assert log.read_only
        assert len(fs.listdir(f"{DIRECTORY}/log")) == 1
    fs.errors = {}
    log.write(pending)
    assert log.complete(pending) == log.end
    assert [record.kind for record in log.scan(0)] == [1, 2]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failed_snapshot_leaves_what_was_there(number: int) -> None:
    failed = 0
    for call in range(1, 40):
        fs = new_disk()
        log, _ = open_log(fs)
        history, rng = History(), Random(call)
        for _ in range(2):
            append(log, history, rng)
            flush(log)
            retain(fs, log, history)
        history.acknowledged = log.durable
        fs.errors = {fs.calls + call: number}
        try:
            retain(fs, log, history)
        except StoreError:
            failed += 1
        fs.errors = {}
        assert [
            name for name in fs.listdir(f"{DIRECTORY}/snapshot") if not name.endswith(".snap")
        ] == []
        check_recovery(fs.crash(rng), history)
    assert failed > 10


def test_a_log_whose_segment_is_deleted_acknowledges_nothing_more() -> None:
    fs = new_disk()
    log, _ = open_log(fs)
    history = History()
    append(log, history, Random(1))
    flush(log)
    durable = log.durable
    [segment] = list_segments(fs, DIRECTORY)
    fs.remove(segment.path)
    append(log, history, Random(2))
    with pytest.raises(StoreError, match="somebody has deleted it"):
        flush(log)
    assert log.durable == durable
    with pytest.raises(StoreClosed):
        append(log, history, Random(3))


@pytest.mark.parametrize("statx", [filesystem._STATX, None, lambda *_: -1])
def test_a_deleted_file_has_no_name_though_another_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statx: object
) -> None:
    monkeypatch.setattr(filesystem, "_STATX", statx)
    fs, path = RealFileSystem(), tmp_path / "file"
    file = fs.create(str(path))
    file.fdatasync()
    path.rename(tmp_path / "moved")
    file.fdatasync()
    (tmp_path / "moved").unlink()
    path.touch()
    with pytest.raises(StoreError, match="somebody has deleted it"):
        file.fdatasync()
    file.close()
