"""Archived segments: complete in the archive before they leave the log."""

from __future__ import annotations

import errno
from itertools import count
from random import Random

import pytest

from tests.store.log.harness import DIRECTORY, closed_log, opened
from tests.store.simfs import SimFS, crash_points
from txmq.errors import StoreError
from txmq.store.log.archive import archive_segment
from txmq.store.log.segment import SegmentInfo, list_segments

ARCHIVE = "/mnt/cold"


def contents(fs: SimFS, path: str) -> bytes:
    return fs.open(path).pread(1 << 20, 0)


def oldest(fs: SimFS) -> SegmentInfo:
    segment = list_segments(fs, DIRECTORY)[0]
    return SegmentInfo(segment.path, segment.first, segment.end, 0)


def disk() -> SimFS:
    fs, _history = closed_log()
    fs.makedirs("/mnt")
    return fs.copy()


def move(fs: SimFS, _told: object = None) -> None:
    segment = oldest(fs)
    archive_segment(fs, segment, ARCHIVE)
    fs.remove(segment.path)
    fs.sync_directory(f"{DIRECTORY}/log")


def test_a_power_cut_at_any_change_leaves_the_segment_in_one_place_at_least() -> None:
    before = disk()
    first = oldest(before)
    whole = contents(before, first.path)
    places = set()
    for number, (fs, _) in enumerate(crash_points(before, move, list)):
        for image in (fs.crash(Random(number)), fs.restart()):
            found = [
                s.path for s in (*list_segments(image, DIRECTORY), *list_segments(image, ARCHIVE))
            ]
            of_first = [path for path in found if path.endswith(first.path.rpartition("/")[2])]
            assert of_first, "lost"
            assert {contents(image, path) for path in of_first} == {whole}
            places.add(len(of_first))
    assert places == {1, 2}


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_an_error_at_any_call_leaves_the_log_as_it_was_and_the_next_try_succeeds(
    number: int,
) -> None:
    before = disk()
    whole = contents(before, oldest(before).path)
    for call in count(1):
        fs = before.copy()
        segment = oldest(fs)
        fs.errors = {fs.calls + call: number}
        try:
            archive_segment(fs, segment, ARCHIVE)
        except StoreError:
            entries, _report = opened(fs.copy())
            assert entries
            fs.errors = {}
            path = archive_segment(fs, segment, ARCHIVE)
            assert contents(fs, path) == whole
            assert [name for name in fs.listdir(f"{ARCHIVE}/log") if name.endswith(".tmp")] == []
        else:
            assert call > 10
            return


def test_a_segment_of_the_lost_part_of_a_restored_log_is_set_aside() -> None:
    fs = disk()
    segment = oldest(fs)
    for number in (1, 2):
        path = archive_segment(fs, segment, ARCHIVE)
        before = contents(fs, path)
        file = fs.open(segment.path, write=True)
        file.pwrite([b"%d" % number], segment.end - segment.first - 1)
        assert archive_segment(fs, segment, ARCHIVE) == path
        assert contents(fs, path) == contents(fs, segment.path) != before
        assert contents(fs, f"{path}.lost-{number}") == before
    assert len(list_segments(fs, ARCHIVE)) == 1
