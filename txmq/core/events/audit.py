"""Events of what operators do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.events.base import RecordContext, event, make

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.events.base import Event


@event(150)
class OperatorActed(NamedTuple):
    """An operator changed something: the events of the change, then an `AuditStored`.

    Each is (number of its kind, its fields, bytes of its attachment). Attachment:
    theirs, joined in their order.
    """

    parts: tuple[tuple[int, tuple[Any, ...], int], ...]


@event(151)
class AuditStored(NamedTuple):
    """A message of the audit topic was published. Attachment: its batch.

    Only as a part of `OperatorActed`.
    """

    topic_id: int
    base_offset: int
    length: int


@event(152)
class AuditMoved(NamedTuple):
    """Messages of the audit topic were copied, because they held a segment alone:
    (offset, position before, position of the durable copy).
    """

    topic_id: int
    messages: tuple[tuple[int, int, int], ...]


def parts_in(acted: OperatorActed, context: RecordContext) -> Iterator[tuple[Event, RecordContext]]:
    """Yield the events of a record with their contexts."""
    at = context.attachment_position
    for kind, fields, length in acted.parts:
        yield make(kind, fields), context._replace(attachment_position=at)
        at += length
