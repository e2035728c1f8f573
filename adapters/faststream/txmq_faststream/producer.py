"""What sends: at once, with the transaction of the context, or as a request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from faststream._internal.endpoint.utils import ParserComposition
from faststream._internal.parser import DefaultCodec
from faststream._internal.producer import ProducerProto
from faststream.exceptions import IncorrectState

from txmq.aio import Client, Cluster
from txmq.client.protocol.sender.rows import Fields
from txmq.model.message import Message, Receipt, ReceivedMessage
from txmq_faststream.message import CONTENT_TYPE, CORRELATION_ID, REPLY_TO, Parser
from txmq_faststream.replies import Replies
from txmq_faststream.response import TxmqPublishCommand
from txmq_faststream.transactions import current

if TYPE_CHECKING:
    from fast_depends.library.serializer import SerializerProto
    from faststream._internal.parser import CodecProto
    from faststream._internal.types import AsyncCallable, CustomCallable

NOT_CONNECTED = "the broker is not connected: await broker.connect(), or start the application"


class TxmqProducer(ProducerProto[TxmqPublishCommand]):
    """Encodes bodies and sends them."""

    def __init__(
        self,
        parser: CustomCallable | None = None,
        decoder: CustomCallable | None = None,
        reply_topic: str | None = None,
    ) -> None:
        own = Parser()
        self._parser: AsyncCallable = ParserComposition(parser, own.parse_message)
        self._decoder: AsyncCallable = ParserComposition(decoder, own.decode_message)
        self.codec: CodecProto = DefaultCodec()
        self._serializer: SerializerProto | None = None
        self._client: Client | Cluster | None = None
        self._replies = Replies(reply_topic)

    def connect(
        self,
        client: Client | Cluster,
        serializer: SerializerProto | None,
        codec: CodecProto | None,
    ) -> None:
        """Send with this client from now on."""
        self._client, self._serializer = client, serializer
        self.codec = codec or DefaultCodec()

    async def disconnect(self) -> None:
        """Send nothing more. Requests that wait fail."""
        self._client = None
        await self._replies.close()

    @property
    def client(self) -> Client | Cluster:
        """The client. Raises IncorrectState without one."""
        if self._client is None:
            raise IncorrectState(NOT_CONNECTED)
        return self._client

    async def publish(self, cmd: TxmqPublishCommand) -> Receipt | None:
        """Send the message: it is stored on return, and the receipt is returned. In a
        transaction it is stored if that commits, and there is no receipt yet.
        """
        body, fields = await encoded(cmd, cmd.body, self.codec, self._serializer)
        if (scope := current()) is not None:
            scope.transaction.send(cmd.destination, body, partition=cmd.partition, **fields)
            return None
        return await self.client.send(cmd.destination, body, partition=cmd.partition, **fields)

    async def publish_batch(self, cmd: TxmqPublishCommand) -> list[Receipt]:
        """Send messages together; not all or nothing, but in a transaction."""
        messages = [
            await encoded(cmd, body, self.codec, self._serializer) for body in cmd.batch_bodies
        ]
        topic, partition = cmd.destination, cmd.partition
        if (scope := current()) is not None:
            for body, fields in messages:
                scope.transaction.send(topic, body, partition=partition, **fields)
            return []
        return await self.client.send_batch(
            topic, [Message(body, **fields) for body, fields in messages], partition=partition
        )

    async def request(self, cmd: TxmqPublishCommand) -> ReceivedMessage:
        """Send the message and wait for the answer to it. Raises TimeoutError.

        It goes out at once, in a transaction as well: nothing would answer what is not
        sent.
        """
        cmd.reply_to = await self._replies.open(self.client)
        body, fields = await encoded(cmd, cmd.body, self.codec, self._serializer)
        answer = self._replies.expect(cmd.correlation_id or "")
        try:
            async with asyncio.timeout(cmd.timeout):
                await self.client.send(cmd.destination, body, partition=cmd.partition, **fields)
                return await answer
        finally:
            answer.cancel()


class NoProducer(TxmqProducer):
    """The producer of a router that no broker includes yet."""

    def __bool__(self) -> bool:
        return False


async def encoded(
    cmd: TxmqPublishCommand, body: Any, codec: CodecProto, serializer: SerializerProto | None
) -> tuple[bytes, Fields]:
    """Return a body as bytes, and the fields of its message."""
    payload, content_type = await codec.encode(body, serializer)
    own = {CONTENT_TYPE: content_type, CORRELATION_ID: cmd.correlation_id, REPLY_TO: cmd.reply_to}
    headers = {name: value for name, value in own.items() if value}
    headers |= {name: str(value) for name, value in cmd.headers.items()}
    return payload, Fields(**{**cmd.fields, "headers": headers})
