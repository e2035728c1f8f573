"""A random workload on a log, and a check of the log's promises.

The promises: everything that was acknowledged, or served after a recovery, is there.
Nothing else is there. Order and positions are kept. Recovery succeeds, and a second
recovery finds the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import NamedTuple
from uuid import UUID

import pytest

from tests.store.simfs import SimFS, crash_points
from txmq.errors import CorruptRecord, TxmqError
from txmq.store.filesystem import FileSystem
from txmq.store.log.integrity import KnownPositions
from txmq.store.log.log import Log
from txmq.store.log.record import Record, split_body
from txmq.store.log.recovery import RecoveryReport
from txmq.store.log.segment import Segment, SegmentInfo, list_segments, read_log_id
from txmq.store.snapshot import newest_snapshot, read_rows, write_snapshot

DIRECTORY = "/srv/data"
LOG_ID = UUID("00112233-4455-6677-8899-aabbccddeeff")
SEGMENT, STEP = 2048, 1024


class Entry(NamedTuple):
    """A record that the workload appended."""

    position: int
    end: int
    kind: int
    head: bytes
    attachment: bytes


@dataclass
class History:
    """The appended entries, the acknowledged position, and the newest snapshot.

    `dropped` bounds what retention may remove.
    """

    entries: list[Entry] = field(default_factory=list)
    acknowledged: int = 0
    snapshot: int = 0
    dropped: int = 0

    def copy(self) -> History:
        return replace(self, entries=list(self.entries))


def new_disk() -> SimFS:
    fs = SimFS()
    fs.makedirs("/srv")
    return fs.copy()


def known_positions(fs: FileSystem, directory: str = DIRECTORY) -> KnownPositions:
    """Return what a broker without an index knows at start: its newest snapshot."""
    log_id = read_log_id(fs, directory)
    snapshot = newest_snapshot(fs, directory, log_id) if log_id else None
    return KnownPositions(snapshot.position, snapshot.position) if snapshot else KnownPositions()


def open_log(
    fs: FileSystem, directory: str = DIRECTORY, positions: KnownPositions | None = None
) -> tuple[Log, RecoveryReport]:
    return Log.open(
        fs,
        directory,
        now=1_000,
        positions=positions or known_positions(fs, directory),
        segment_size=SEGMENT,
        preallocate=STEP,
        new_log_id=lambda: LOG_ID,
    )


def append(log: Log, history: History, rng: Random) -> None:
    """Append a record of a random size, every tenth one large."""
    head = rng.randbytes(rng.randrange(40))
    attachment = rng.randbytes(rng.choice((0, 0, 24, 100, 900 if rng.random() < 0.3 else 300)))
    kind = rng.randrange(1, 255)
    at = log.append(kind, head, attachment, stored_at=2_000 + len(history.entries), boot_epoch=1)
    history.entries.append(Entry(at.position, at.end, kind, head, attachment))


def flush(log: Log, *, sync: bool = True) -> None:
    """Write the appended records."""
    if pending := log.cut():
        log.write(pending, sync=sync)
        log.complete(pending)


def entry(record: Record) -> Entry:
    body = split_body(record)
    return Entry(record.position, record.end, record.kind, bytes(body.head), bytes(body.attachment))


def filled(fs: FileSystem, directory: str = DIRECTORY) -> tuple[Log, History]:
    """Return a durable log of more than three segments, two records to a flush."""
    log, _ = open_log(fs, directory)
    history, rng = History(), Random(5)
    for _ in range(20):
        append(log, history, rng)
        append(log, history, rng)
        flush(log)
    assert len(log.segments()) > 3
    return log, history


def segment_of(fs: FileSystem, position: int) -> Segment:
    return next(s for s in reversed(list_segments(fs, DIRECTORY)) if s.first <= position)


def overwrite(fs: FileSystem, position: int, data: bytes) -> None:
    """Overwrite bytes of the log past an open log."""
    segment = segment_of(fs, position)
    fs.open(segment.path, write=True).pwrite([data], position - segment.first)


def flip(fs: FileSystem, position: int, bit: int = 4) -> None:
    """Flip a bit of the log."""
    segment = segment_of(fs, position)
    (byte,) = fs.open(segment.path).pread(1, position - segment.first)
    overwrite(fs, position, bytes([byte ^ bit]))


def closed_log() -> tuple[SimFS, History]:
    """Return a disk with a cleanly closed log of several segments."""
    fs = new_disk()
    log, history = filled(fs)
    log.close()
    history.acknowledged = log.end
    return fs.copy(), history


def opened(fs: SimFS, what: KnownPositions | None = None) -> tuple[list[Entry], RecoveryReport]:
    log, report = open_log(fs, positions=what)
    entries = [entry(record) for record in log.scan(log.first)]
    log.close()
    return entries, report


def opened_report(fs: SimFS, what: KnownPositions) -> RecoveryReport:
    log, report = open_log(fs, positions=what)
    log.close()
    return report


def log_files(fs: SimFS) -> dict[str, bytes]:
    folder = f"{DIRECTORY}/log"
    return {name: fs.open(f"{folder}/{name}").pread(1 << 20, 0) for name in fs.listdir(folder)}


def opening_error(fs: SimFS, what: KnownPositions | None = None) -> CorruptRecord:
    """Return the error of opening; assert that the disk is unchanged."""
    before = log_files(fs)
    with pytest.raises(CorruptRecord) as raised:
        open_log(fs, positions=what)
    assert log_files(fs) == before
    assert "txmq log repair" in raised.value.hint
    return raised.value


def run_workload(fs: SimFS, history: History, *, seed: int = 1, steps: int = 14) -> None:
    """Run one life of a broker: appends, flushes, rolls, snapshots, retention."""
    rng = Random(seed)
    log, _ = open_log(fs)
    wanted = 0  # position from which zeros are written
    for _ in range(steps):
        for _ in range(rng.randrange(1, 4)):
            append(log, history, rng)
        if rng.random() < 0.2:
            flush(log, sync=False)
            if rng.random() < 0.5:
                log.sync()
                log.settle()
        else:
            flush(log)
        history.acknowledged = log.durable
        if log.end >= wanted and rng.random() < 0.7:
            log.try_space()
            wanted = log.end + STEP // 2
        if rng.random() < 0.15:
            retain(fs, log, history)
    log.close()


def retain(fs: SimFS, log: Log, history: History) -> None:
    """Write a snapshot and drop the segments below the one before."""
    older, newer = history.snapshot, log.durable
    write_snapshot(fs, DIRECTORY, log.log_id, newer, snapshot_rows(newer))
    history.snapshot = newer
    history.dropped = older
    release_and_remove(log, older)


def release_and_remove(log: Log, position: int) -> list[SegmentInfo]:
    """Release, remove and return the segments below a position."""
    released = log.release_before(position)
    for segment in released:
        log.remove(segment)
    return released


def snapshot_rows(position: int) -> list[tuple[str, bytes, bytes]]:
    return [(table, b"key", b"%d" % position) for table in ("one", "two")]


def recover_entries(fs: SimFS) -> tuple[list[Entry], RecoveryReport, int]:
    """Open the log; return its entries, the report and its durable position."""
    try:
        what = known_positions(fs)
        log, report = open_log(fs, positions=what)
    except TxmqError as error:
        raise AssertionError(f"a power cut left what cannot be opened: {error}") from error
    entries = [entry(record) for record in log.scan(log.first)]
    log.close()
    return entries, report, log.durable


def check_recovery(fs: SimFS, history: History) -> None:
    """Open the log that a crash left, compare it with the history, and adopt it."""
    entries, report, durable = recover_entries(fs)
    expected = [entry for entry in history.entries if entry.position >= report.first]
    assert entries == expected[: len(entries)], "invented"
    assert all(entry.end > history.acknowledged for entry in expected[len(entries) :]), "lost"
    assert report.first <= history.dropped, "dropped too much"
    assert durable == report.end >= history.acknowledged
    check_snapshot(fs, history)
    again, second, _ = recover_entries(fs)
    assert (again, second.end, second.torn, second.unfinished) == (entries, report.end, None, None)
    history.entries, history.acknowledged = entries, durable


def check_snapshot(fs: SimFS, history: History) -> None:
    snapshot = newest_snapshot(fs, DIRECTORY, LOG_ID)
    assert (snapshot.position if snapshot else 0) >= history.snapshot, "the snapshot is lost"
    if snapshot:
        assert list(read_rows(fs, snapshot)) == snapshot_rows(snapshot.position)


def check_power_cuts(run: Callable[[SimFS, History], None], *, images: int) -> int:
    """Cut the power at every call of `run`, and check several possible disks each time.

    Returns the number of checked disks. Then let only the process die, recover and
    serve, and cut the power after that.
    """
    checked = 0
    for call, (fs, history) in enumerate(crash_points(new_disk(), run, History)):
        rng = Random(call)
        for _ in range(images):
            check_recovery(fs.crash(rng), history.copy())
            checked += 1
        killed = fs.restart()
        check_recovery(killed, history)
        check_recovery(killed.crash(rng), history)
    return checked
