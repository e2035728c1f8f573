"""The failures of dead letters that were processed: they are known as long as the
message.

Table `attempts` is passed through in steps. A history goes when retention has removed
its message, or its topic or group was deleted, and no failed message has it.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from txmq.core.events.letters import HistoriesForgotten
from txmq.core.events.outcome import Appliers, Deciders
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.core.events.base import RecordContext
    from txmq.core.state.state import State


def find_over(
    state: State, start: bytes, most: int
) -> tuple[HistoriesForgotten | None, bytes | None]:
    """Return those of `most` histories from `start` on whose message is gone, and the
    next start; None = there are no more.
    """
    rows: Any = list(islice(state.tables[t.ATTEMPTS].range(start), most + 1))
    over = tuple(key for key, _row in rows[:most] if _is_over(state, key))
    return HistoriesForgotten(over) if over else None, rows[most][0] if len(rows) > most else None


def _is_over(state: State, key: bytes) -> bool:
    group_id, topic_id, partition, offset = t.FAILED_KEY.unpack(key)
    topic = state.topics_by_id.get(topic_id)
    there = (
        group_id in state.groups.by_id
        and topic is not None
        and not topic.deleted
        and offset >= topic.start_offsets[partition]
    )
    return not there and state.failed_messages.get(key) is None


def apply_forgotten(state: State, event: HistoriesForgotten, _context: RecordContext) -> None:
    for key in event.keys:
        state.tables[t.ATTEMPTS].delete(key)


DECIDERS: Deciders = {}
APPLIERS: Appliers = {HistoriesForgotten: apply_forgotten}
