"""What is published, and what handlers return to say more than a body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

from faststream.response.publish_type import PublishType
from faststream.response.response import BatchPublishCommand, PublishCommand, Response

from txmq.client.protocol.sender.rows import Fields

if TYPE_CHECKING:
    from faststream._internal.basic_types import SendableMessage


class TxmqPublishCommand(BatchPublishCommand):
    """A message, or several, for a topic. `fields` are key, tag, delay and the like;
    headers among them go over those of `headers`.
    """

    def __init__(
        self,
        message: SendableMessage,
        *messages: SendableMessage,
        topic: str = "",
        fields: Fields | None = None,
        partition: int | None = None,
        headers: Mapping[str, Any] | None = None,
        correlation_id: str | None = None,
        reply_to: str = "",
        timeout: float = 30.0,
        _publish_type: PublishType = PublishType.PUBLISH,
    ) -> None:
        own: Fields = {**(fields or {})}
        super().__init__(
            message,
            *messages,
            destination=topic,
            headers={**(headers or {}), **(own.pop("headers", None) or {})},
            correlation_id=correlation_id,
            reply_to=reply_to,
            _publish_type=_publish_type,
        )
        self.fields = own
        self.partition, self.timeout = partition, timeout

    @classmethod
    def from_cmd(cls, cmd: PublishCommand, *, batch: bool = False) -> TxmqPublishCommand:  # noqa: ARG003  # FastStream's
        """Return the command of another broker's response as one of this."""
        if isinstance(cmd, cls):
            return cmd
        return cls(
            cmd.body,
            topic=cmd.destination,
            headers=cmd.headers,
            correlation_id=cmd.correlation_id,
            reply_to=cmd.reply_to,
            _publish_type=cmd.publish_type,
        )


class TxmqResponse(Response):
    """A handler's answer with a key, a tag, a delay and so on."""

    def __init__(
        self,
        body: SendableMessage,
        *,
        correlation_id: str | None = None,
        partition: int | None = None,
        **fields: Unpack[Fields],
    ) -> None:
        headers = dict(fields.pop("headers", None) or {})
        super().__init__(body, headers=headers, correlation_id=correlation_id)
        self.fields, self.partition = fields, partition

    def as_publish_command(self) -> TxmqPublishCommand:
        """Return the command that publishes it."""
        return TxmqPublishCommand(
            self.body,
            headers=self.headers,
            correlation_id=self.correlation_id,
            partition=self.partition,
            fields=self.fields,
        )
