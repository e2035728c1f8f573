"""Messages as handlers of FastStream see them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from faststream.exceptions import HandlerException
from faststream.message import StreamMessage, decode_message

from txmq.aio import Consumer, Consumers
from txmq.model.message import ReceivedMessage
from txmq_faststream.transactions import current

if TYPE_CHECKING:
    from faststream._internal.basic_types import DecodedMessage

CONTENT_TYPE, CORRELATION_ID, REPLY_TO = "content-type", "correlation_id", "reply_to"
REJECTED = "the handler has rejected it"


class TxmqMessage(StreamMessage[ReceivedMessage]):
    """A delivered message. `raw_message` has topic, offset, key, attempt and the rest.

    What is settled already, by a transaction or because it took too long, is left
    alone.
    """

    consumer: Consumer | Consumers | None = None  # None: of a reader, or of a test

    async def ack(self) -> None:
        """Ack the message, with the transaction of an atomic subscriber."""
        if (consumer := self._settled_by()) is not None:
            scope = current()
            if scope is not None and scope.delivery is self.raw_message:
                scope.transaction.ack(self.raw_message)
                scope.acked = True
            else:
                consumer.ack(self.raw_message)
        await super().ack()

    async def nack(
        self, delay: float | None = None, error: BaseException | str | None = None
    ) -> None:
        """Have the message delivered again, by the policy of the group or after `delay`
        seconds. At the end of its retries it is a dead letter.

        `error` is stored with it, by default the one that is handled.
        """
        if (consumer := self._settled_by()) is not None:
            consumer.nack(self.raw_message, delay, error or _handled())
        await super().nack()

    async def reject(self, reason: str | None = None) -> None:
        """Move the message to the dead letters at once."""
        if (consumer := self._settled_by()) is not None:
            error = _handled()
            text = REJECTED if error is None else f"{type(error).__name__}: {error}"
            consumer.dead_letter(self.raw_message, reason or text)
        await super().reject()

    async def extend(self, seconds: float | None = None) -> None:
        """Give the handler more time; see `extend` of txmq's consumers."""
        if (consumer := self._settled_by()) is not None:
            consumer.extend(self.raw_message, seconds)

    def _settled_by(self) -> Consumer | Consumers | None:
        in_hand = getattr(self.raw_message, "in_hand", False)
        return self.consumer if in_hand and self.committed is None else None


def _handled() -> BaseException | None:
    """Return the error that the caller handles; of FastStream's own, its cause."""
    error = sys.exception()
    if isinstance(error, HandlerException):
        return error.__cause__ or error.__context__
    return error


class Parser:
    """Makes messages of FastStream of those of a consumer."""

    def __init__(self) -> None:
        self.consumer: Consumer | Consumers | None = None

    async def parse_message(self, raw: ReceivedMessage) -> TxmqMessage:
        """Return the message, with FastStream's headers in their places."""
        headers: dict[str, Any] = dict(raw.headers)
        message = TxmqMessage(
            raw_message=raw,
            body=raw.body,
            headers=headers,
            reply_to=headers.get(REPLY_TO, ""),
            content_type=headers.get(CONTENT_TYPE),
            correlation_id=headers.get(CORRELATION_ID),
            message_id=raw.message_id,
        )
        message.consumer = self.consumer
        return message

    async def decode_message(self, message: StreamMessage[Any]) -> DecodedMessage:
        """Return the body by its content type."""
        return decode_message(message)
