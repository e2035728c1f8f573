"""Events of delayed messages; numbers 40 to 45 (see `events`)."""

from __future__ import annotations

from typing import NamedTuple

from txmq.core.events.base import event


class DelayedRow(NamedTuple):
    """A message of a delayed batch, as a batch of its own: `start` counts from the
    attachment's first byte.
    """

    start: int
    length: int
    due: int
    tag_filter: int
    key_hash: int | None


@event(40)
class BatchDelayed(NamedTuple):
    """A plain batch was stored whose messages wait for their times. Attachment: each of
    them as a batch, joined.
    """

    topic_id: int
    partition: int
    count: int  # type: ignore[assignment]  # nobody counts in this tuple
    producer: bytes
    epoch: int
    sequence: int
    rows: tuple[DelayedRow, ...]


@event(41)
class DelayedPublished(NamedTuple):
    """Messages that were due have their offsets: (due, position, offset), offset -1 =
    their topic was deleted.
    """

    messages: tuple[tuple[int, int, int], ...]


@event(42)
class DelayedQueued(NamedTuple):
    """A message that was due met a held key: it waits for that now. Its ticket is the
    position of this record.
    """

    due: int
    position: int


@event(43)
class DelayedRecalled(NamedTuple):
    """Messages were taken back before they were due: (producer id or token,
    sequence).
    """

    ids: tuple[tuple[bytes, int], ...]


@event(44)
class RecallsForgotten(NamedTuple):
    """Recalls older than the time they are kept were dropped: (recalled at, producer id
    or token, sequence).
    """

    recalls: tuple[tuple[int, bytes, int], ...]


@event(45)
class DelayedMoved(NamedTuple):
    """Messages that outlive their segment were stored once more: (due, first position,
    length). Attachment: the copies, joined.
    """

    messages: tuple[tuple[int, int, int], ...]
