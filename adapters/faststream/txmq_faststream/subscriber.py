"""Subscribers: members of consumer groups whose messages go to handlers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from faststream._internal.configs import SubscriberSpecificationConfig, SubscriberUsecaseConfig
from faststream._internal.constants import EMPTY
from faststream._internal.endpoint.subscriber import SubscriberSpecification, SubscriberUsecase
from faststream._internal.endpoint.subscriber.mixins import TasksMixin
from faststream._internal.endpoint.utils import process_msg
from faststream.middlewares import AckPolicy
from faststream.response import Response, ensure_response
from faststream.specification.asyncapi.utils import resolve_payloads
from faststream.specification.schema import Message, Operation, SubscriberSpec

from txmq.aio import Consumer, Consumers
from txmq.client.protocol.consumer.settings import ConsumerOptions
from txmq.errors import LocalProtocolError
from txmq.model.causation import current_cause
from txmq.model.durations import Duration
from txmq.model.message import ReceivedMessage
from txmq_faststream.config import TxmqBrokerConfig
from txmq_faststream.message import Parser, TxmqMessage, is_in_hand
from txmq_faststream.publisher import ReplyPublisher
from txmq_faststream.transactions import NotAckedError, Scope, entered

if TYPE_CHECKING:
    from faststream._internal.endpoint.publisher import PublisherProto
    from faststream._internal.endpoint.subscriber.call_item import CallsCollection
    from faststream.message import StreamMessage

Received = ReceivedMessage | Sequence[ReceivedMessage]
NO_GROUP = 'name one, of the broker or of the subscriber: subscriber("orders", group="billing")'


@dataclass(kw_only=True)
class SubscriberInSchemaConfig(SubscriberSpecificationConfig):
    """What the AsyncAPI document says of a subscriber."""

    topics: tuple[str, ...]


@dataclass(kw_only=True)
class SubscriberConfig(SubscriberUsecaseConfig):
    """The settings of a subscriber."""

    _outer_config: TxmqBrokerConfig = field(default_factory=TxmqBrokerConfig)
    topics: tuple[str, ...]
    group: str | None
    atomic: bool
    max_workers: int
    batch: int | None
    batch_wait: Duration
    options: ConsumerOptions

    @property
    def ack_policy(self) -> AckPolicy:
        """The policy of the subscriber, of its broker, or that of txmq."""
        if self._ack_policy is not EMPTY:
            return self._ack_policy
        if self._outer_config.ack_policy is not EMPTY:
            return self._outer_config.ack_policy
        return AckPolicy.NACK_ON_ERROR


class SubscriberInSchema(SubscriberSpecification[TxmqBrokerConfig, SubscriberInSchemaConfig]):
    """A subscriber in the AsyncAPI document: a channel for each topic."""

    __slots__ = ()

    @property
    def channel_labels(self) -> list[str]:
        """The topics, with the prefixes of the routers around them."""
        return [f"{self._outer_config.prefix}{topic}" for topic in self.config.topics]

    def get_schema(self) -> dict[str, SubscriberSpec]:
        """Return the channels, by their names."""
        payloads, channels, labels = self.get_payloads(), {}, self.channel_labels
        for topic in labels:
            name = self._channel_key(topic, split=len(labels) > 1)
            message = Message(title=f"{name}:Message", payload=resolve_payloads(payloads))
            channels[name] = SubscriberSpec(
                address=topic,
                description=self.description,
                operation=Operation(message=message, bindings=None),
                bindings=None,
            )
        return channels


class TxmqSubscriber(TasksMixin, SubscriberUsecase[Any]):
    """A member of a group. So many workers take its messages, or batches of them, one
    at a time each.
    """

    _outer_config: TxmqBrokerConfig

    def __init__(
        self,
        config: SubscriberConfig,
        specification: SubscriberInSchema,
        calls: CallsCollection[Any],
    ) -> None:
        self._own_parser = Parser()
        self._batch, self._batch_wait = config.batch, config.batch_wait
        if config.batch is None:
            config.parser = self._own_parser.parse_message
            config.decoder = self._own_parser.decode_message
        else:
            config.parser = self._own_parser.parse_batch
            config.decoder = self._own_parser.decode_batch
        super().__init__(config, specification, calls)
        self._topics, self._group, self._options = config.topics, config.group, config.options
        self._atomic, self._max_workers = config.atomic, config.max_workers
        self._consumer: Consumer | Consumers | None = None
        self._checked()

    def _checked(self) -> None:
        if not self._topics:
            raise LocalProtocolError("a subscriber has no topic", hint='subscriber("orders")')
        for name, number in (("max_workers", self._max_workers), ("batch", self._batch)):
            if number is not None and number < 1:
                raise LocalProtocolError(f"{name} is {number}", hint="use a number of at least 1")
        if self._atomic and self.ack_policy in {AckPolicy.ACK, AckPolicy.ACK_FIRST}:
            raise LocalProtocolError(
                f"{self.ack_policy} acks what an atomic subscriber takes back",
                hint="leave the policy out, or use NACK_ON_ERROR, REJECT_ON_ERROR or MANUAL",
            )

    @property
    def topics(self) -> list[str]:
        """The topics, with the prefixes of the routers around them."""
        return [f"{self._outer_config.prefix}{topic}" for topic in self._topics]

    @property
    def group(self) -> str:
        """The consumer group: the subscriber's, or its broker's."""
        return self._group or self._outer_config.group

    @property
    def alive(self) -> bool:
        """True unless the workers have ended by themselves."""
        return not self.running or not any(task.done() for task in self.tasks)

    async def start(self) -> None:
        """Join the group, and have the workers begin."""
        await super().start()
        if self._outer_config.in_memory or not self.calls:
            self._post_start()
            return
        consumer = await self._joined()
        self._post_start()
        for _ in range(self._max_workers):
            self.add_task(self._work, (consumer,), restart_on_failure=False)

    async def stop(self) -> None:
        """Let handlers finish, and leave the group: what is not settled goes to other
        members.
        """
        self.running = False
        consumer, self._consumer = self._consumer, None
        try:
            await super().stop()
        finally:
            if consumer is not None:
                await consumer.close()
            self._own_parser.consumer = None

    async def _joined(self) -> Consumer | Consumers:
        """Return the member, which joins the group when it is first asked for."""
        if self._consumer is None:
            if not self.group:
                raise LocalProtocolError("a subscriber has no consumer group", hint=NO_GROUP)
            self._consumer = await self._outer_config.client.consumer(
                self.group, self.topics, **self._options
            )
            self._own_parser.consumer = self._consumer
        return self._consumer

    async def _work(self, consumer: Consumer | Consumers) -> None:
        while self.running and (received := await self._receive(consumer)):
            if not self.running:
                _give_back(consumer, received)
                return
            current_cause.set(received if isinstance(received, ReceivedMessage) else None)
            try:
                await self.consume(received)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    _give_back(consumer, received)
                    raise
                # The handler has awaited something that was cancelled; the worker has
                # not been.
                consumer.nack_many(filter(is_in_hand, each(received)), error=error)
            except BaseException:  # handlers' own errors end as the policy says
                _give_back(consumer, received)
                raise

    async def _receive(
        self, consumer: Consumer | Consumers, seconds: float | None = None
    ) -> Received | None:
        """Return what the handler gets, a message or a batch; none after so many
        seconds, and when the consumer is closed.
        """
        if self._batch is None:
            return await consumer.receive(seconds)
        return await consumer.receive_many(self._batch, seconds, batch_wait=self._batch_wait)

    async def process_message(self, msg: Received) -> Response:
        """Have the message handled; atomic: in a transaction that acks it."""
        consumer = self._own_parser.consumer
        if not self._atomic or consumer is None:
            return await super().process_message(msg)
        transaction = self._outer_config.client.transaction()
        scope = Scope(transaction, msg)
        try:
            async with transaction:
                with entered(scope):
                    response = await super().process_message(msg)
                scope.require_acked()
        except NotAckedError:
            return ensure_response(None)
        except Exception as error:
            if scope.acked:  # the handler has succeeded, and the transaction has not
                self._outer_config.logger.log(
                    f"the transaction of a message failed: {error!r}", logging.ERROR, exc_info=error
                )
                consumer.nack_many(filter(is_in_hand, each(msg)), error=error)
            raise
        return response

    async def get_one(self, *, timeout: float = 5.0) -> TxmqMessage | None:  # noqa: ASYNC109  # FastStream's
        """Return the next message, for the caller to settle; None after so many
        seconds.
        """
        assert not self.calls, "a subscriber with handlers gives its messages to them"
        consumer = await self._joined()
        received = await self._receive(consumer, timeout)
        return await self._parsed(received) if received else None

    async def __aiter__(self) -> AsyncIterator[TxmqMessage]:
        assert not self.calls, "a subscriber with handlers gives its messages to them"
        consumer = await self._joined()
        while received := await self._receive(consumer):
            yield await self._parsed(received)

    async def _parsed(self, raw: Received) -> TxmqMessage:
        parser, decoder = self._get_parser_and_decoder()
        context = self._outer_config.context
        message = await process_msg(
            msg=raw,
            middlewares=(make(raw, context=context) for make in self._broker_middlewares),
            parser=parser,
            decoder=decoder,
        )
        assert isinstance(message, TxmqMessage)
        return message

    def _make_response_publisher(self, message: StreamMessage[Any]) -> Sequence[PublisherProto]:
        return (ReplyPublisher(self._outer_config.producer, message.reply_to),)

    @property
    def takes_batches(self) -> bool:
        """True where handlers get lists."""
        return self._batch is not None

    def get_log_context(self, message: StreamMessage[Any] | None) -> dict[str, str]:
        """Return what log lines about a message have in front of their text."""
        topic = ",".join(self.topics) if message is None else each(message.raw_message)[0].topic
        return {
            "topic": topic,
            "group": self.group,
            "message_id": getattr(message, "message_id", ""),
        }


def each(received: Received) -> Sequence[ReceivedMessage]:
    """Return the messages of a batch, or the one that it is."""
    return (received,) if isinstance(received, ReceivedMessage) else received


def _give_back(consumer: Consumer | Consumers, received: Received) -> None:
    for message in filter(is_in_hand, each(received)):
        consumer.postpone(message, 0.0)
