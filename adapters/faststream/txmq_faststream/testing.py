"""A TxmqBroker in memory: what is published goes to the handlers at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import MagicMock

from faststream._internal.testing.broker import EnterType, TestBroker, change_producer
from faststream.exceptions import SubscriberNotFound

from txmq.model.message import Receipt, ReceivedMessage
from txmq_faststream.broker import TxmqBroker
from txmq_faststream.message import CORRELATION_ID
from txmq_faststream.producer import TxmqProducer, encoded
from txmq_faststream.publisher import TxmqPublisher
from txmq_faststream.response import TxmqPublishCommand
from txmq_faststream.subscriber import TxmqSubscriber

if TYPE_CHECKING:
    from faststream._internal.parser import CodecProto


class TestTxmqBroker(TestBroker[TxmqBroker, EnterType], broker=TxmqBroker):
    """Runs the handlers of a broker without txmq. With `with_real=True` the messages go
    through the real one.

    One subscriber of each group gets a message. Errors of handlers are raised where the
    message was published, nothing is retried, and a transaction changes nothing.
    """

    def create_publisher_fake_subscriber(
        self, broker: TxmqBroker, publisher: TxmqPublisher
    ) -> tuple[TxmqSubscriber, bool]:
        """Return who gets what the publisher sends, and whether the application has
        it.
        """
        for subscriber in _subscribers(self.brokers):
            if publisher.topic in subscriber.topics:
                return subscriber, True
        return broker.subscriber(publisher.topic, group="faststream-test", persistent=False), False

    @contextmanager
    def _patch_producer(self, broker: TxmqBroker) -> Iterator[None]:
        config = broker.config.broker_config
        config.in_memory = True
        try:
            with change_producer(config, _InMemory(broker, self.brokers)):
                yield
        finally:
            config.in_memory = False

    async def _fake_connect(self, broker: TxmqBroker, *args: Any, **kwargs: Any) -> MagicMock:  # type: ignore[override]
        return MagicMock()


def _subscribers(brokers: Sequence[TxmqBroker]) -> Iterator[TxmqSubscriber]:
    for broker in brokers:
        yield from cast("list[TxmqSubscriber]", broker.subscribers)


class _InMemory(TxmqProducer):
    """Gives messages to the handlers of these brokers."""

    def __init__(self, broker: TxmqBroker, brokers: Sequence[TxmqBroker]) -> None:
        config = broker.config.broker_config
        super().__init__(config.broker_parser, config.broker_decoder)
        if config.broker_codec is not None:
            self.codec: CodecProto = config.broker_codec
        self._serializer = config.fd_config._serializer  # noqa: SLF001  # FastStream's
        self._brokers, self._offsets = brokers, count()

    async def publish(self, cmd: TxmqPublishCommand) -> Receipt:
        """Have one subscriber of each group handle the message."""
        [receipt] = await self._delivered(cmd, cmd.body)
        return receipt

    async def publish_batch(self, cmd: TxmqPublishCommand) -> list[Receipt]:
        """Have the messages handled, one after the other."""
        return await self._delivered(cmd, *cmd.batch_bodies)

    async def _delivered(self, cmd: TxmqPublishCommand, *bodies: Any) -> list[Receipt]:
        messages = [await self._message(cmd, body) for body in bodies]
        groups = set[str]()
        for subscriber in _subscribers(self._brokers):
            if cmd.destination in subscriber.topics and subscriber.group not in groups:
                groups.add(subscriber.group)
                for received in [messages] if subscriber.takes_batches else messages:
                    await subscriber.process_message(received)
        return [
            Receipt(one.message_id, one.topic, one.partition, one.offset, duplicate=False)
            for one in messages
        ]

    async def request(self, cmd: TxmqPublishCommand) -> ReceivedMessage:
        """Return the answer of the first subscriber. Raises SubscriberNotFound."""
        message = await self._message(cmd, cmd.body)
        for subscriber in _subscribers(self._brokers):
            if message.topic in subscriber.topics:
                async with asyncio.timeout(cmd.timeout):
                    answer = await subscriber.process_message(
                        [message] if subscriber.takes_batches else message
                    )
                answered = TxmqPublishCommand.from_cmd(answer.as_publish_command())
                answered.correlation_id = message.headers.get(CORRELATION_ID)
                return await self._message(answered, answer.body)
        raise SubscriberNotFound

    async def _message(self, cmd: TxmqPublishCommand, body: Any) -> ReceivedMessage:
        payload, fields = await encoded(cmd, body, self.codec, self._serializer)
        offset, now = next(self._offsets), time.time_ns() // 1_000
        return ReceivedMessage(
            cmd.destination,
            cmd.partition or 0,
            offset,
            fields.get("key"),
            fields.get("tag"),
            fields.get("headers") or {},
            payload,
            f"test-{offset}",
            attempt=1,
            born_at=now,
            stored_at=now,
        )
