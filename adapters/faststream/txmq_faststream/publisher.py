"""Publishers: decorators that send what a handler returns, and objects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Unpack

from faststream._internal.configs import PublisherSpecificationConfig, PublisherUsecaseConfig
from faststream._internal.endpoint.publisher import PublisherSpecification, PublisherUsecase
from faststream._internal.endpoint.publisher.fake import FakePublisher
from faststream.response.publish_type import PublishType
from faststream.specification.asyncapi.utils import resolve_payloads
from faststream.specification.schema import Message, Operation, PublisherSpec

from txmq.client.protocol.sender.rows import Fields
from txmq.model.message import Receipt
from txmq_faststream.config import TxmqBrokerConfig
from txmq_faststream.message import TxmqMessage
from txmq_faststream.response import TxmqPublishCommand

if TYPE_CHECKING:
    from faststream._internal.basic_types import SendableMessage
    from faststream._internal.producer import ProducerProto
    from faststream._internal.types import PublisherMiddleware
    from faststream.response.response import PublishCommand


@dataclass(kw_only=True)
class Described(PublisherSpecificationConfig):
    """What the AsyncAPI document says of a publisher."""

    topic: str


@dataclass(kw_only=True)
class PublisherConfig(PublisherUsecaseConfig):
    """The settings of a publisher."""

    _outer_config: TxmqBrokerConfig = field(default_factory=TxmqBrokerConfig)
    topic: str
    headers: dict[str, str]


class PublisherInSchema(PublisherSpecification[TxmqBrokerConfig, Described]):
    """A publisher in the AsyncAPI document."""

    __slots__ = ()

    @property
    def topic(self) -> str:
        """The topic, with the prefixes of the routers around it."""
        return f"{self._outer_config.prefix}{self.config.topic}"

    @property
    def name(self) -> str:
        """The name of the channel."""
        return self.config.title_ or f"{self.topic}:Publisher"

    def get_schema(self) -> dict[str, PublisherSpec]:
        """Return the channel, by its name."""
        message = Message(
            title=f"{self.name}:Message",
            payload=resolve_payloads(self.get_payloads(), "Publisher"),
        )
        spec = PublisherSpec(
            address=self.topic,
            description=self.config.description_,
            operation=Operation(message=message, bindings=None),
            bindings=None,
        )
        return {self.name: spec}


class TxmqPublisher(PublisherUsecase):
    """A publisher to one topic."""

    _outer_config: TxmqBrokerConfig

    def __init__(
        self, config: PublisherConfig, specification: PublisherSpecification[Any, Any]
    ) -> None:
        super().__init__(config, specification)
        self._topic, self.headers = config.topic, config.headers

    @property
    def topic(self) -> str:
        """The topic, with the prefixes of the routers around it."""
        return f"{self._outer_config.prefix}{self._topic}"

    async def publish(
        self,
        message: SendableMessage,
        topic: str = "",
        *,
        partition: int | None = None,
        correlation_id: str | None = None,
        reply_to: str = "",
        **fields: Unpack[Fields],
    ) -> Receipt | None:
        """Publish to the publisher's topic, or to another one; see `broker.publish`."""
        cmd = TxmqPublishCommand(
            message,
            topic=topic or self.topic,
            partition=partition,
            fields=fields,
            headers=self.headers,
            reply_to=reply_to,
            correlation_id=correlation_id or self._outer_config.id_generator(),
        )
        receipt: Receipt | None = await self._basic_publish(
            cmd, producer=self._outer_config.producer, _extra_middlewares=()
        )
        return receipt

    async def _publish(
        self, cmd: PublishCommand, *, _extra_middlewares: Iterable[PublisherMiddleware]
    ) -> None:
        """Publish what a handler has returned."""
        own = TxmqPublishCommand.from_cmd(cmd)
        own.destination = self.topic
        own.add_headers(self.headers, override=False)
        await self._basic_publish(
            own, producer=self._outer_config.producer, _extra_middlewares=_extra_middlewares
        )

    async def request(
        self,
        message: SendableMessage,
        topic: str = "",
        *,
        correlation_id: str | None = None,
        timeout: float = 30.0,  # noqa: ASYNC109  # as of FastStream's other brokers
    ) -> TxmqMessage:
        """Publish and wait for the answer; see `broker.request`."""
        cmd = TxmqPublishCommand(
            message,
            topic=topic or self.topic,
            headers=self.headers,
            correlation_id=correlation_id or self._outer_config.id_generator(),
            timeout=timeout,
            _publish_type=PublishType.REQUEST,
        )
        answer: TxmqMessage = await self._basic_request(cmd, producer=self._outer_config.producer)
        return answer


class ReplyPublisher(FakePublisher):
    """The publisher of a handler's answer to a request."""

    def __init__(self, producer: ProducerProto[Any], topic: str) -> None:
        super().__init__(producer=producer)
        self._topic = topic

    def patch_command(self, cmd: PublishCommand) -> TxmqPublishCommand:
        """Return the command, addressed to who has asked."""
        own = TxmqPublishCommand.from_cmd(super().patch_command(cmd))
        own.destination = self._topic
        return own
