"""Durable copies of messages, and where each of them is in the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.core.events.topics import MessagesCopied
from txmq.core.retention.relocation import CopyMessages
from txmq.errors import RequestRejected

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from txmq.broker.engine.engine import Engine
    from txmq.core.events.base import LogSpan, RecordContext


class MessageCopies:
    """Storage of copies. All methods belong to the reactor's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._position = 0  # of the last copies in the log, whoever has stored them
        engine.listen(MessagesCopied, self._copied)

    def _copied(self, _event: MessagesCopied, place: RecordContext) -> None:
        self._position = place.attachment_position

    def store(
        self, batches: Sequence[bytes], stored: Callable[[list[LogSpan] | RequestRejected], None]
    ) -> None:
        """Store batches of one row each. `stored` gets their spans once they are
        durable, or the refusal.
        """
        spans: list[LogSpan] = []

        def are_durable(reply: object) -> None:
            stored(reply if isinstance(reply, RequestRejected) else spans)

        self._engine.submit(CopyMessages(tuple(batches)), are_durable)
        # The record is in the log now, and durable later. Until then others may store
        # copies, too, so that its position is read here.
        position = self._position
        for batch in batches:
            spans.append((position, len(batch)))
            position += len(batch)
