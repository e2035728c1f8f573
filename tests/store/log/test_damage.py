"""Recovery of damaged logs: cut, quarantine, refusal. Torn is not corrupt."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google_crc32c import value

from tests.store.log.harness import (
    DIRECTORY,
    LOG_ID,
    History,
    closed_log,
    entry,
    flip,
    log_files,
    new_disk,
    open_log,
    opened,
    opened_report,
    opening_error,
    overwrite,
    segment_of,
)
from tests.store.simfs import SimFS
from txmq.errors import CorruptRecord, StoreError, UnsupportedFormat
from txmq.store.log import integrity
from txmq.store.log.integrity import KnownPositions
from txmq.store.log.log import Log
from txmq.store.log.record import HEADER_SIZE
from txmq.store.log.segment import list_segments, segment_path


def refused_or_last_flush(fs: SimFS, history: History) -> None:
    """Assert that damage is refused, unless nothing later proves the bytes durable."""
    last_flush = {kept.position for kept in history.entries[-2:]}
    for victim in history.entries:
        for position in range(victim.position, victim.end, 7):
            image = fs.copy()
            flip(image, position, 1 << position % 8)
            if victim.position in last_flush:
                assert opened(image, KnownPositions())[0] == [
                    k for k in history.entries if k.position < victim.position
                ]
                assert (
                    opening_error(image, KnownPositions(durable=history.acknowledged)).position
                    == victim.position
                )
            elif position < victim.end - 7:  # else it may be the padding, which holds nothing
                error = opening_error(image, KnownPositions())
                assert (error.position, error.path) == (
                    victim.position,
                    segment_of(image, victim.position).path,
                )


def test_a_flipped_bit_in_durable_data_is_refused() -> None:
    refused_or_last_flush(*closed_log())


def test_the_check_finds_a_recovery_that_cuts_the_damaged_middle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(integrity.IntegrityChecker, "_was_durable", lambda *_: False)
    fs, history = closed_log()
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        refused_or_last_flush(fs, history)


def test_damage_below_the_newest_snapshot_is_quarantined_and_the_rest_served() -> None:
    fs, history = closed_log()
    victims = [history.entries[2], history.entries[11]]
    snapshot = history.entries[20].position
    for victim in victims:
        flip(fs, victim.position + 9)
    log, report = open_log(fs, positions=KnownPositions(0, snapshot, snapshot))
    spans = [(victim.position, victim.end) for victim in victims]
    assert [(damage.position, damage.end) for damage in report.quarantined] == spans
    assert log.quarantined == report.quarantined
    assert [entry(record) for record in log.scan(0)] == [
        kept for kept in history.entries if kept not in victims
    ]
    with pytest.raises(CorruptRecord):
        log.record_at(victims[0].position)


def test_damage_that_reaches_over_the_snapshot_is_refused() -> None:
    fs, history = closed_log()
    victim = history.entries[11]
    flip(fs, victim.position + 9)
    assert (
        opening_error(fs, KnownPositions(0, victim.end - 8, victim.end - 8)).position
        == victim.position
    )


def test_damage_before_the_position_to_read_from_is_not_looked_for() -> None:
    fs, history = closed_log()
    flip(fs, history.entries[2].position + 9)
    begin = history.entries[30].position
    report = opened_report(fs, KnownPositions(begin, begin, begin))
    assert (report.scanned_from, report.records, report.quarantined) == (
        begin,
        len(history.entries) - 30,
        (),
    )


def test_a_sealed_segment_cut_short_is_refused() -> None:
    fs, history = closed_log()
    sealed = list_segments(fs, DIRECTORY)[1]
    for size in (0, 64, 200, sealed.size - 8):
        image = fs.copy()
        image.open(sealed.path, write=True).truncate(size)
        assert sealed.first <= opening_error(image, KnownPositions()).position < sealed.end
        begin = history.entries[-1].position
        assert opening_error(image, KnownPositions(scan_from=begin)).path == sealed.path


def test_a_segment_that_is_missing_is_refused() -> None:
    fs, history = closed_log()
    segments = list_segments(fs, DIRECTORY)
    for missing in segments[1:-1]:
        image = fs.copy()
        image.remove(missing.path)
        assert opening_error(image, KnownPositions()).position == missing.first
        assert (
            opening_error(image, KnownPositions(scan_from=history.entries[-1].position)).position
            == missing.first
        )


def test_a_segment_missing_below_the_snapshot_is_quarantined() -> None:
    fs, history = closed_log()
    _, missing, *_ = list_segments(fs, DIRECTORY)
    fs.remove(missing.path)
    begin = history.entries[-1].position
    log, report = open_log(fs, positions=KnownPositions(begin, begin, begin))
    assert [damage[1:3] for damage in report.quarantined] == [(missing.first, missing.end)]
    with pytest.raises(CorruptRecord):
        log.read(missing.first + 100, 8)
    expected = [k for k in history.entries if not missing.first <= k.position < missing.end]
    assert [entry(record) for record in log.scan(0)] == expected


def test_a_missing_beginning_is_refused() -> None:
    fs, _ = closed_log()
    first, second, *_ = list_segments(fs, DIRECTORY)
    fs.remove(first.path)
    assert opening_error(fs, KnownPositions()).position == 0
    assert opened_report(fs, KnownPositions(scan_from=second.first)).first == second.first


@pytest.mark.parametrize("what", ["scan_from", "snapshot", "durable"])
def test_a_log_known_to_have_lost_its_end_is_refused(what: str) -> None:
    fs, history = closed_log()
    last = list_segments(fs, DIRECTORY)[-1]
    losses: list[Callable[[SimFS], object]] = [
        lambda image: image.remove(last.path),
        lambda image: image.open(last.path, write=True).truncate(0),
        lambda image: image.open(last.path, write=True).truncate(64),
        lambda image: image.open(last.path, write=True).truncate(
            history.entries[-1].position - last.first
        ),
        lambda image: overwrite(image, history.entries[-1].position, bytes(2_000)),
    ]
    for lose in losses:
        image = fs.copy()
        lose(image)
        error = opening_error(image, KnownPositions()._replace(**{what: history.acknowledged}))
        assert last.first <= error.position <= history.entries[-1].position
        assert opened(image, KnownPositions())[0] == [
            k for k in history.entries if k.end <= error.position
        ]


def test_no_log_at_all_is_refused_if_there_was_one() -> None:
    fs, history = closed_log()
    for segment in list_segments(fs, DIRECTORY):
        fs.remove(segment.path)
    assert "the log is missing" in str(
        opening_error(fs, KnownPositions(durable=history.acknowledged))
    )
    assert opened(fs, KnownPositions())[1].created


def test_a_state_position_inside_a_record_is_noticed() -> None:
    fs, history = closed_log()
    inside = history.entries[30].position + 8
    log, report = open_log(fs, positions=KnownPositions(scan_from=inside))
    assert report.scanned_from == segment_of(fs, inside).first + 64
    with pytest.raises(CorruptRecord):
        list(log.scan(inside))


def test_a_damaged_segment_header_is_refused_or_below_the_snapshot_reported() -> None:
    fs, history = closed_log()
    for segment in list_segments(fs, DIRECTORY)[1:]:
        image = fs.copy()
        flip(image, segment.first + 20)
        assert opening_error(image, KnownPositions()).position == segment.first
        begin = history.entries[-1].position
        if segment.first + 64 <= begin:
            entries, report = opened(image, KnownPositions(begin, begin, begin))
            assert [damage[1:3] for damage in report.quarantined] == [
                (segment.first, segment.first + 64)
            ]
            assert entries == history.entries


def test_a_segment_of_another_version_is_refused_unchanged() -> None:
    fs, _ = closed_log()
    for segment in list_segments(fs, DIRECTORY):
        image = fs.copy()
        image.open(segment.path, write=True).pwrite([b"\2"], 12)
        before = log_files(image)
        with pytest.raises(
            UnsupportedFormat, match="format version 2, this txmq knows 1"
        ) as raised:
            open_log(image)
        assert raised.value.path == segment.path
        assert log_files(image) == before


def test_a_record_of_another_version_is_refused_unchanged() -> None:
    fs, history = closed_log()
    for victim in (history.entries[3], history.entries[-1]):
        image = fs.copy()
        segment = segment_of(image, victim.position)
        data = bytearray(
            image.open(segment.path).pread(
                victim.end - victim.position, victim.position - segment.first
            )
        )
        data[8] = 2
        length = int.from_bytes(data[12:16], "little")
        data[4:8] = value(bytes(data[8 : HEADER_SIZE + length])).to_bytes(4, "little")
        overwrite(image, victim.position, bytes(data))
        before = log_files(image)
        with pytest.raises(UnsupportedFormat, match="format version 2"):
            open_log(image)
        assert log_files(image) == before


def test_a_segment_of_another_log_is_refused() -> None:
    fs, _ = closed_log()
    other = new_disk()
    log, _ = Log.open(other, DIRECTORY, now=1)
    assert log.log_id != LOG_ID
    header = other.open(segment_path(DIRECTORY, 0)).pread(64, 0)
    fs.open(segment_path(DIRECTORY, 0), write=True).pwrite([header], 0)
    with pytest.raises(StoreError, match="2 logs"):
        open_log(fs)


def test_a_segment_under_a_wrong_name_is_refused() -> None:
    fs, _ = closed_log()
    last = list_segments(fs, DIRECTORY)[-1]
    fs.rename(last.path, segment_path(DIRECTORY, last.first + 8_000))
    assert "under a wrong name" in str(opening_error(fs, KnownPositions()))


def test_other_files_in_the_directory_are_ignored() -> None:
    fs, history = closed_log()
    fs.create(f"{DIRECTORY}/log/notes.txt").pwrite([b"mine"], 0)
    assert opened(fs)[0] == history.entries
    assert log_files(fs)["notes.txt"] == b"mine"
