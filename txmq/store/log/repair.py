"""Acceptance of a loss: `txmq log repair`, for a log that refuses to start.

Repair overwrites each damaged or missing span with records of kind LOST. The log can
then be read from end to end, and its fold can freeze the transactions that the span may
have decided. The former bytes are kept in `<segment>.lost-<position>`. A torn tail is
no loss: recovery cuts it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from txmq.store.catalogue.catalogue import remove_catalogues
from txmq.store.filesystem import File, FileSystem
from txmq.store.log.decoder import CHUNK, Damage
from txmq.store.log.integrity import IntegrityChecker, KnownPositions
from txmq.store.log.log import lock_directory
from txmq.store.log.record import LOST, MAX_BODY, encode_start, record_size, start_size
from txmq.store.log.recovery import FoundLog, find_log, sync_names
from txmq.store.log.segment import SegmentHeader, encode_segment_header, existing_segments

_SMALLEST = start_size(0)
_LARGEST = record_size(MAX_BODY)


def repair(fs: FileSystem, directory: str, *, durable: int = 0) -> list[Damage]:
    """Overwrite the damaged spans of a log, and return them.

    The broker must be stopped: repair takes the directory's lock. `durable` is a
    position that the log is known to have reached. Repair may be interrupted and run
    again. Raises CorruptRecord where the beginning of the log is missing (only a backup
    helps then), and StoreError where there is no log.
    """
    existing_segments(fs, directory)  # before the lock, which would create the directory
    lock = lock_directory(fs, directory)
    try:
        return repair_locked(fs, directory, durable=durable)
    finally:
        lock.release()


def repair_locked(fs: FileSystem, directory: str, *, durable: int) -> list[Damage]:
    """Do as `repair` does, where the caller holds the directory's lock."""
    segments = existing_segments(fs, directory)
    positions = KnownPositions(scan_from=segments[0].first, durable=durable)
    log = find_log(fs, directory, positions)
    return _repair(fs, directory, log, positions) if log else []


def _repair(
    fs: FileSystem, directory: str, log: FoundLog, positions: KnownPositions
) -> list[Damage]:
    damages: list[Damage] = []
    integrity = IntegrityChecker(fs, positions, damages.append).check(log.segments, log.sealed_at)
    if integrity.missing:
        damages.append(integrity.missing)
    firsts = {segment.path: segment.first for segment in log.segments}
    for damage in damages:
        first = firsts[damage.path]
        with closing(fs.open(damage.path, write=True)) as file:
            _copy_lost(fs, file, first, damage)
            if damage.position == first:
                file.pwrite([encode_segment_header(SegmentHeader(log.log_id, first, 0))], 0)
            else:
                _write_lost(file, first, damage)
            file.fsync()
    if damages:
        # New messages may get offsets of lost ones, which catalogues still name.
        remove_catalogues(fs, directory)
    sync_names(fs, directory)
    return damages


def _copy_lost(fs: FileSystem, file: File, first: int, damage: Damage) -> None:
    folder, _, name = damage.path.rpartition("/")
    name = f"{name}.lost-{damage.position}"
    if name in fs.listdir(folder):
        return  # an interrupted repair kept it: that copy is the older one
    with closing(fs.create(f"{folder}/{name}")) as copy:
        for position in range(damage.position, damage.end, CHUNK):
            data = file.pread(min(CHUNK, damage.end - position), position - first)
            copy.pwrite([data], position - damage.position)
        copy.fsync()


def _write_lost(file: File, first: int, damage: Damage) -> None:
    for position, size in _record_spans(damage.position, damage.end):
        start = encode_start(LOST, position, 0, position, 0, b"", bytes(size - _SMALLEST))
        file.pwrite([start], position - first)
        file.write_zeros(position + _SMALLEST - first, size - _SMALLEST)


def _record_spans(position: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield a span as the positions and sizes of records, each of a possible size."""
    while position < end:
        size = min(end - position, _LARGEST)
        if 0 < end - position - size < _SMALLEST:
            size -= _SMALLEST
        yield position, size
        position += size
