"""Poison or outage: two numbers of a partition's window tell which of them it is.

The window begins with the first message that is delivered and not processed, and ends
with the last one that was delivered. Of its messages, a share is unprocessed: leased,
waiting for a retry, or at a consumer. Another share is processed, behind the first one.
What a filter passed over is no part of it, nor what is parked: nobody has tried it.

- Most of a window is processed: its head is poison. The others of its time go through.
- Most of it is unprocessed: what the consumers call is away, or they stand still. One
  message alone does not tell.

Neither is said of a window that moves. It stands once its head has failed or has been
leased for a while, or the group's limit of messages under way (`span`) is nearly
reached. uForwarder finds blocked heads of Kafka's partitions by the same two numbers.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.state import failed_messages
from txmq.core.state.failed_rows import FailedKind
from txmq.model.topic_partition import TopicPartition
from txmq.model.units import SECOND

if TYPE_CHECKING:
    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.failed_rows import FailedMessage
    from txmq.core.state.positions import GroupPosition
    from txmq.core.state.ranges import RangeMap
    from txmq.core.state.state import State

MAX_WINDOW = 10_000  # messages: those before are of another time
MAX_ROWS = 256  # failed messages that are read of a window, its newest ones
STANDS_AFTER = 10 * SECOND  # of one head
NEARLY_FULL = 0.8  # of the limit of messages under way
MIN_BEHIND = 16  # messages behind a head that tell whether it is poison
MAX_FENCES = 16  # failed keys: where more have failed, no single one is poison
POISON, OUTAGE = "poison", "outage"
TRIED = (FailedKind.RETRY, FailedKind.LOCAL)


class Window(NamedTuple):
    """The window of a partition: its first offset, its size, and how many of its
    messages are unprocessed and processed. The others are dead letters.

    `standing`: its head has not moved for a while.
    """

    head: int
    size: int = 0
    unprocessed: int = 0
    processed: int = 0
    standing: bool = False

    @property
    def unprocessed_share(self) -> float:
        return self.unprocessed / self.size if self.size else 0.0

    @property
    def processed_share(self) -> float:
        return self.processed / self.size if self.size else 0.0

    @property
    def word(self) -> str:
        """Return "poison", "outage", or "" if it is neither."""
        if not self.standing or not self.unprocessed:
            return ""
        if 2 * self.processed >= self.size:
            return POISON
        return OUTAGE if self.unprocessed > 1 and 2 * self.unprocessed > self.size else ""


def window_of(state: State, group: ConsumerGroup, tp: TopicPartition, now: int) -> Window:
    """Return the window of a partition, from at most `MAX_ROWS` rows of failed
    messages.
    """
    position = group.positions[tp]
    end = position.cursor
    low = position.filters_known_from(max(0, end - MAX_WINDOW))
    rows = failed_messages.last_rows_before(state, group, tp, low, end, MAX_ROWS)
    if len(rows) == MAX_ROWS:
        low = rows[0][0][2]
    waiting = [(ref, row) for ref, row in rows if row.kind in TRIED]
    heads = [ref[2] for ref, _row in waiting[:1]]
    if position.unsettled:
        heads.append(max(low, position.floor))
    if not heads:
        return Window(end)
    head = min(heads)
    under_way: tuple[RangeMap[Any], ...] = (
        position.leased,
        position.redeliver,
        position.reserved,
    )
    open_messages = sum(_total(ranges, head, end) for ranges in under_way)
    unprocessed = open_messages + len(waiting)
    others = Counter(row.kind for ref, row in rows if ref[2] >= head and row.kind not in TRIED)
    parked = others.pop(FailedKind.PARKED, 0)
    size = end - head - parked - _total(position.filtered, head, end)
    return Window(
        head,
        size,
        unprocessed,
        max(0, size - unprocessed - others.total()),
        _stands(group, position, waiting[0][1] if waiting else None, now),
    )


def _total(ranges: RangeMap[Any], start: int, end: int) -> int:
    """Return how many offsets of [start, end) are in the ranges."""
    return sum(held.end - held.start for held in ranges.overlap(start, end))


def _stands(
    group: ConsumerGroup, position: GroupPosition, failed: FailedMessage | None, now: int
) -> bool:
    """Return True if a window does not move. `failed` is its first failed message that
    waits.
    """
    span, before = group.settings.span, now - STANDS_AFTER
    if span and position.cursor - position.floor >= NEARLY_FULL * span:
        return True
    if failed is not None and 0 < failed.first_failed_at <= before:
        return True
    leased, back = position.leased.first(), position.redeliver.first()
    if leased is not None and group.leases[leased.value.lease].granted_at <= before:
        return True
    return back is not None and back.value.attempt > 1


def is_poison(group: ConsumerGroup, ref: MessageRef, row: FailedMessage) -> bool:
    """Return True if a message that fails again is the poison of its key alone: most of
    what was delivered behind it has been processed.

    It reads counters only, and counts every recent failure as unprocessed: a doubtful
    case is none.
    """
    tp = TopicPartition(ref[0], ref[1])
    position = group.positions.get(tp)
    if position is None or row.attempt < 2:
        return False
    first = position.filters_known_from(ref[2] + 1)
    behind = position.cursor - first - _total(position.filtered, first, position.cursor)
    if behind < MIN_BEHIND:
        return False
    fences = [fence for _topic, _key, fence in islice(group.all_fences(), MAX_FENCES + 1)]
    if len(fences) > MAX_FENCES:
        return False
    unprocessed = (
        position.unsettled
        + group.retrying[tp]
        + len(group.leased_rows)
        + sum(fence.parked for fence in fences)
        + group.failure_window.failed
        + sum(store.messages for store in group.stores.values())
    )
    return 2 * unprocessed < behind
