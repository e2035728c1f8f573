"""Copies of another node's log on a simulated disk: interrupted, damaged, outdated."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from uuid import UUID

import pytest

from tests.store.log.harness import (
    DIRECTORY,
    LOG_ID,
    Entry,
    History,
    append,
    entry,
    flip,
    flush,
    new_disk,
    open_log,
)
from tests.store.simfs import SimFS, crash_points
from txmq.errors import BackupMismatch, CorruptRecord, RestoreUnfinished
from txmq.store import log_copy
from txmq.store.backup import LogExtent
from txmq.store.filesystem import ReadableFile
from txmq.store.log.log import Log, lock_directory
from txmq.store.log.scrub import durable_spans, scrub
from txmq.store.log.segment import list_segments
from txmq.store.log_copy import ForeignCopy, copy_log, is_unfinished, mend
from txmq.store.restore import require_served
from txmq.store.snapshot import (
    newest_snapshot,
    remove_snapshots,
    snapshot_positions,
    write_snapshot,
)

ROWS = [("meta", b"place", b"there")]


class Unwatched:
    """A watch that does nothing."""

    def begin(self, total: int) -> None: ...
    def passed(self, read: int) -> None: ...


class Leader:
    """A node with a log of several segments, and a snapshot within the last one."""

    def __init__(self, records: int = 16) -> None:
        self.fs, self.history, self.rng = new_disk(), History(), Random(7)
        self.log_id, self.holds = LOG_ID, 0
        self.log, _ = open_log(self.fs)
        self.grow(records)

    def grow(self, records: int = 9) -> None:
        for _ in range(records):
            append(self.log, self.history, self.rng)
            flush(self.log)
        write_snapshot(self.fs, DIRECTORY, LOG_ID, self.log.durable, ROWS)

    def hold(self, position: int) -> LogExtent:
        del position
        self.holds += 1
        firsts = tuple(segment.first for segment in self.log.segments())
        snapshots = tuple(snapshot_positions(self.fs, DIRECTORY))
        return LogExtent(self.log_id, None, firsts, self.log.durable, snapshots, 5_000)

    def keep_holding(self, position: int) -> None: ...

    def open(self, name: str) -> ReadableFile:
        return self.fs.open(f"{DIRECTORY}/{name}")


@pytest.fixture
def leader() -> Leader:
    return Leader()


def copy(fs: SimFS, leader: Leader, keep: int = 0) -> int:
    lock = lock_directory(fs, DIRECTORY)
    try:
        return copy_log(fs, leader, DIRECTORY, Unwatched(), keep)
    finally:
        lock.release()


def entries(log: Log) -> list[Entry]:
    return [entry(record) for record in log.scan(log.first)]


def check(fs: SimFS, leader: Leader) -> None:
    """Check that a directory has the leader's log and its newest snapshot."""
    require_served(fs, DIRECTORY)
    log, report = open_log(fs)
    assert entries(log) == [one for one in leader.history.entries if one.position >= log.first]
    assert (report.torn, log.log_id) == (None, LOG_ID)
    log.close()
    snapshot = newest_snapshot(fs, DIRECTORY, LOG_ID)
    assert snapshot is not None
    assert snapshot.position == leader.log.durable


def content(fs: SimFS) -> dict[str, bytes]:
    """Return the files of the log."""
    return {one.path: fs.open(one.path).pread(one.size, 0) for one in list_segments(fs, DIRECTORY)}


def out_of_date(leader: Leader) -> tuple[SimFS, int]:
    """Return the disk of a node with an earlier state of the log, and where it ends.

    Behind that it has what never counted.
    """
    fs, end = leader.fs.copy(), leader.log.durable
    leader.grow()
    log, _ = open_log(fs)
    for _ in range(5):
        append(log, History(), Random(99))
        flush(log)
    log.close()
    return fs, end


def test_an_empty_directory_gets_the_log_and_its_newest_snapshot(leader: Leader) -> None:
    fs = new_disk()
    assert copy(fs, leader) == leader.log.durable
    check(fs, leader)


@pytest.mark.parametrize("start", ["empty", "out of date"])
def test_a_copy_that_is_interrupted_anywhere_goes_on_at_another_node(start: str) -> None:
    leader, other = Leader(), Leader()
    disk, keep = new_disk(), 0
    if start != "empty":
        disk, keep = out_of_date(leader)
        other.grow()
    cuts = crash_points(disk, lambda fs, _none: copy(fs, leader, keep), lambda: None)
    unfinished = 0
    for number, (fs, _none) in enumerate(cuts):
        for image in (fs.crash(Random(number)), fs.restart()):
            if is_unfinished(image, DIRECTORY):
                unfinished += 1
                with pytest.raises(RestoreUnfinished, match="has not finished"):
                    require_served(image, DIRECTORY)
            copy(image, other, keep)
            check(image, other)
            check(image.crash(Random(number)), other)
    assert unfinished > 10


def test_a_copy_goes_on_from_what_the_directory_has(leader: Leader) -> None:
    fs, end = out_of_date(leader)
    read = len(fs.trace)
    copy(fs, leader, end)
    check(fs, leader)
    [kept, *_] = list_segments(fs, DIRECTORY)
    assert f"create {kept.path}" not in fs.trace[read:]


def test_what_never_counted_is_not_taken_for_the_log(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs, end = out_of_date(leader)
    planted = fs.copy()
    copy(fs, leader, end)
    check(fs, leader)
    monkeypatch.setattr(log_copy, "min", lambda whole, _keep: whole, raising=False)
    with pytest.raises(ForeignCopy):
        copy(planted, leader, end)


def test_a_damaged_log_is_copied_from_the_damage_on(leader: Leader) -> None:
    fs = leader.fs.copy()
    flip(fs, leader.history.entries[5].position + 40)
    copy(fs, leader, leader.log.durable)
    check(fs, leader)


def test_the_log_of_others_is_left_as_it_is(leader: Leader) -> None:
    fs = leader.fs.copy()
    before = content(fs)
    leader.log_id = UUID(int=5)
    with pytest.raises(ForeignCopy, match="the nodes have log"):
        copy(fs, leader, leader.log.durable)
    assert content(fs) == before


def test_a_log_that_has_more_or_other_records_than_the_leaders_is_left_as_it_is(
    leader: Leader,
) -> None:
    fs, _end = out_of_date(leader)
    before, end = content(fs), log_copy._whole_end(fs, DIRECTORY)
    with pytest.raises(ForeignCopy, match="does not have"):
        copy(fs, leader, end)
    with pytest.raises(ForeignCopy, match="does not have"):
        copy(fs, Leader(3), end)
    assert content(fs) == before
    assert not is_unfinished(fs, DIRECTORY)


def meanwhile(leader: Leader, does: Callable[[], None]) -> None:
    """Have something happen while the log is copied: before it is held again."""
    hold, held = leader.hold, [0]

    def held_again(position: int) -> LogExtent:
        held[0] += 1
        if held[0] == 3:
            does()
        return hold(position)

    leader.hold = held_again  # type: ignore[method-assign]


def test_a_log_that_grows_meanwhile_is_copied_up_to_its_snapshot(leader: Leader) -> None:
    meanwhile(leader, leader.grow)
    fs = new_disk()
    assert copy(fs, leader) == leader.log.durable
    check(fs, leader)


def test_a_copy_begins_anew_where_the_others_have_removed_what_comes_next(leader: Leader) -> None:
    fs, end = out_of_date(leader)
    leader.grow(20)
    for segment in leader.log.release_before(leader.log.durable):
        leader.log.remove(segment)
    assert leader.log.first > end
    copy(fs, leader, end)
    check(fs, leader)


def test_damage_of_the_leader_is_not_taken_over(leader: Leader) -> None:
    fs = new_disk()
    whole = leader.fs.copy()
    flip(leader.fs, leader.history.entries[5].position + 40)
    with pytest.raises(CorruptRecord, match="the node that leads has it so"):
        copy(fs, leader)
    assert is_unfinished(fs, DIRECTORY)
    leader.fs = whole
    copy(fs, leader)
    check(fs, leader)


def test_a_log_without_a_snapshot_is_waited_for(leader: Leader) -> None:
    fs = new_disk()
    remove_snapshots(leader.fs, DIRECTORY)
    with pytest.raises(BackupMismatch, match="no snapshot yet"):
        copy(fs, leader)
    write_snapshot(leader.fs, DIRECTORY, LOG_ID, leader.log.durable, ROWS)
    copy(fs, leader)
    check(fs, leader)


def test_damage_of_a_copy_is_mended_with_what_the_leader_has(leader: Leader) -> None:
    fs = leader.fs.copy()
    log, _ = open_log(fs)
    for at in (3, 4, 9):
        flip(fs, leader.history.entries[at].position + 40)
    spans = durable_spans(log)
    _end, found = scrub(log.reader, spans, log.first, leader.log.durable)
    assert len(log.quarantine(found)) == 2  # two of the records are neighbours
    assert mend(fs, leader, DIRECTORY, found, Unwatched()) == found
    log.trust(found)
    assert (entries(log), log.quarantined) == (leader.history.entries, ())
    log.close()
    assert content(fs.crash(Random(1))) == content(leader.fs)


def test_damage_that_the_leader_has_too_or_has_removed_stays(leader: Leader) -> None:
    flip(leader.fs, leader.history.entries[5].position + 40)
    fs = leader.fs.copy()
    log, _ = open_log(fs)
    _end, found = scrub(log.reader, durable_spans(log), log.first, leader.log.durable)
    assert len(found) == 1
    assert mend(fs, leader, DIRECTORY, found, Unwatched()) == []
    for segment in leader.log.release_before(leader.log.durable):
        leader.log.remove(segment)
    assert mend(fs, leader, DIRECTORY, found, Unwatched()) == []
    leader.log_id = UUID(int=5)
    with pytest.raises(ForeignCopy):
        mend(fs, leader, DIRECTORY, found, Unwatched())
    log.close()
