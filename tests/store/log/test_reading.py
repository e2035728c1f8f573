"""Reads from an open log, and removal of its oldest segments."""

from __future__ import annotations

import pytest

from tests.store.log.harness import DIRECTORY, entry, filled, flip, new_disk, release_and_remove
from txmq.errors import CorruptRecord, StoreError
from txmq.store.log import decoder, reader
from txmq.store.log.decoder import Damage
from txmq.store.log.log import Log
from txmq.store.log.scrub import durable_spans, scrub


@pytest.mark.parametrize("chunk", [128, 512, 1000, 1 << 20])
def test_records_are_read_whole_wherever_a_chunk_ends(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, history = filled(new_disk())
    monkeypatch.setattr(decoder, "CHUNK", chunk // 8 * 8)
    assert [entry(record) for record in log.scan(0)] == history.entries


def test_reading_may_begin_at_any_record_or_segment() -> None:
    log, history = filled(new_disk())
    for index, begun in enumerate(history.entries):
        assert [entry(record) for record in log.scan(begun.position)] == history.entries[index:]
    for segment in log.segments():
        expected = [kept for kept in history.entries if kept.position > segment.first]
        assert [entry(record) for record in log.scan(segment.first)] == expected
    assert list(log.scan(log.end)) == []


def test_reading_stops_at_what_is_written() -> None:
    log, history = filled(new_disk())
    end = log.end
    appended = log.append(7, b"head", stored_at=5, boot_epoch=1)
    assert [entry(record) for record in log.scan(0)] == history.entries
    for read in (
        lambda: log.record_at(end),
        lambda: log.read(end - 8, 16),
        lambda: list(log.scan(appended.end)),
    ):
        with pytest.raises(StoreError, match="not in the log"):
            read()


def test_a_span_over_several_segments_is_read_in_one() -> None:
    fs = new_disk()
    log, _ = filled(fs)
    segments = log.segments()
    whole = b"".join(fs.open(s.path).pread(s.end - s.first, 0) for s in segments)
    start, length = segments[1].first - 100, segments[3].first - segments[1].first + 120
    assert (
        log.read(start, length) == log.read_cached(start, length) == whole[start : start + length]
    )
    assert log.read(0, log.end) == whole


def test_retention_removes_whole_segments_below_a_position() -> None:
    fs = new_disk()
    log, history = filled(fs)
    segments = log.segments()
    assert release_and_remove(log, segments[2].end - 8) == segments[:2]
    assert (log.first, log.segments()) == (segments[2].first, segments[2:])
    assert fs.listdir(f"{DIRECTORY}/log") == [
        segment.path.rpartition("/")[2] for segment in segments[2:]
    ]
    kept = [kept for kept in history.entries if kept.position > log.first]
    assert [entry(record) for record in log.scan(log.first)] == kept
    with pytest.raises(StoreError, match="not in the log"):
        log.record_at(64)
    with pytest.raises(StoreError, match="not in the log"):
        list(log.scan(0))


def test_only_so_many_files_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    fs = new_disk()
    log, history = filled(fs)
    monkeypatch.setattr(reader, "MAX_OPEN", 2)
    for _ in range(3):
        for kept in history.entries:
            assert entry(log.record_at(kept.position)) == kept
    assert len(log.reader._files) == 2


def scrubbed(log: Log, size: int = 1 << 30) -> list[Damage]:
    """Scrub the whole log; quarantine and return the new damage."""
    position, found = 0, list[Damage]()
    while position < log.durable:
        before = position
        position, some = scrub(log.reader, durable_spans(log), position, size)
        assert position > before
        found += some
    return log.quarantine(found)


def test_a_scrub_in_parts_finds_the_same() -> None:
    fs = new_disk()
    log, history = filled(fs)
    for place in (3, 9, 14):
        flip(fs, history.entries[place].position + 50)
    parts = scrubbed(log, 100)
    assert [damage.position for damage in parts] == [
        history.entries[place].position for place in (3, 9, 14)
    ]


def test_a_scrub_names_and_quarantines_what_has_rotted() -> None:
    fs = new_disk()
    log, history = filled(fs)
    rotten = [history.entries[3], history.entries[9]]
    for victim in rotten:
        flip(fs, victim.position + 50)
    found = scrubbed(log)
    assert [(damage.position, damage.end) for damage in found] == [
        (victim.position, victim.end) for victim in rotten
    ]
    assert [damage.reason for damage in found] == ["checksum mismatch"] * 2
    assert log.quarantined == tuple(found)
    assert scrubbed(log) == []
    assert [entry(record) for record in log.scan(0)] == [
        kept for kept in history.entries if kept not in rotten
    ]
    for read in (log.record_at, lambda position: log.read(position, 10)):
        with pytest.raises(CorruptRecord, match=str(rotten[0].position)):
            read(rotten[0].position)
    with pytest.raises(CorruptRecord):
        log.read(rotten[0].position - 8, 16)


def test_unreported_damage_stops_a_reader() -> None:
    fs = new_disk()
    log, history = filled(fs)
    victim = history.entries[3]
    flip(fs, victim.position + 50)
    with pytest.raises(CorruptRecord, match="checksum mismatch"):
        list(log.scan(0))
    with pytest.raises(CorruptRecord, match="checksum mismatch"):
        log.record_at(victim.position)
    fs.open(log.segments()[1].path, write=True).truncate(100)
    with pytest.raises(CorruptRecord, match="the file ends here"):
        log.read(log.segments()[1].first, 200)


def test_a_file_that_is_cut_while_it_is_read_is_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "CHUNK", 128)
    fs = new_disk()
    log, history = filled(fs)
    records = log.scan(0)
    assert entry(next(records)) == history.entries[0]
    fs.open(log.segments()[0].path, write=True).truncate(400)
    with pytest.raises(CorruptRecord):
        list(records)
