"""Snapshots: round trips, checks from end to end, retention of two."""

from __future__ import annotations

from pathlib import Path
from random import Random
from uuid import UUID, uuid4

import pytest

from tests.store.log.harness import DIRECTORY, LOG_ID
from tests.store.simfs import SimFS
from txmq.errors import CorruptRecord, UnsupportedFormat
from txmq.store import snapshot as module
from txmq.store.filesystem import FileSystem, RealFileSystem
from txmq.store.snapshot import Row, newest_snapshot, read_rows, write_snapshot

GOLDEN = Path(__file__).parents[1] / "golden" / "snapshot-v1.snap"
GOLDEN_POSITION = 4_160
ROWS = [("topics", b"\0\1", b"first"), ("topics", b"\0\2", b""), ("groups", b"g", b"\xff" * 20)]


def bad_snapshots(fs: FileSystem, directory: str) -> list[str]:
    """Return the snapshots that were set aside as damaged."""
    return [
        f"{directory}/snapshot/{name}"
        for name in fs.listdir(f"{directory}/snapshot")
        if name.endswith(".bad")
    ]


def disk() -> SimFS:
    fs = SimFS()
    fs.makedirs(DIRECTORY)
    return fs


def rows_of(fs: SimFS, log_id: UUID = LOG_ID) -> list[Row] | None:
    snapshot = newest_snapshot(fs, DIRECTORY, log_id)
    return list(read_rows(fs, snapshot)) if snapshot else None


def names(fs: SimFS) -> list[str]:
    return fs.listdir(f"{DIRECTORY}/snapshot")


def test_rows_come_back_in_order() -> None:
    fs = disk()
    path = write_snapshot(fs, DIRECTORY, LOG_ID, 4_160, iter(ROWS))
    snapshot = newest_snapshot(fs, DIRECTORY, LOG_ID)
    assert snapshot is not None
    assert (snapshot.path, snapshot.position, snapshot.log_id, snapshot.rows) == (
        path,
        4_160,
        LOG_ID,
        3,
    )
    assert list(read_rows(fs, snapshot)) == ROWS


def test_a_state_of_many_blocks_or_of_nothing_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK_SIZE", 100)
    rng = Random(1)
    many = [
        (table, rng.randbytes(9), rng.randbytes(rng.randrange(300)))
        for table in "abc"
        for _ in range(50)
    ]
    fs = RealFileSystem()
    for position, rows in ((64, many), (128, [])):
        write_snapshot(fs, str(tmp_path), LOG_ID, position, rows)
        snapshot = newest_snapshot(fs, str(tmp_path), LOG_ID)
        assert snapshot is not None
        assert list(read_rows(fs, snapshot)) == rows


def test_the_format_is_the_one_in_the_golden_file() -> None:
    fs = disk()
    path = write_snapshot(fs, DIRECTORY, LOG_ID, GOLDEN_POSITION, ROWS)
    assert fs.open(path).pread(1_000, 0) == GOLDEN.read_bytes()


def test_the_newest_two_are_kept() -> None:
    fs = disk()
    for position in (64, 800, 900, 10_000):
        write_snapshot(fs, DIRECTORY, LOG_ID, position, [("t", b"k", b"%d" % position)])
    assert names(fs) == ["00000000000000000900.snap", "00000000000000010000.snap"]
    assert rows_of(fs) == [("t", b"k", b"10000")]


def test_there_is_none_at_first() -> None:
    assert newest_snapshot(disk(), DIRECTORY, LOG_ID) is None


def test_the_rest_of_an_interrupted_snapshot_is_removed_by_the_next() -> None:
    fs = disk()
    fs.makedirs(f"{DIRECTORY}/snapshot")
    fs.create(f"{DIRECTORY}/snapshot/00000000000000000064.snap.tmp")
    assert newest_snapshot(fs, DIRECTORY, LOG_ID) is None
    write_snapshot(fs, DIRECTORY, LOG_ID, 128, ROWS)
    assert names(fs) == ["00000000000000000128.snap"]


def damaged(change: bytes | None, at: int, *, cut: int | None = None) -> SimFS:
    """Return a disk with a good snapshot and a newer, damaged one."""
    fs = disk()
    write_snapshot(fs, DIRECTORY, LOG_ID, 64, [("t", b"k", b"older")])
    file = fs.open(write_snapshot(fs, DIRECTORY, LOG_ID, GOLDEN_POSITION, ROWS), write=True)
    if change is not None:
        file.pwrite([change], at)
    if cut is not None:
        file.truncate(cut)
    return fs


def test_a_damaged_snapshot_is_set_aside_for_the_older_one() -> None:
    golden = GOLDEN.read_bytes()
    for bit in range(len(golden) * 8):
        at = bit // 8
        fs = damaged(bytes([golden[at] ^ 1 << bit % 8]), at)
        if 8 * 8 < bit < 12 * 8:
            with pytest.raises(UnsupportedFormat):
                newest_snapshot(fs, DIRECTORY, LOG_ID)
            assert len(names(fs)) == 2
        else:
            assert rows_of(fs) == [("t", b"k", b"older")]
            assert bad_snapshots(fs, DIRECTORY) == [
                f"{DIRECTORY}/snapshot/{GOLDEN_POSITION:020}.snap.bad"
            ]


def test_a_cut_zeroed_or_too_long_snapshot_is_set_aside() -> None:
    size = len(GOLDEN.read_bytes())
    losses = [damaged(None, 0, cut=length) for length in range(size)]
    losses += [damaged(bytes(size - at), at) for at in range(0, size, 8)]
    losses += [damaged(b"more", size)]
    for fs in losses:
        assert rows_of(fs) == [("t", b"k", b"older")]
        assert len(bad_snapshots(fs, DIRECTORY)) == 1


def test_without_a_good_snapshot_all_are_set_aside() -> None:
    fs = damaged(b"x", 100)
    fs.open(f"{DIRECTORY}/snapshot/{64:020}.snap", write=True).truncate(10)
    assert rows_of(fs) is None
    assert len(bad_snapshots(fs, DIRECTORY)) == 2


def test_a_snapshot_of_another_log_or_name_is_not_used() -> None:
    fs = disk()
    path = write_snapshot(fs, DIRECTORY, uuid4(), 64, ROWS)
    assert rows_of(fs) is None
    fs.rename(f"{path}.bad", f"{DIRECTORY}/snapshot/{128:020}.snap")
    assert rows_of(fs) is None
    assert len(bad_snapshots(fs, DIRECTORY)) == 1


def test_damage_after_the_check_stops_the_reading() -> None:
    fs = damaged(None, 0)
    snapshot = newest_snapshot(fs, DIRECTORY, LOG_ID)
    assert snapshot is not None
    fs.open(snapshot.path, write=True).pwrite([b"x"], 90)
    with pytest.raises(CorruptRecord, match="checksum mismatch"):
        list(read_rows(fs, snapshot))
