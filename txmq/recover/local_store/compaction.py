"""Compaction of a store's log: segments that are no longer needed go.

A segment is needed while it has the record of a message. Segments go from the oldest
on, so a message that is stuck for long is stored again at the end of the log, once the
log is much larger than what is stored: at most twice as large, and two segments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.crashpoints import crashpoint
from txmq.errors import StoreError
from txmq.recover.local_store.opening import is_bad_sector, is_damage, store_entry
from txmq.recover.local_store.records import (
    ENTRY,
    RELEASED,
    STORED,
    LyingRecord,
    decode_stored,
    encode_released,
    encode_stored,
)
from txmq.recover.local_store.values import State
from txmq.store.log.decoder import Damage
from txmq.store.log.record import Record, split_body

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from txmq.recover.local_store.group_commit import GroupCommit
    from txmq.recover.local_store.state import StoreState
    from txmq.recover.local_store.values import Place
    from txmq.store.log.segment import SegmentInfo

STEP = 1 << 20  # bytes that are read at once
PACE = 3  # bytes read for each byte that the log has grown by
FACTOR = 2  # of the log's size to what is stored


class Compaction:
    """Compaction of one store. Its methods are called with the store's lock held.

    `give_back` is called for messages that are unreadable here.
    """

    def __init__(
        self,
        commit: GroupCommit,
        state: StoreState,
        segment_size: int,
        give_back: Callable[[list[Place]], None],
    ) -> None:
        self._commit, self._log, self._state = commit, commit.log, state
        self._spare = 2 * segment_size
        self._pause = min(STEP, segment_size) // 4
        self._give_back = give_back
        self._looked_at = self._log.end  # the log's end at the last step
        self._reading: tuple[int, Iterator[Record | Damage]] | None = None

    @property
    def is_due(self) -> bool:
        return self._log.end - self._looked_at >= self._pause

    def relocate(self) -> None:
        """Store messages of the oldest segment again.

        Of what is read, at least half is needed no longer. So the log stays in its
        bounds if more is read than twice what it has grown by.
        """
        to_read = PACE * (self._log.end - self._looked_at)
        while to_read > 0 and self._too_large:
            to_read -= self._relocate_some()
        self._looked_at = self._log.end

    def removable(self, index_position: int) -> list[SegmentInfo]:
        """Release and return segments that neither the state nor the index needs.

        That they may be gone is on disk before.
        """
        segments = self._log.segments()
        needed = min(min(self._state.live, default=segments[-1].first), index_position)
        doomed = [segment for segment in segments[:-1] if segment.end <= needed]
        if not doomed:
            return []
        position = doomed[-1].end
        at = self._commit.append(RELEASED, encode_released(position))
        self._state.released = position
        self._commit.settle(at.end)
        return self._log.release_before(position)

    @property
    def _too_large(self) -> bool:
        needed = self._log.end - min(self._state.live, default=self._log.end)
        return (
            needed > FACTOR * self._state.live_bytes + self._spare and self._oldest_end is not None
        )

    @property
    def _oldest_end(self) -> int | None:
        """The end of the oldest segment that is needed, None if it is the last."""
        oldest = min(self._state.live, default=None)
        if oldest is None:
            return None
        ends = [segment.end for segment in self._log.segments()[:-1] if segment.first == oldest]
        return ends[0] if ends and ends[0] <= self._log.durable else None

    def _relocate_some(self) -> int:
        """Read a part of the oldest segment, and store again what is needed of it."""
        oldest, end = min(self._state.live), self._oldest_end
        assert end is not None
        crashpoint("local_store.before_relocation")
        try:
            read = self._read_some(oldest, end)
        except StoreError as error:
            self._reading = None
            if not is_bad_sector(error):
                raise
            read = self._relocate_one_by_one(oldest, end)
        self._commit.settle(self._log.end)
        crashpoint("local_store.after_relocation")
        return read

    def _read_some(self, oldest: int, end: int) -> int:
        if self._reading is None or self._reading[0] != oldest:
            self._reading = oldest, self._log.reader.decoder(oldest).scan(oldest, end)
        read = 1
        for item in self._reading[1]:
            read += item.end - item.position
            if isinstance(item, Record) and item.kind in {STORED, ENTRY}:
                self._relocate(item)
            if read >= STEP:
                return read
        self._reading = None
        if oldest in self._state.live:  # what is needed is damaged
            read += self._relocate_one_by_one(oldest, end)
        return read

    def _relocate_one_by_one(self, first: int, end: int) -> int:
        """Look for what the index knows of a segment, and give back what is damaged."""
        rows = [(place, row) for place, row in self._state.rows() if first <= row.position < end]
        for place, row in rows:
            try:
                record = self._log.record_at(row.position)
            except StoreError as error:
                if not is_damage(error):
                    raise
                self._give_back([place])
            else:
                self._relocate(record)
                if self._state.row(place) == row:  # another record is there
                    self._give_back([place])
        return end - first

    def _relocate(self, record: Record) -> None:
        try:
            head = decode_stored(record)
        except LyingRecord:
            return  # reported when the store was opened
        row = self._state.row(head.place)
        if row is None or row.position != record.position:
            return
        if not row.whole or row.state != State.STORED:
            store_entry(self._commit.append, self._state, head.place, row, returned=False)
            return
        moved = head._replace(
            state=row.state,
            attempt=row.attempt,
            due=row.due,
            told=row.told,
            failure=row.failure,
        )
        at = self._commit.append(STORED, encode_stored(moved), bytes(split_body(record).attachment))
        self._state.store(moved, at.position, at.end - at.position, whole=True)
