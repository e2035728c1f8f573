"""The open log: positions, flushes, segments, reads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from tests.store.log.harness import (
    DIRECTORY,
    SEGMENT,
    STEP,
    Entry,
    History,
    append,
    entry,
    filled,
    flush,
    new_disk,
    open_log,
    release_and_remove,
)
from tests.store.simfs import SimFS
from txmq.errors import DirectoryInUse, StoreClosed, StoreError
from txmq.store.filesystem import RealFileSystem
from txmq.store.log.log import Appended, Log, lock_directory
from txmq.store.log.segment import HEADER_SIZE, segment_path
from txmq.testing.wait import PATIENCE_S


def put(
    log: Log,
    head: bytes = b"head",
    attachment: bytes | memoryview = b"",
    *,
    stored_at: int = 5,
    boot_epoch: int = 1,
) -> Appended:
    """Append a record of kind 7."""
    return log.append(7, head, attachment, stored_at=stored_at, boot_epoch=boot_epoch)


def test_a_record_comes_back_as_it_was_appended() -> None:
    log, report = open_log(new_disk())
    assert (report.created, report.end, log.first, log.end, log.durable) == (True, 64, 0, 64, 64)
    at = put(log, b"head", b"attached", stored_at=17, boot_epoch=3)
    flush(log)
    record = log.record_at(at.position)
    assert record[:5] == (7, 64, 3, 64, 17)
    assert entry(record) == Entry(64, at.end, 7, b"head", b"attached")
    assert (
        log.read(at.attachment_position, 8)
        == log.read_cached(at.attachment_position, 8)
        == b"attached"
    )
    assert (log.end, log.durable) == (at.end, at.end)


def test_append_touches_no_disk_and_copies_no_bytes() -> None:
    fs = new_disk()
    log, _ = open_log(fs)
    calls, attachment = fs.calls, bytes(800)
    for _ in range(10):
        put(log, b"head", attachment)
    pending = log.cut()
    assert fs.calls == calls
    assert pending is not None
    assert sum(buffer is attachment for run in pending.writes for buffer in run.buffers) == 10
    written = sum(run.end - run.start for run in pending.writes)
    assert written == log.end - 64 - HEADER_SIZE * (len(pending.writes) - 1)


def test_an_attachment_may_be_a_view_and_of_any_length() -> None:
    log, _ = open_log(new_disk())
    places = [put(log, b"h", memoryview(bytes(range(20)))[:length]) for length in range(20)]
    flush(log)
    assert [entry(record).attachment for record in log.scan(0)] == [
        bytes(range(length)) for length in range(20)
    ]
    assert {place.attachment_position % 8 for place in places} == {0}


def test_nothing_is_durable_before_done() -> None:
    log, _ = open_log(new_disk())
    at = put(log)
    pending = log.cut()
    assert pending is not None
    assert log.cut() is None
    log.write(pending)
    assert (log.durable, log.end) == (64, at.end)
    assert log.complete(pending) == log.durable == at.end


def test_done_tells_of_its_own_flush_only() -> None:
    log, _ = open_log(new_disk())
    ends, flushes = [], []
    for _ in range(2):
        ends.append(put(log).end)
        flushes.append(log.cut())
    for pending in flushes:
        assert pending is not None
        log.write(pending)
    assert [log.complete(pending) for pending in flushes if pending] == ends


def test_an_asynchronous_write_is_durable_after_the_next_sync() -> None:
    log, _ = open_log(new_disk())
    at = put(log)
    flush(log, sync=False)
    assert log.durable == 64
    assert entry(log.record_at(at.position)).head == b"head"
    log.sync()
    assert log.durable == 64
    assert log.settle() == log.durable == at.end


def test_a_record_tells_what_was_durable_before_it() -> None:
    log, _ = open_log(new_disk())
    first = put(log)
    put(log)
    flush(log)
    put(log)
    flush(log)
    assert [record.durable_before for record in log.scan(0)] == [64, 64, first.end + first.end - 64]


def test_a_record_that_does_not_fit_begins_a_segment() -> None:
    log, _ = open_log(new_disk())
    largest = SEGMENT - HEADER_SIZE - 56
    exactly = put(log, b"", bytes(largest))
    small = put(log, b"")
    assert exactly.end == SEGMENT
    assert small.position == SEGMENT + HEADER_SIZE
    flush(log)
    assert [(s.first, s.end, s.created_at) for s in log.segments()] == [
        (0, SEGMENT, 1_000),
        (SEGMENT, small.end, 5),
    ]
    assert [record.position for record in log.scan(0)] == [64, SEGMENT + HEADER_SIZE]


def test_a_record_too_large_for_a_segment_is_refused_whole() -> None:
    log, _ = open_log(new_disk())
    put(log)
    end = log.end
    with pytest.raises(StoreError, match="bytes exceeds the log's limit of 1984") as raised:
        put(log, b"", bytes(SEGMENT))
    assert raised.value.hint
    assert log.end == end
    flush(log)
    assert put(log).position == end


def test_a_log_opened_again_goes_on_where_it_ended() -> None:
    fs = new_disk()
    log, history = filled(fs)
    log.close()
    again, report = open_log(fs)
    assert (report.created, report.log_id, report.end) == (False, log.log_id, log.end)
    assert (report.records, report.boot_epoch, report.torn) == (len(history.entries), 1, None)
    assert [segment.created_at for segment in again.segments()] == [
        segment.created_at for segment in log.segments()
    ]
    append(again, history, Random(1))
    flush(again)
    assert [entry(record) for record in again.scan(0)] == history.entries


def test_a_smaller_segment_size_holds_from_the_next_record_on() -> None:
    fs = new_disk()
    log, _ = Log.open(fs, DIRECTORY, now=1, segment_size=1 << 20, preallocate=STEP)
    for _ in range(50):
        put(log, b"", bytes(100))
    flush(log)
    log.close()
    again, _ = open_log(fs)
    put(again)
    flush(again)
    assert [record.position for record in again.scan(0)][-1] == log.end + HEADER_SIZE


def test_retention_leaves_the_last_segment_and_what_is_not_durable() -> None:
    log, _ = filled(new_disk())
    durable, segments = log.durable, log.segments()
    for _ in range(4):
        put(log, b"", bytes(1000))
    assert release_and_remove(log, log.end) == segments[:-1]
    assert log.segments()[0] == segments[-1]._replace(end=durable)


def test_zeros_written_ahead_leave_writes_nothing_to_prepare() -> None:
    fs = new_disk()
    log, _ = open_log(fs)
    log.try_space()
    calls = fs.calls
    put(log)
    flush(log)
    path = segment_path(DIRECTORY, 0)
    assert fs.trace[calls:] == [f"pwrite {path}", f"fdatasync {path}"]
    assert fs.open(path).size() == 64 + STEP


def extensions(log: Log, fs: SimFS, writes: int) -> list[int]:
    """Return the sizes that the first segment had while small records were written."""
    sizes = list[int]()
    for _ in range(writes):
        put(log)
        flush(log)
        sizes.append(fs.open(segment_path(DIRECTORY, 0)).size())
    return sizes


def test_a_small_write_adds_zeros_for_those_that_follow() -> None:
    fs = new_disk()
    log, _ = Log.open(fs, DIRECTORY, now=1, segment_size=1 << 20, preallocate=64 << 10)
    sizes = extensions(log, fs, 100)
    assert log.end < sizes[-1] <= log.end + (4 << 10)
    assert len(set(sizes)) <= 3


def test_zeros_are_fewer_where_the_disk_is_slow_but_not_in_each_sync() -> None:
    fs = new_disk()
    log, _ = Log.open(fs, DIRECTORY, now=1, segment_size=1 << 20, preallocate=64 << 10)
    log.limit_zeros(512)
    sizes = extensions(log, fs, 100)
    assert log.end <= sizes[-1] <= log.end + 1024
    assert 4 <= len(set(sizes)) < 10


def test_a_large_write_adds_no_zeros() -> None:
    fs = new_disk()
    log, _ = Log.open(fs, DIRECTORY, now=1, segment_size=1 << 20, preallocate=64 << 10)
    put(log, b"", bytes(4 << 10))
    flush(log)
    assert fs.open(segment_path(DIRECTORY, 0)).size() == log.end


def test_a_segment_is_cut_to_its_size_when_the_next_begins() -> None:
    fs = new_disk()
    log, _ = open_log(fs)
    log.try_space()
    for _ in range(3):
        put(log, b"", bytes(900))
        log.try_space()
        flush(log)
    first, second = log.segments()
    assert fs.open(first.path).size() == first.end - first.first < SEGMENT
    assert fs.open(second.path).size() >= second.end - second.first


def test_two_cannot_open_one_directory(tmp_path: Path) -> None:
    for fs, directory in ((new_disk(), DIRECTORY), (RealFileSystem(), str(tmp_path))):
        log, _ = open_log(fs, directory)
        with pytest.raises(DirectoryInUse) as raised:
            open_log(fs, directory)
        assert raised.value.hint
        log.close()
        open_log(fs, directory)[0].close()


def test_a_lock_that_was_given_is_released_by_close_but_not_by_a_failure() -> None:
    fs = new_disk()
    lock = lock_directory(fs, DIRECTORY)
    Log.open(fs, DIRECTORY, now=1, lock=lock)[0].close()
    lock = lock_directory(fs, DIRECTORY)
    fs.open(segment_path(DIRECTORY, 0), write=True).pwrite([b"\2"], 12)
    with pytest.raises(StoreError):
        Log.open(fs, DIRECTORY, now=1, lock=lock)
    with pytest.raises(DirectoryInUse):
        lock_directory(fs, DIRECTORY)
    lock.release()
    with pytest.raises(StoreError):
        Log.open(fs, DIRECTORY, now=1)
    lock_directory(fs, DIRECTORY).release()


def test_a_closed_log_refuses() -> None:
    log, _ = open_log(new_disk())
    put(log)
    pending = log.cut()
    assert pending is not None
    log.close()
    log.close()
    for refused in (lambda: put(log), lambda: log.write(pending), log.sync, log.try_space):
        with pytest.raises(StoreClosed, match="is closed"):
            refused()


def test_writes_and_reads_run_in_threads_beside_appends(tmp_path: Path) -> None:
    log, _ = open_log(RealFileSystem(), str(tmp_path))
    history, rng = History(), Random(2)

    def read_along() -> None:
        for _ in range(200):
            served = log.durable
            found = [entry(record) for record in log.scan(0) if record.end <= served]
            assert found == [kept for kept in list(history.entries) if kept.end <= served]

    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(read_along)
        for _ in range(150):
            append(log, history, rng)
            pending = log.cut()
            assert pending is not None
            writing = pool.submit(log.write, pending)
            append(log, history, rng)
            writing.result(PATIENCE_S)
            log.complete(pending)
        reading.result(PATIENCE_S)
    flush(log)
    assert [entry(record) for record in log.scan(0)] == history.entries
    log.close()
