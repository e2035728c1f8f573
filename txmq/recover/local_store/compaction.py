"""Compaction of a store's log: segments that are no longer needed go.

A segment is needed while it has the record of a message. Segments go from the oldest
on, so a message that is stuck for long is stored again at the end of the log, once the
log is much larger than what is stored: at most twice as large, and two segments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.crashpoints import crashpoint
from txmq.recover.local_store.opening import store_entry
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

    `on_damage` is called for messages whose bodies are unreadable.
    """

    def __init__(
        self,
        commit: GroupCommit,
        state: StoreState,
        segment_size: int,
        now: Callable[[], int],
        on_damage: Callable[[list[Place]], None],
    ) -> None:
        self._commit, self._log, self._state = commit, commit.log, state
        self._spare = 2 * segment_size
        self._pause = min(STEP, segment_size) // 4
        self._now, self._on_damage = now, on_damage
        self._looked_at = self._log.end  # the log's end at the last step
        self._reading: tuple[int, Iterator[Record | Damage]] | None = None

    @property
    def is_due(self) -> bool:
        return self._log.end - self._looked_at >= self._pause

    def relocate(self) -> int:
        """Store messages of the oldest segment again, and return the log's end.

        Of what is read, at least half is needed no longer. So the log stays in its
        bounds if more is read than twice what it has grown by.
        """
        to_read = PACE * (self._log.end - self._looked_at)
        while to_read > 0 and self._too_large:
            to_read -= self._relocate_some()
        self._looked_at = self._log.end
        return self._looked_at

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
        if self._reading is None or self._reading[0] != oldest:
            self._reading = oldest, self._log.reader.decoder(oldest).scan(oldest, end)
        read = 0
        crashpoint("local_store.before_relocation")
        for item in self._reading[1]:
            read += item.end - item.position
            if isinstance(item, Damage):
                self._give_back(item)
            elif item.kind in {STORED, ENTRY}:
                self._relocate(item)
            if read >= STEP:
                break
        else:
            self._reading = None
            self._require_empty(oldest, end)
        self._commit.settle(self._log.end)
        crashpoint("local_store.after_relocation")
        return max(read, 1)

    def _relocate(self, record: Record) -> None:
        try:
            head = decode_stored(record)
        except LyingRecord:
            return  # reported when the store was opened
        row = self._state.row(head.place)
        if row is None or row.position != record.position:
            return
        if not row.whole or row.state != State.STORED:
            store_entry(self._log, self._state, head.place, row, returned=False, now=self._now())
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

    def _give_back(self, damage: Damage) -> None:
        self._on_damage(
            [
                place
                for place, row in self._state.rows()
                if damage.position <= row.position < damage.end
            ]
        )

    def _require_empty(self, first: int, end: int) -> None:
        """Give back what a whole walk over a segment did not find in it."""
        if first in self._state.live:
            self._give_back(Damage("", first, end, ""))
