"""The end of a log: torn tails, zeros written ahead, unfinished segments."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.store.log.harness import (
    DIRECTORY,
    STEP,
    History,
    append,
    closed_log,
    flip,
    flush,
    log_files,
    new_disk,
    open_log,
    opened,
    opened_report,
    opening_error,
    overwrite,
    segment_of,
)
from txmq.store.log.integrity import KnownPositions
from txmq.store.log.log import Log
from txmq.store.log.record import HEADER_SIZE, encode_start
from txmq.store.log.segment import list_segments, segment_path


def test_a_log_cut_at_any_byte_of_its_last_kilobytes_keeps_all_records_before() -> None:
    fs = new_disk()
    log, _ = Log.open(fs, DIRECTORY, now=1, segment_size=1 << 20, preallocate=STEP)
    history, rng = History(), Random(8)
    while log.end < 5_000:
        append(log, history, rng)
        flush(log)
    log.close()
    ends = {64, *(kept.end for kept in history.entries)}
    for size in range(log.end - 4_096, log.end):
        image = fs.copy()
        image.open(segment_path(DIRECTORY, 0), write=True).truncate(size)
        torn = size not in ends
        entries, report = opened(image)
        assert entries == [kept for kept in history.entries if kept.end <= size]
        assert (report.torn is not None, report.end) == (
            torn,
            max(end for end in ends if end <= size),
        )
        assert opened_report(image, KnownPositions()) == replace(report, torn=None)


def test_what_is_cut_is_kept_in_a_copy() -> None:
    fs, history = closed_log()
    last = history.entries[-1]
    flip(fs, last.position + HEADER_SIZE)
    segment = segment_of(fs, last.position)
    damaged = fs.open(segment.path).pread(1 << 20, last.position - segment.first).rstrip(b"\0")
    entries, report = opened(fs)
    assert entries == history.entries[:-1]
    assert report.torn is not None
    assert report.torn[:2] == (last.position, len(damaged))
    assert report.torn.copy == f"{segment.path}.torn-{last.position}"
    assert fs.open(report.torn.copy).pread(1 << 20, 0) == damaged
    assert fs.open(segment.path).size() == last.position - segment.first
    assert opened(fs)[1].torn is None


def test_zeros_written_ahead_are_a_clean_end() -> None:
    fs = new_disk()
    log, _ = open_log(fs)
    history = History()
    append(log, history, Random(1))
    flush(log)
    log.try_space()
    log.close()
    size = fs.open(segment_path(DIRECTORY, 0)).size()
    entries, report = opened(fs)
    assert (entries, report.torn, report.end) == (history.entries, None, log.end)
    assert fs.open(segment_path(DIRECTORY, 0)).size() == size > log.end


def test_a_page_of_zeros_in_durable_data_is_damage() -> None:
    fs = new_disk()
    log, _ = Log.open(fs, DIRECTORY, now=1, segment_size=1 << 20, preallocate=STEP)
    history, rng = History(), Random(4)
    while log.end < 20_000:
        append(log, history, rng)
        flush(log)
    log.try_space()
    log.close()
    overwrite(fs, 8_192, bytes(4_096))
    hit = max(kept.position for kept in history.entries if kept.position <= 8_192)
    assert opening_error(fs).position == hit


def test_a_page_of_zeros_in_unsynced_data_is_a_torn_tail() -> None:
    fs = new_disk()
    log, _ = Log.open(fs, DIRECTORY, now=1, segment_size=1 << 20, preallocate=STEP)
    history, rng = History(), Random(4)
    while log.end < 20_000:
        append(log, history, rng)
        flush(log, sync=log.end < 6_000)
    log.close()
    overwrite(fs, 8_192, bytes(4_096))
    entries, report = opened(fs)
    assert entries == [kept for kept in history.entries if kept.end <= 8_192]
    assert report.torn is not None


def test_a_record_inside_a_torn_one_is_never_read() -> None:
    fs = new_disk()
    log, _ = open_log(fs)
    forged_at = 64 + HEADER_SIZE + 8 + 8
    forged = encode_start(9, forged_at, 1, 64, 5, b"forged")
    log.append(7, b"", bytes(8) + forged + bytes(100), stored_at=5, boot_epoch=1)
    flush(log)
    log.close()
    flip(fs, 64 + HEADER_SIZE)
    entries, report = opened(fs)
    assert (entries, report.end) == ([], 64)


def test_an_older_copy_of_the_last_segment_is_refused_even_among_zeros() -> None:
    fs = new_disk()
    log, _ = open_log(fs)
    history, rng = History(), Random(2)
    log.try_space()
    for _ in range(3):
        append(log, history, rng)
        flush(log)
    older = fs.open(segment_path(DIRECTORY, 0)).pread(1 << 20, 0)
    restored_end = log.end
    for _ in range(3):
        append(log, history, rng)
        flush(log)
    log.close()
    assert log.end < len(older)
    fs.open(segment_path(DIRECTORY, 0), write=True).pwrite([older], 0)
    assert opening_error(fs, KnownPositions(scan_from=log.end)).position == restored_end


def test_an_unfinished_segment_is_removed_but_proves_the_one_before() -> None:
    fs, history = closed_log()
    begun = segment_path(DIRECTORY, history.acknowledged)
    last = list_segments(fs, DIRECTORY)[-1]
    fs.open(last.path, write=True).truncate(history.acknowledged - last.first)
    for content, torn in (
        (b"", False),
        (bytes(64), False),
        (b"TXSEG\0\0\1 and then nothing", True),
    ):
        image = fs.copy()
        image.create(begun).pwrite([content], 0)
        entries, report = opened(image)
        assert (entries, report.unfinished) == (history.entries, begun)
        name = begun.rpartition("/")[2]
        kept = {other: data for other, data in log_files(image).items() if other.startswith(name)}
        assert kept == ({f"{name}.torn-{history.acknowledged}": content} if torn else {})
    fs.create(begun)
    flip(fs, history.entries[-1].position + 9)
    assert opening_error(fs, KnownPositions()).position == history.entries[-1].position


def test_an_unfinished_log_is_created_again() -> None:
    fs = new_disk()
    fs.makedirs(f"{DIRECTORY}/log")
    fs.create(segment_path(DIRECTORY, 0)).pwrite([bytes(10)], 0)
    entries, report = opened(fs)
    assert (entries, report.created, report.end) == ([], True, 64)
