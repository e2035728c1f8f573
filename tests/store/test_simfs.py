"""The simulated disk loses exactly what a real one may lose."""

from __future__ import annotations

import errno
from random import Random

import pytest

from tests.store.simfs import PowerCut, SimFS, crash_points
from txmq.errors import DiskFull, StoreError

IMAGES = 200


def disk_with(content: bytes) -> SimFS:
    """Return a disk with one durable file, `/a`."""
    fs = SimFS()
    file = fs.create("/a")
    file.pwrite([content], 0)
    file.fsync()
    fs.sync_directory("/")
    return fs


def images(fs: SimFS) -> list[SimFS]:
    return [fs.crash(Random(seed)) for seed in range(IMAGES)]


def left(fs: SimFS, path: str = "/a") -> set[bytes]:
    return {image.open(path).pread(10_000, 0) for image in images(fs)}


def test_what_was_synced_stays() -> None:
    assert left(disk_with(b"durable")) == {b"durable"}


def test_a_write_that_was_not_synced_may_be_lost_kept_or_torn_at_sectors() -> None:
    fs = disk_with(b"a" * 1024)
    fs.open("/a", write=True).pwrite([b"b" * 1024], 0)
    old, new = b"a" * 512, b"b" * 512
    assert left(fs) == {old + old, new + new, old + new, new + old}


def test_writes_are_not_kept_in_order() -> None:
    fs = disk_with(b"a" * 1024)
    file = fs.open("/a", write=True)
    file.pwrite([b"1"], 0)
    file.pwrite([b"2"], 600)
    assert any(image[:1] == b"a" and image[600:601] == b"2" for image in left(fs))


def test_the_length_may_be_lost_and_a_cut_undone() -> None:
    fs = disk_with(b"a" * 600)
    file = fs.open("/a", write=True)
    file.truncate(100)
    file.pwrite([b"b"], 700)
    assert {len(image) for image in left(fs)} >= {600, 100, 701}
    file.fdatasync()
    assert left(fs) == {b"a" * 100 + bytes(600) + b"b"}


def test_names_need_a_sync_of_their_directory() -> None:
    fs = disk_with(b"x")
    file = fs.create("/new")
    file.pwrite([b"y"], 0)
    file.fsync()
    fs.rename("/a", "/b")
    assert {tuple(image.listdir("/")) for image in images(fs)} == {
        ("a",),
        ("a", "new"),
        ("b",),
        ("b", "new"),
    }
    fs.sync_directory("/")
    assert {tuple(image.listdir("/")) for image in images(fs)} == {("b", "new")}


def test_a_directory_needs_a_sync_of_the_one_above() -> None:
    fs = SimFS()
    fs.makedirs("/x/y")
    fs.sync_directory("/x")
    assert {tuple(image.listdir("/")) for image in images(fs)} == {(), ("x",)}


def test_what_an_fsync_failed_to_write_is_lost_to_the_next_one_too() -> None:
    fs = disk_with(b"old")
    file = fs.open("/a", write=True)
    file.pwrite([b"new"], 0)
    fs.errors = {fs.calls + 1: errno.EIO}
    with pytest.raises(StoreError, match="Input/output error"):
        file.fsync()
    file.fsync()
    assert file.pread(3, 0) == b"new"
    assert b"old" in left(fs)


def test_the_death_of_the_process_alone_keeps_the_page_cache_and_the_doubt() -> None:
    fs = disk_with(b"old")
    fs.lock("/lock")
    fs.open("/a", write=True).pwrite([b"new"], 0)
    again = fs.restart()
    assert again.open("/a").pread(3, 0) == b"new"
    assert left(again) == {b"old", b"new"}
    again.lock("/lock")


def test_a_full_disk_stores_the_part_that_fits() -> None:
    fs = SimFS(capacity=10)
    file = fs.create("/a")
    file.pwrite([b"123456"], 0)
    with pytest.raises(DiskFull):
        file.pwrite([b"abcdefgh"], 4)
    assert file.pread(100, 0) == b"1234abcdef"
    file.pwrite([b"over"], 0)
    fs.capacity = None
    file.pwrite([b"more"], 10)
    assert file.size() == 14


def test_the_power_fails_in_each_change_in_turn() -> None:
    def run(fs: SimFS, done: list[str]) -> None:
        file = fs.create("/b")
        done.append("create")
        try:
            file.pwrite([b"x"], 0)
            done.append("write")
            file.size()
            file.fsync()
            done.append("sync")
        finally:
            file.close()

    histories = [(fs.trace, done) for fs, done in crash_points(disk_with(b""), run, list)]
    assert histories == [
        (["create /b"], []),
        (["create /b", "pwrite /b"], ["create"]),
        (["create /b", "pwrite /b", "size /b", "fsync /b"], ["create", "write"]),
    ]


def test_a_machine_without_power_does_nothing_more() -> None:
    fs = SimFS(crash_at=1)
    for _ in range(2):
        with pytest.raises(PowerCut):
            fs.create("/a")
    assert fs.calls == 1
