"""Reading a log that nobody has open, without changing anything: where it ends, and
what in it is damaged.

Torn is not corrupt. Records after the last fsync may be there in part, in any order, or
not at all; nobody was told of them, and the log ends before the first bad one. But a
bad record that was durable is damage. What proves that it was:

- a later segment: a segment is on disk before the file of the next one is made;
- a later record whose `durable_before` lies beyond the bad one;
- somebody who stands further: tables or a snapshot of a position beyond it (`Known`).

Looking ahead of a bad record serves this diagnosis alone: no record is ever taken
because it comes after a bad one that was torn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from txmq.store.fs import FileSystem
from txmq.store.record import Record
from txmq.store.scan import Damage, SegmentScan
from txmq.store.segment import HEADER_SIZE, Segment


class Known(NamedTuple):
    """What is known of a log before it is read, as positions; 0 where nothing is.

    `scan_from`: the position that the state to be rolled forward stands for; records
    are read from there. `snapshot`: the position of the newest good snapshot.
    `durable`: any position that the log is known to have reached durably, such as the
    index's.
    """

    scan_from: int = 0
    snapshot: int = 0
    durable: int = 0


@dataclass(slots=True)
class Survey:
    """What was read. `boot_epoch` and `stored_at` are the largest of the `records`, 0
    without any.

    `missing` is the span between the last record and the position that the log is known
    to have reached.
    """

    scanned_from: int
    end: int
    records: int = 0
    boot_epoch: int = 0
    stored_at: int = 0
    missing: Damage | None = None

    def add(self, record: Record) -> None:
        self.end = record.end
        self.records += 1
        self.boot_epoch = max(self.boot_epoch, record.boot_epoch)
        self.stored_at = max(self.stored_at, record.stored_at)


class Surveyor:
    """Reads the segments of one log. `judge` is told of each damage; it may raise, or
    take note and return.
    """

    def __init__(self, fs: FileSystem, known: Known, judge: Callable[[Damage], None]) -> None:
        self._fs = fs
        self._known = known
        self._durable = max(known)
        self._judge = judge

    def survey(self, segments: list[Segment], sealed_at: int | None) -> Survey:
        """Read from `known.scan_from` to the end of the log; of what comes before, look
        at sizes and headers only.

        `sealed_at` is where the last of the segments ends if a file that should have
        become its successor is there.
        """
        bounds = [*(segment.first for segment in segments[1:]), sealed_at]
        start = self._start(segments)
        survey = Survey(start, start)
        for segment, bound in zip(segments, bounds, strict=True):
            if segment.header is None:
                self._judge(
                    Damage(
                        segment.path,
                        segment.first,
                        segment.first + HEADER_SIZE,
                        "damaged segment header",
                    )
                )
            if bound is None:
                self._read_tail(survey, segment)
            elif bound > start:
                self._read_sealed(survey, segment, bound)
            elif bound > segment.end:
                self._judge(Damage(segment.path, segment.end, bound, "the file ends here"))
        if self._durable > survey.end:
            reason = f"the log ends here, but it is known to have reached {self._durable}"
            survey.missing = Damage(segments[-1].path, survey.end, self._durable, reason)
        return survey

    def _start(self, segments: list[Segment]) -> int:
        """Where to begin: at `scan_from` if a record ends there, else at the beginning
        of its segment.

        The zeros written ahead look like a clean end of the log wherever one begins to
        read in them: without this, a log that lost its end, up to a position before
        `scan_from`, would pass for whole.
        """
        position = self._known.scan_from
        segment = next(segment for segment in reversed(segments) if segment.first <= position)
        with self._scan(segment) as scan:
            reached = position % 8 == 0 and scan.ends_at(position)
        return max(position if reached else 0, segment.first + HEADER_SIZE)

    def _read_sealed(self, survey: Survey, segment: Segment, bound: int) -> None:
        with self._scan(segment) as scan:
            for item in scan.walk(survey.end, bound):
                if isinstance(item, Record):
                    survey.add(item)
                else:
                    self._judge(item)
        survey.end = bound

    def _read_tail(self, survey: Survey, segment: Segment) -> None:
        with self._scan(segment) as scan:
            survey.end = max(survey.end, segment.first + HEADER_SIZE)
            for item in scan.walk(survey.end, segment.end):
                if isinstance(item, Record):
                    survey.add(item)
                elif item.end < segment.end and self._was_durable(scan, item, segment.end):
                    self._judge(item)
                    survey.end = item.end
                else:
                    return

    def _was_durable(self, scan: SegmentScan, damage: Damage, bound: int) -> bool:
        later = (item for item in scan.walk(damage.end, bound) if isinstance(item, Record))
        return self._durable > damage.position or any(
            record.durable_before > damage.position for record in later
        )

    @contextmanager
    def _scan(self, segment: Segment) -> Iterator[SegmentScan]:
        file = self._fs.open(segment.path)
        try:
            yield SegmentScan(file, segment.first)
        finally:
            file.close()
