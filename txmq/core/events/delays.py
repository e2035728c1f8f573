"""Events of delayed messages: numbers 40 to 45."""

from __future__ import annotations

from typing import NamedTuple

from txmq.core.events.base import event


class Delay(NamedTuple):
    """The delay of a message in a bundle; `carried` is the time or duration of its
    delivery as the sender wrote it.
    """

    carried: int
    sequence: int
    key_hash: int | None


class DelayedRow(NamedTuple):
    """A message of a delayed batch, stored as a batch of its own. `start` counts from
    the first byte of the attachment. `span` is the wait that the sender asked for; 0 =
    the sender gave a time.
    """

    start: int
    length: int
    due: int
    tag_filter: int
    key_hash: int | None
    span: int


@event(40)
class BatchDelayed(NamedTuple):
    """A plain batch of delayed messages was stored. Attachment: each message as a
    batch, joined.
    """

    topic_id: int
    partition: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    producer: bytes
    epoch: int
    sequence: int
    rows: tuple[DelayedRow, ...]


@event(41)
class DelayedPublished(NamedTuple):
    """Due messages were published: (due, position, offset). Offset -1 = the topic was
    deleted.
    """

    messages: tuple[tuple[int, int, int], ...]


@event(42)
class DelayedQueued(NamedTuple):
    """A due message met a held key and waits for its turn. Its ticket is the position
    of this record.
    """

    due: int
    position: int


@event(43)
class DelayedRecalled(NamedTuple):
    """Messages were recalled before they were due: (producer id or token, sequence)."""

    ids: tuple[tuple[bytes, int], ...]


@event(44)
class RecallsForgotten(NamedTuple):
    """Expired recalls were forgotten: (recalled at, producer id or token, sequence)."""

    recalls: tuple[tuple[int, bytes, int], ...]


@event(45)
class DelayedMoved(NamedTuple):
    """Delayed messages were copied, because their segment has to go: (due, position
    under which they were stored first, length). Attachment: the copies, joined.
    """

    messages: tuple[tuple[int, int, int], ...]
