"""Repair: the log opens, and reports exactly the accepted loss."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from tests.store.log.harness import (
    DIRECTORY,
    History,
    append,
    closed_log,
    entry,
    flip,
    flush,
    new_disk,
    open_log,
    overwrite,
    segment_of,
)
from tests.store.simfs import SimFS, crash_points
from txmq.errors import CorruptRecord, DirectoryInUse, StoreError
from txmq.store.log import repair as module
from txmq.store.log.decoder import Damage
from txmq.store.log.integrity import KnownPositions
from txmq.store.log.record import LOST
from txmq.store.log.repair import repair
from txmq.store.log.segment import list_segments


def rot(fs: SimFS, history: History) -> None:
    for index in (2, 3, 20):
        flip(fs, history.entries[index].position + 9)


def lose_page(fs: SimFS, history: History) -> None:
    overwrite(fs, history.entries[5].position - 8, bytes(512))


def cut_segment(fs: SimFS, history: History) -> None:
    fs.open(list_segments(fs, DIRECTORY)[1].path, write=True).truncate(500)


def lose_segment(fs: SimFS, history: History) -> None:
    fs.remove(list_segments(fs, DIRECTORY)[1].path)


def lose_end(fs: SimFS, history: History) -> None:
    fs.remove(list_segments(fs, DIRECTORY)[-1].path)


def lose_header(fs: SimFS, history: History) -> None:
    flip(fs, list_segments(fs, DIRECTORY)[1].first + 3)


LOSSES = [rot, lose_page, cut_segment, lose_segment, lose_end, lose_header]


@pytest.mark.parametrize("lose", LOSSES)
def test_a_log_that_refused_to_open_opens_and_names_what_is_lost(
    lose: Callable[[SimFS, History], None],
) -> None:
    fs, history = closed_log()
    lose(fs, history)
    known = KnownPositions(durable=history.acknowledged)
    with pytest.raises(CorruptRecord):
        open_log(fs, positions=known)
    damages = repair(fs, DIRECTORY, durable=history.acknowledged)
    assert damages
    log, report = open_log(fs.crash(Random(1)), positions=known)
    assert (report.torn, report.quarantined, report.end) == (None, (), history.acknowledged)
    records = list(log.scan(0))
    lost = [record for record in records if record.kind == LOST]
    assert [entry(record) for record in records if record.kind != LOST] == [
        kept for kept in history.entries if not overlaps(kept.position, kept.end, damages)
    ]
    assert [(record.position, record.end) for record in lost] == [
        (damage.position, damage.end) for damage in damages if lose is not lose_header
    ]
    assert repair(fs, DIRECTORY, durable=history.acknowledged) == []
    append(log, History(), Random(1))
    flush(log)


def overlaps(position: int, end: int, damages: list[Damage]) -> bool:
    return any(position < damage.end and damage.position < end for damage in damages)


@pytest.mark.parametrize("lose", LOSSES)
def test_repair_may_be_interrupted_at_every_change(lose: Callable[[SimFS, History], None]) -> None:
    fs, history = closed_log()
    lose(fs, history)
    whole = fs.copy()
    repair(whole, DIRECTORY, durable=history.acknowledged)
    expected = contents(whole, history)
    for stopped, _ in crash_points(
        fs, lambda image, _: repair(image, DIRECTORY, durable=history.acknowledged), History
    ):
        image = stopped.crash(Random(stopped.calls))
        repair(image, DIRECTORY, durable=history.acknowledged)
        assert contents(image, history) == expected


def contents(fs: SimFS, history: History) -> list[tuple[int, int, int]]:
    log, _ = open_log(fs, positions=KnownPositions(durable=history.acknowledged))
    return [(record.kind, record.position, record.end) for record in log.scan(0)]


def test_what_was_damaged_is_kept_in_a_copy() -> None:
    fs, history = closed_log()
    victim = history.entries[2]
    flip(fs, victim.position + 9)
    segment = segment_of(fs, victim.position)
    damaged = fs.open(segment.path).pread(
        victim.end - victim.position, victim.position - segment.first
    )
    (damage,) = repair(fs, DIRECTORY)
    assert damage[:4] == (segment.path, victim.position, victim.end, "checksum mismatch")
    assert fs.open(f"{segment.path}.lost-{victim.position}").pread(10_000, 0) == damaged


def test_a_long_span_becomes_several_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LARGEST", 400)
    fs, history = closed_log()
    lose_segment(fs, history)
    (damage,) = repair(fs, DIRECTORY)
    log, _ = open_log(fs)
    lost = [record for record in log.scan(0) if record.kind == LOST]
    assert len(lost) > 3
    assert (lost[0].position, lost[-1].end) == (damage.position, damage.end)
    assert all(56 <= record.end - record.position <= 400 for record in lost)


def test_a_torn_tail_is_no_loss() -> None:
    fs, history = closed_log()
    flip(fs, history.entries[-1].position + 9)
    assert repair(fs, DIRECTORY) == []
    _, report = open_log(fs)
    assert report.torn is not None


def test_a_whole_or_locked_log_is_not_changed_and_none_is_created() -> None:
    fs, _ = closed_log()
    before = fs.trace.copy()
    assert repair(fs, DIRECTORY) == []
    assert not [
        call
        for call in fs.trace[len(before) :]
        if call.startswith(("pwrite", "create", "truncate"))
    ]
    empty = new_disk()
    with pytest.raises(StoreError, match="there is no log"):
        repair(empty, DIRECTORY)
    assert empty.listdir(DIRECTORY) == []
    open_log(fs)
    with pytest.raises(DirectoryInUse):
        repair(fs, DIRECTORY)
