"""Backups and restores on a simulated disk: power cuts, errors and damage anywhere."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch
from uuid import UUID

import pytest

from tests.store.log.harness import (
    DIRECTORY,
    LOG_ID,
    SEGMENT,
    STEP,
    Entry,
    History,
    append,
    entry,
    flush,
    new_disk,
    open_log,
)
from tests.store.simfs import SimFS, crash_points
from txmq.broker.data_directory.restore import EVERYTHING, restore_log
from txmq.config.broker import BrokerSettings
from txmq.errors import (
    BackupDamaged,
    BackupMismatch,
    DirectoryInUse,
    RestoreUnfinished,
    StoreError,
    TxmqError,
    UnsupportedFormat,
)
from txmq.store import backup as backups
from txmq.store import restore as restores
from txmq.store.backup import BackupReport, LogExtent, back_up, find_damage, verify_files
from txmq.store.backup_manifest import BackupFile, Manifest, read_manifest, write_manifest
from txmq.store.filesystem import File
from txmq.store.log.decoder import SegmentDecoder
from txmq.store.log.log import Log
from txmq.store.log.record import Record
from txmq.store.log.segment import HEADER_SIZE, list_segments
from txmq.store.restore import Until
from txmq.store.snapshot import snapshot_positions, write_snapshot

BACKUP, NEW = "/mnt/backup", "/srv/new"
SETTINGS = BrokerSettings.model_construct(
    data=Path(NEW), segment_bytes=SEGMENT, preallocate_bytes=STEP
)


class Unwatched:
    """A watch that does nothing."""

    def begin(self, total: int) -> None: ...
    def passed(self, read: int) -> None: ...


class HeldLog:
    """The log in `DIRECTORY`, durable up to `durable`, in a backup's eyes."""

    def __init__(self, fs: SimFS, durable: int, *, log_id: object = LOG_ID) -> None:
        self.fs, self.durable, self.log_id = fs, durable, log_id
        self.incarnation: Any = None

    def hold(self, position: int) -> LogExtent:
        assert position == 0
        snapshots = snapshot_positions(self.fs, DIRECTORY)
        return LogExtent(
            self.log_id,  # type: ignore[arg-type]
            self.incarnation,
            tuple(segment.first for segment in list_segments(self.fs, DIRECTORY)),
            self.durable,
            tuple(at for at in snapshots if at <= self.durable),
            5_000,
        )

    def keep_holding(self, position: int) -> None: ...

    def open(self, name: str) -> File:
        return self.fs.open(f"{DIRECTORY}/{name}")


class Disk:
    """A running log of several segments, of which the last records are not durable, and
    what of it is.
    """

    def __init__(self, records: int = 16) -> None:
        self.fs = new_disk()
        self.fs.makedirs("/mnt")
        log, _ = open_log(self.fs)
        self.history, self.rng = History(), Random(7)
        self.grow(log, records)
        self.durable = log.durable
        append(log, self.history, self.rng)
        if pending := log.cut():
            log.write(pending, sync=False)
        self.fs = self.fs.copy()

    def grow(self, log: Log, records: int) -> None:
        for _ in range(records):
            append(log, self.history, self.rng)
            flush(log)

    @property
    def source(self) -> HeldLog:
        return HeldLog(self.fs, self.durable)

    def more(self) -> Disk:
        """Return this disk after the log has grown."""
        log, _ = open_log(self.fs)
        self.grow(log, 9)
        log.close()
        self.durable = log.durable
        self.fs = self.fs.copy()
        return self

    def entries(self, end: int) -> list[Entry]:
        return [one for one in self.history.entries if one.end <= end]


def run_backup(fs: SimFS, durable: int) -> BackupReport:
    return back_up(fs, HeldLog(fs, durable), BACKUP, Unwatched())


def run_restore(fs: SimFS, until: Until = EVERYTHING) -> int:
    restored = restore_log(fs, Path(BACKUP), SETTINGS, Unwatched(), until, now=9_000_000_000)
    return restored.position


def restored_entries(fs: SimFS) -> list[Entry]:
    """Return the records of the restored log; the last one is that of the restore."""
    restores.require_served(fs, NEW)
    log, _ = open_log(fs, NEW)
    found = [entry(record) for record in log.scan(log.first)]
    log.close()
    return found


def manifest(fs: SimFS) -> Manifest:
    found = read_manifest(fs, BACKUP)
    assert found is not None
    return found


def check_backup(fs: SimFS, disk: Disk, ends: set[int]) -> int:
    """Check that a backup, if there is one, is whole and has exactly the records up to
    one of `ends`. Return that; 0 = there is none.
    """
    found = read_manifest(fs, BACKUP)
    if found is None:
        return 0
    assert found.end in ends
    assert verify_files(fs, BACKUP, found.files, Unwatched()) == []
    assert find_damage(fs, BACKUP, found) == []
    assert records_of(fs, found) == disk.entries(found.end)
    return found.end


def records_of(fs: SimFS, made: Manifest) -> list[Entry]:
    found = []
    for first, file in made.segments:
        decoder = SegmentDecoder(fs.open(f"{BACKUP}/{file.name}"), first)
        for item in decoder.scan(first + HEADER_SIZE, first + file.size):
            assert isinstance(item, Record)
            found.append(entry(item))
    return found


@pytest.fixture
def disk() -> Disk:
    return Disk()


def with_backup(disk: Disk) -> SimFS:
    run_backup(disk.fs, disk.durable)
    return disk.fs.copy()


def test_a_backup_has_what_is_durable_and_a_restore_brings_it_back(disk: Disk) -> None:
    report = run_backup(disk.fs, disk.durable)
    assert (report.copied, report.kept) == (disk.durable, 0)
    assert check_backup(disk.fs, disk, {disk.durable}) == disk.durable
    assert run_restore(disk.fs) == disk.durable
    assert restored_entries(disk.fs)[:-1] == disk.entries(disk.durable)


def test_a_later_backup_copies_what_is_new(disk: Disk) -> None:
    first = run_backup(disk.fs, disk.durable)
    disk.more()
    second = run_backup(disk.fs, disk.durable)
    assert second.copied == disk.durable - first.manifest.end
    assert second.kept == first.manifest.end
    assert check_backup(disk.fs, disk, {disk.durable})
    again = run_backup(disk.fs, disk.durable)
    assert (again.copied, again.kept) == (0, disk.durable)


def power_cuts_in_a_backup(disk: Disk, ends: set[int]) -> set[int]:
    """Cut the power at each change of a backup. Return the ends of what is left."""
    left = set()
    cuts = crash_points(disk.fs, lambda fs, _none: run_backup(fs, disk.durable), lambda: None)
    for number, (fs, _none) in enumerate(cuts):
        for image in (fs.crash(Random(number)), fs.restart()):
            left.add(check_backup(image, disk, ends))
            run_backup(image, disk.durable)
            assert check_backup(image, disk, {disk.durable})
            assert [n for n in image.listdir(f"{BACKUP}/log") if n.endswith(".part")] == []
    return left


def test_a_power_cut_at_any_change_of_a_first_backup(disk: Disk) -> None:
    assert power_cuts_in_a_backup(disk, {disk.durable}) == {0, disk.durable}


def test_a_power_cut_at_any_change_of_a_later_backup_leaves_the_earlier_one(disk: Disk) -> None:
    earlier = disk.durable
    disk.fs = with_backup(disk)
    disk.more()
    assert power_cuts_in_a_backup(disk, {earlier, disk.durable}) == {earlier, disk.durable}


def beyond_durable(extent: LogExtent) -> list[tuple[int, int]]:
    firsts = list(extent.firsts)
    return list(zip(firsts, [*firsts[1:], extent.durable + 64], strict=True))


def unsynced(self: Any, *arguments: Any) -> int:
    with (
        patch("tests.store.simfs.SimFile.fsync", lambda _file: None),
        patch("tests.store.simfs.SimFile.fdatasync", lambda _file: None),
    ):
        return int(TRANSFER(self, *arguments))


TRANSFER = backups._Backup._transfer
PLANTED: dict[str, Callable[[], Any]] = {
    "a backup copies behind what is durable": lambda: patch.object(
        backups, "segment_spans", beyond_durable
    ),
    "a manifest is durable before its data": lambda: patch.object(
        backups._Backup, "_transfer", unsynced
    ),
    "an earlier backup is overwritten in place": lambda: patch.object(
        backups._Backup,
        "_extend",
        lambda self, known, source, size: copy_in_place(self, known.name, source, size),
    ),
}


def copy_in_place(self: Any, name: str, source: File, size: int) -> BackupFile:
    path = f"{self._target}/{name}"
    self._fs.remove(path)
    with closing(self._fs.create(path)) as copy:
        return BackupFile(name, size, self._transfer(source, copy, 0, size, 0))


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_of_a_backup_are_found(disk: Disk, bug: str) -> None:
    earlier = disk.durable
    disk.fs = with_backup(disk)
    disk.more()
    log, _ = open_log(disk.fs)
    append(log, disk.history, disk.rng)
    if pending := log.cut():
        log.write(pending, sync=False)
    disk.fs = disk.fs.copy()
    with PLANTED[bug](), pytest.raises((AssertionError, TxmqError)):
        power_cuts_in_a_backup(disk, {earlier, disk.durable})


def errors_in(run: Callable[[SimFS], object], before: SimFS, number: int) -> Iterator[SimFS]:
    """Run with an error at each call in turn; yield the disk after each failure."""
    for call in count(1):
        fs = before.copy()
        fs.errors = {fs.calls + call: number}
        try:
            run(fs)
        except StoreError:
            fs.errors = {}
            yield fs
        else:
            if call > len(fs.trace):
                return
            yield fs  # of a call whose failure does not matter


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_an_error_at_any_call_of_a_backup(disk: Disk, number: int) -> None:
    earlier = disk.durable
    disk.fs = with_backup(disk)
    disk.more()
    for fs in errors_in(lambda fs: run_backup(fs, disk.durable), disk.fs, number):
        assert check_backup(fs, disk, {earlier, disk.durable})
        run_backup(fs, disk.durable)
        assert check_backup(fs, disk, {disk.durable})


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_an_error_at_any_call_of_a_restore(disk: Disk, number: int) -> None:
    refused = 0
    for fs in errors_in(run_restore, with_backup(disk), number):
        with suppress(RestoreUnfinished, StoreError):
            assert restored_entries(fs)[:-1] in ([], disk.entries(disk.durable))
        refused += restores.MARK in fs.listdir(NEW)
        if restores.MARK in fs.listdir(NEW) or not fs.listdir(NEW):
            run_restore(fs)
            assert restored_entries(fs)[:-1] == disk.entries(disk.durable)
    assert refused > 10


def test_a_power_cut_at_any_change_of_a_restore(disk: Disk) -> None:
    """The directory is a broker's only when it is whole, and the restore can be run
    again before.
    """
    before, states = with_backup(disk), set()
    for number, (fs, _none) in enumerate(
        crash_points(before, lambda fs, _none: run_restore(fs), lambda: None)
    ):
        for image in (fs.crash(Random(number)), fs.restart()):
            names = image.listdir(NEW)
            begun = "log" in names and bool(image.listdir(f"{NEW}/log"))
            if begun and restores.MARK not in names:
                assert restored_entries(image)[:-1] == disk.entries(disk.durable)
                states.add("whole")
                continue
            states.add("begun" if begun else "nothing")
            if restores.MARK in names:
                with pytest.raises(RestoreUnfinished, match="txmq log restore"):
                    restores.require_served(image, NEW)
            run_restore(image)
            assert restored_entries(image)[:-1] == disk.entries(disk.durable)
    assert states == {"nothing", "begun", "whole"}


def test_a_restore_ends_at_a_record_before_the_point(disk: Disk) -> None:
    before = with_backup(disk)
    ends = [one.end for one in disk.entries(disk.durable)]
    for end in ends[3::4]:
        for position in (end, min(end + 7, disk.durable)):
            fs = before.copy()
            assert run_restore(fs, Until(position=position)) == end
            assert restored_entries(fs)[:-1] == disk.entries(end)
    fs = before.copy()
    assert run_restore(fs, Until(time=2_005)) == ends[5]  # records are a microsecond apart
    assert restored_entries(fs)[:-1] == disk.entries(ends[5])


@pytest.mark.parametrize(
    "until", [Until(position=10), Until(position=1 << 40), Until(time=1_000), Until(position=0)]
)
def test_a_point_that_the_backup_lacks_is_refused(disk: Disk, until: Until) -> None:
    fs = with_backup(disk)
    with pytest.raises(BackupMismatch, match="it has points from position 0") as raised:
        run_restore(fs, until)
    assert until.time is None or "cannot be restored to 1970-01-01T00:00:00Z" in str(raised.value)
    assert fs.listdir(NEW) == []


def test_a_log_that_begins_later_is_restored_from_its_snapshot(disk: Disk) -> None:
    """To points since the backup began only: before, retention may have removed
    messages.
    """
    log, _ = open_log(disk.fs)
    at = log.durable
    write_snapshot(disk.fs, DIRECTORY, LOG_ID, at, [("t", b"k", b"v")])
    for segment in log.release_before(at)[:2]:
        log.remove(segment)
    disk.grow(log, 3)
    disk.durable = log.durable
    log.close()
    report = run_backup(disk.fs, disk.durable)
    assert (report.manifest.first > 0, report.manifest.points_from) == (True, disk.durable)
    disk.more()
    run_backup(disk.fs, disk.durable)
    with pytest.raises(BackupMismatch):
        run_restore(disk.fs, Until(position=report.manifest.end - 1))
    assert run_restore(disk.fs, Until(position=report.manifest.end)) == report.manifest.end
    assert snapshot_positions(disk.fs, NEW) == [at]


def flip(fs: SimFS, path: str, offset: int) -> None:
    file = fs.open(path, write=True)
    (byte,) = file.pread(1, offset)
    file.pwrite([bytes([byte ^ 4])], offset)


def names_of(fs: SimFS) -> list[str]:
    return [file.name for _first, file in manifest(fs).segments]


def cut_manifest(fs: SimFS) -> None:
    file = fs.open(f"{BACKUP}/backup.json", write=True)
    file.truncate(file.size() - 40)


def newer(fs: SimFS) -> None:
    file = fs.open(f"{BACKUP}/backup.json", write=True)
    text = file.pread(1 << 20, 0).replace(b'"version": 1', b'"version": 9')
    file.pwrite([text], 0)


def swap(fs: SimFS) -> None:
    one, two = (f"{BACKUP}/{name}" for name in names_of(fs)[:2])
    fs.rename(one, f"{BACKUP}/log/x")
    fs.rename(two, one)
    fs.rename(f"{BACKUP}/log/x", two)


DAMAGES: dict[str, tuple[Callable[[SimFS], object], type[TxmqError], str]] = {
    "a flipped bit": (
        lambda fs: flip(fs, f"{BACKUP}/{names_of(fs)[1]}", 200),
        BackupDamaged,
        "checksum mismatch.*make another backup",
    ),
    "a missing segment": (
        lambda fs: fs.remove(f"{BACKUP}/{names_of(fs)[1]}"),
        BackupDamaged,
        "is missing",
    ),
    "another segment in its place": (swap, BackupDamaged, "bytes of|checksum mismatch"),
    "a manifest that is cut off": (cut_manifest, BackupDamaged, "not readable"),
    "a flipped bit in the manifest": (
        lambda fs: flip(fs, f"{BACKUP}/backup.json", 150),
        BackupDamaged,
        "checksum mismatch|not readable",
    ),
    "no manifest": (
        lambda fs: fs.remove(f"{BACKUP}/backup.json"),
        BackupDamaged,
        "there is no whole backup.*txmq log backup",
    ),
    "a later version": (newer, UnsupportedFormat, "version 9"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_backup_is_refused_before_anything_is_written(disk: Disk, damage: str) -> None:
    fs = with_backup(disk)
    spoil, error, text = DAMAGES[damage]
    spoil(fs)
    with pytest.raises(error, match=text):
        run_restore(fs)
    assert fs.listdir(NEW) == []


def test_a_damaged_segment_of_a_backup_is_copied_again(disk: Disk) -> None:
    fs = with_backup(disk)
    names = names_of(fs)
    flip(fs, f"{BACKUP}/{names[0]}", 100)
    flip(fs, f"{BACKUP}/{names[-1]}", 100)
    assert run_backup(fs, disk.durable).mended == (names[0], names[-1])
    assert check_backup(fs, disk, {disk.durable})


def test_a_backup_of_something_else_is_refused(disk: Disk) -> None:
    fs = with_backup(disk)
    other = HeldLog(fs, disk.durable, log_id=UUID(int=5))
    with pytest.raises(BackupMismatch, match=r"the backup is of log.*directory of its own"):
        back_up(fs, other, BACKUP, Unwatched())
    restored = HeldLog(fs, disk.durable)
    restored.incarnation = UUID(int=6)
    with pytest.raises(BackupMismatch, match="incarnation original; this is"):
        back_up(fs, restored, BACKUP, Unwatched())
    with pytest.raises(BackupMismatch, match="an older state"):
        run_backup(fs, disk.durable - 8)
    fs.makedirs("/mnt/data/index")
    with pytest.raises(BackupMismatch, match="'index', which is not of a backup"):
        back_up(fs, HeldLog(fs, disk.durable), "/mnt/data", Unwatched())


def test_two_backups_do_not_share_a_directory(disk: Disk) -> None:
    fs = with_backup(disk)
    fs.lock(f"{BACKUP}/lock")
    with pytest.raises(DirectoryInUse):
        run_backup(fs, disk.durable)


def test_an_older_state_that_has_gone_on_is_refused(disk: Disk) -> None:
    older, earlier = disk.fs.copy(), disk.durable
    fs = with_backup(disk.more())
    log, _ = open_log(older)
    while log.durable <= disk.durable:
        append(log, History(), Random(99))
        flush(log)
    log.close()
    for name in fs.listdir(f"{DIRECTORY}/log"):
        fs.remove(f"{DIRECTORY}/log/{name}")
    for segment in list_segments(older, DIRECTORY):
        with closing(fs.create(segment.path)) as file:
            file.pwrite([older.open(segment.path).pread(1 << 20, 0)], 0)
    assert earlier < disk.durable < log.durable
    with pytest.raises(BackupMismatch, match=r"other records there|the segment|gap|missing"):
        back_up(fs, HeldLog(fs, log.durable), BACKUP, Unwatched())


def test_a_restore_into_a_directory_that_is_not_empty_is_refused(disk: Disk) -> None:
    fs = with_backup(disk)
    with pytest.raises(BackupMismatch, match="empty directory"):
        restore_log(
            fs, Path(BACKUP), SETTINGS.model_copy(update={"data": Path(DIRECTORY)}), Unwatched()
        )


def test_a_manifest_has_the_bytes_of_its_format() -> None:
    fs, made = (
        new_disk(),
        Manifest(
            log_id=LOG_ID,
            incarnation=UUID(int=7),
            first=0,
            end=100,
            points_from=0,
            taken_at=1_800_000_000_000_000,
            made_by="0.1.0",
            files=(BackupFile("log/00000000000000000000.seg", 100, 12345),),
        ),
    )
    fs.makedirs(BACKUP)
    write_manifest(fs, BACKUP, made)
    golden = (Path(__file__).parents[1] / "golden" / "backup-v1.json").read_bytes()
    assert fs.open(f"{BACKUP}/backup.json").pread(1 << 20, 0) == golden
    assert read_manifest(fs, BACKUP) == made
