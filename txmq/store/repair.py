"""Accepting a loss: what `txmq log repair` does to a log that refuses to start.

A damaged or missing span is overwritten with records of kind LOST, which say no more
than that something was there. So the log can be read from end to end again, and whoever
folds it comes past the loss and can freeze what the span may have decided. The bytes
that were there are kept in `<segment>.lost-<position>`. A torn tail is no loss:
recovery cuts it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from txmq.store.catalogue import remove_catalogues
from txmq.store.fs import File, FileSystem
from txmq.store.log import lock_directory
from txmq.store.record import LOST, MAX_BODY, encode_start, record_size, start_size
from txmq.store.recovery import Found, find_log, sync_names
from txmq.store.scan import CHUNK, Damage
from txmq.store.segment import SegmentHeader, encode_segment_header, existing_segments
from txmq.store.survey import Known, Surveyor

_SMALLEST = start_size(0)
_LARGEST = record_size(MAX_BODY)


def repair(fs: FileSystem, directory: str, *, durable: int = 0) -> list[Damage]:
    """Overwrite what is damaged in the log of a data directory, and say what that was.

    For the operator, with the broker stopped; takes the directory's lock. `durable` is
    the position that tables or snapshots know the log to have reached. May be
    interrupted and run again. Raises CorruptRecord where the beginning of the log is
    missing: only a backup helps then; StoreError where there is no log.
    """
    existing_segments(fs, directory)  # before the lock, which would make the directory
    lock = lock_directory(fs, directory)
    try:
        segments = existing_segments(fs, directory)
        known = Known(scan_from=segments[0].first, durable=durable)
        found = find_log(fs, directory, known)
        return _repair(fs, directory, found, known) if found else []
    finally:
        lock.release()


def _repair(fs: FileSystem, directory: str, found: Found, known: Known) -> list[Damage]:
    damages: list[Damage] = []
    survey = Surveyor(fs, known, damages.append).survey(found.segments, found.sealed_at)
    if survey.missing:
        damages.append(survey.missing)
    firsts = {segment.path: segment.first for segment in found.segments}
    for damage in damages:
        first = firsts[damage.path]
        with closing(fs.open(damage.path, write=True)) as file:
            _keep_copy(fs, file, first, damage)
            if damage.position == first:
                file.pwrite([encode_segment_header(SegmentHeader(found.log_id, first, 0))], 0)
            else:
                _write_lost(file, first, damage)
            file.fsync()
    if damages:
        remove_catalogues(
            fs, directory
        )  # what takes the place of what is lost may get the same offsets
    sync_names(fs, directory)
    return damages


def _keep_copy(fs: FileSystem, file: File, first: int, damage: Damage) -> None:
    folder, _, name = damage.path.rpartition("/")
    name = f"{name}.lost-{damage.position}"
    if name in fs.listdir(folder):
        return  # repaired before, in part: what that kept is nearer to what was there
    with closing(fs.create(f"{folder}/{name}")) as copy:
        for position in range(damage.position, damage.end, CHUNK):
            data = file.pread(min(CHUNK, damage.end - position), position - first)
            copy.pwrite([data], position - damage.position)
        copy.fsync()


def _write_lost(file: File, first: int, damage: Damage) -> None:
    for position, size in _pieces(damage.position, damage.end):
        start = encode_start(LOST, position, 0, position, 0, b"", bytes(size - _SMALLEST))
        file.pwrite([start], position - first)
        file.write_zeros(position + _SMALLEST - first, size - _SMALLEST)


def _pieces(position: int, end: int) -> Iterator[tuple[int, int]]:
    """A span as the positions and sizes of records: each large enough to be one, none
    larger than one can be.
    """
    while position < end:
        size = min(end - position, _LARGEST)
        if 0 < end - position - size < _SMALLEST:
            size -= _SMALLEST
        yield position, size
        position += size
