"""Check of a closed log without changes: find its end and its damage.

Torn is not corrupt. Records after the last fsync may exist in part, in any order, or
not at all. They were never acknowledged, and the log ends before the first bad one. A
bad record that was durable is damage. Any of these proves that it was durable:

- a later segment: a segment is on disk before the file of the next one is created;
- a later record whose `durable_before` is beyond the bad one;
- tables or a snapshot of a position beyond the bad record (`KnownPositions`).

Records after a bad one serve this diagnosis only. None is accepted after a torn one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from txmq.store.filesystem import FileSystem
from txmq.store.log.decoder import Damage, SegmentDecoder
from txmq.store.log.record import LOST, Record
from txmq.store.log.segment import HEADER_SIZE, Segment


class KnownPositions(NamedTuple):
    """Positions known of a log before it is read; 0 = unknown.

    `scan_from`: position of the state that is to be rolled forward; records are read
    from there. `snapshot`: position of the newest good snapshot. `durable`: any
    position that the log is known to have reached durably, such as the index's.
    """

    scan_from: int = 0
    snapshot: int = 0
    durable: int = 0


@dataclass(slots=True)
class IntegrityReport:
    """The result of a check.

    `boot_epoch` and `stored_at` are the largest of the `records`, 0 without any.
    `missing` is the span between the last record and the position that the log is known
    to have reached. `lost` are the spans (position, end) that a repair gave up.
    """

    scanned_from: int
    end: int
    records: int = 0
    boot_epoch: int = 0
    stored_at: int = 0
    missing: Damage | None = None
    lost: list[tuple[int, int]] = field(default_factory=list)

    def add_record(self, record: Record) -> None:
        self.end = record.end
        self.records += 1
        self.boot_epoch = max(self.boot_epoch, record.boot_epoch)
        self.stored_at = max(self.stored_at, record.stored_at)
        if record.kind == LOST:
            start = record.position
            if self.lost and self.lost[-1][1] == start:  # one span, as several records
                start = self.lost.pop()[0]
            self.lost.append((start, record.end))


class IntegrityChecker:
    """Reader of a log's segments; `on_damage` gets each damage, and may raise."""

    def __init__(
        self, fs: FileSystem, positions: KnownPositions, on_damage: Callable[[Damage], None]
    ) -> None:
        self._fs = fs
        self._positions = positions
        self._durable = max(positions)
        self._on_damage = on_damage

    def check(self, segments: list[Segment], sealed_at: int | None) -> IntegrityReport:
        """Read the records from `positions.scan_from` to the end of the log.

        Of earlier segments only sizes and headers are checked. `sealed_at` is the end
        of the last segment if an unfinished file of its successor exists.
        """
        bounds = [*(segment.first for segment in segments[1:]), sealed_at]
        start = self._start(segments)
        report = IntegrityReport(start, start)
        for segment, bound in zip(segments, bounds, strict=True):
            if segment.header is None:
                self._on_damage(
                    Damage(
                        segment.path,
                        segment.first,
                        segment.first + HEADER_SIZE,
                        "damaged segment header",
                    )
                )
            if bound is None:
                self._read_tail(report, segment)
            elif bound > start:
                self._read_sealed(report, segment, bound)
            elif bound > segment.end:
                self._on_damage(Damage(segment.path, segment.end, bound, "the file ends here"))
        if self._durable > report.end:
            reason = f"the log ends here, but it is known to have reached {self._durable}"
            report.missing = Damage(segments[-1].path, report.end, self._durable, reason)
        return report

    def _start(self, segments: list[Segment]) -> int:
        """Return `scan_from` if a record ends there, else the start of its segment.

        Zeros written ahead look like a clean end of the log wherever reading begins.
        Without this check, a log that lost its end down to a position before
        `scan_from` would seem to be whole.
        """
        position = self._positions.scan_from
        segment = next(segment for segment in reversed(segments) if segment.first <= position)
        with self._decoder(segment) as decoder:
            valid = position % 8 == 0 and decoder.record_ends_at(position)
        return max(position if valid else 0, segment.first + HEADER_SIZE)

    def _read_sealed(self, report: IntegrityReport, segment: Segment, bound: int) -> None:
        with self._decoder(segment) as decoder:
            for item in decoder.scan(report.end, bound):
                if isinstance(item, Record):
                    report.add_record(item)
                else:
                    self._on_damage(item)
        report.end = bound

    def _read_tail(self, report: IntegrityReport, segment: Segment) -> None:
        with self._decoder(segment) as decoder:
            report.end = max(report.end, segment.first + HEADER_SIZE)
            for item in decoder.scan(report.end, segment.end):
                if isinstance(item, Record):
                    report.add_record(item)
                elif item.end < segment.end and self._was_durable(decoder, item, segment.end):
                    self._on_damage(item)
                    report.end = item.end
                else:
                    return

    def _was_durable(self, decoder: SegmentDecoder, damage: Damage, bound: int) -> bool:
        later = (item for item in decoder.scan(damage.end, bound) if isinstance(item, Record))
        return self._durable > damage.position or any(
            record.durable_before > damage.position for record in later
        )

    @contextmanager
    def _decoder(self, segment: Segment) -> Iterator[SegmentDecoder]:
        file = self._fs.open(segment.path)
        try:
            yield SegmentDecoder(file, segment.first)
        finally:
            file.close()
