"""The decorators of brokers and routers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from faststream._internal.broker.registrator import Registrator
from faststream._internal.constants import EMPTY
from faststream._internal.endpoint.subscriber.call_item import CallsCollection
from faststream.middlewares import AckPolicy

from txmq.client.protocol.consumer.settings import ConsumerOptions
from txmq.model.durations import Duration
from txmq.model.message import ReceivedMessage
from txmq_faststream.config import TxmqBrokerConfig
from txmq_faststream.publisher import Described, PublisherConfig, PublisherInSchema, TxmqPublisher
from txmq_faststream.subscriber import (
    SubscriberConfig,
    SubscriberInSchema,
    SubscriberInSchemaConfig,
    TxmqSubscriber,
)

if TYPE_CHECKING:
    from fast_depends.dependencies import Dependant
    from faststream._internal.parser import CodecProto
    from faststream._internal.types import BrokerMiddleware, CustomCallable


class TxmqRegistrator(Registrator[ReceivedMessage, TxmqBrokerConfig]):
    """What has subscribers and publishers."""

    def subscriber(  # type: ignore[override]
        self,
        *topics: str,
        group: str | None = None,
        consumer: ConsumerOptions | None = None,
        atomic: bool = False,
        max_workers: int = 1,
        batch: int | None = None,
        batch_wait: Duration = 0.0,
        ack_policy: AckPolicy = EMPTY,
        no_reply: bool = False,
        dependencies: Sequence[Dependant] = (),
        parser: CustomCallable | None = None,
        decoder: CustomCallable | None = None,
        codec: CodecProto | None = None,
        persistent: bool = True,
        title: str | None = None,
        description: str | None = None,
        include_in_schema: bool = True,
    ) -> TxmqSubscriber:
        """Have a handler get the messages of topics, as a member of a consumer group.

        `group`: by default the broker's. `consumer`: options of `client.consumer`, such
        as {"mode": "ordered", "retry": RetryPolicy(…)}. `atomic`: what the handler
        publishes, returns and answers takes effect together with the ack of its
        message, or not at all. `max_workers`: so many messages at a time. `batch`: the
        handler gets lists of up to so many, and `batch_wait` is the time in seconds for
        one to fill. The rest is as of FastStream's other brokers.
        """
        config = cast("TxmqBrokerConfig", self.config)
        calls = CallsCollection[ReceivedMessage]()
        specification = SubscriberInSchema(
            config,
            SubscriberInSchemaConfig(
                topics=topics,
                title_=title,
                description_=description,
                include_in_schema=include_in_schema,
            ),
            calls,
        )
        subscriber = TxmqSubscriber(
            SubscriberConfig(
                _outer_config=config,
                _ack_policy=ack_policy,
                no_reply=no_reply,
                topics=topics,
                group=group,
                atomic=atomic,
                max_workers=max_workers,
                batch=batch,
                batch_wait=batch_wait,
                options=consumer or ConsumerOptions(),
            ),
            specification,
            calls,
        )
        super().subscriber(subscriber, persistent=persistent)
        return subscriber.add_call(
            parser_=parser or self._parser,
            decoder_=decoder or self._decoder,
            codec_=codec,
            dependencies_=dependencies,
        )

    def publisher(  # type: ignore[override]
        self,
        topic: str,
        *,
        headers: dict[str, str] | None = None,
        persistent: bool = True,
        title: str | None = None,
        description: str | None = None,
        schema: Any | None = None,
        include_in_schema: bool = True,
    ) -> TxmqPublisher:
        """Return a publisher to the topic, which decorates handlers as well: what they
        return is sent. Return a TxmqResponse to give it a key, a tag or a delay.
        """
        config = cast("TxmqBrokerConfig", self.config)
        described = Described(
            topic=topic,
            schema_=schema,
            title_=title,
            description_=description,
            include_in_schema=include_in_schema,
        )
        publisher = TxmqPublisher(
            PublisherConfig(_outer_config=config, topic=topic, headers=headers or {}),
            PublisherInSchema(config, described),
        )
        super().publisher(publisher, persistent=persistent)
        return publisher

    def include_router(
        self,
        router: TxmqRegistrator,  # type: ignore[override]
        *,
        prefix: str = "",
        dependencies: Sequence[Dependant] = (),
        middlewares: Sequence[BrokerMiddleware[Any, Any]] = (),
        include_in_schema: bool | None = None,
    ) -> None:
        """Have the router's subscribers and publishers, with a prefix to topics."""
        if not isinstance(router, TxmqRegistrator):
            raise TypeError(f"a TxmqRouter is wanted, not a {type(router).__name__}")
        super().include_router(
            router,
            prefix=prefix,
            dependencies=dependencies,
            middlewares=middlewares,
            include_in_schema=include_in_schema,
        )
