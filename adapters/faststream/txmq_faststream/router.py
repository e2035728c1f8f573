"""Routers: subscribers and publishers that a broker includes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from faststream._internal.broker.router import ArgsContainer, BrokerRouter, SubscriberRoute
from faststream._internal.constants import EMPTY
from faststream.middlewares import AckPolicy

from txmq.model.message import ReceivedMessage
from txmq_faststream.config import TxmqBrokerConfig
from txmq_faststream.registrator import TxmqRegistrator

if TYPE_CHECKING:
    from fast_depends.dependencies import Dependant
    from faststream._internal.types import BrokerMiddleware, CustomCallable


class TxmqPublisher(ArgsContainer):
    """The arguments of `publisher`, for a TxmqRoute."""

    def __init__(self, topic: str, **options: Any) -> None:
        super().__init__(topic, **options)


class TxmqRoute(SubscriberRoute):
    """A handler, and the arguments of `subscriber` for it."""

    def __init__(
        self,
        call: Callable[..., Any],
        *topics: str,
        publishers: Iterable[TxmqPublisher] = (),
        **options: Any,
    ) -> None:
        super().__init__(call, *topics, publishers=publishers, **options)


class TxmqRouter(TxmqRegistrator, BrokerRouter[ReceivedMessage, TxmqBrokerConfig]):
    """What a TxmqBroker includes."""

    def __init__(
        self,
        prefix: str = "",
        handlers: Iterable[TxmqRoute] = (),
        *,
        dependencies: Sequence[Dependant] = (),
        middlewares: Sequence[BrokerMiddleware[Any, Any]] = (),
        routers: Iterable[TxmqRegistrator] = (),
        parser: CustomCallable | None = None,
        decoder: CustomCallable | None = None,
        include_in_schema: bool | None = None,
        ack_policy: AckPolicy = EMPTY,
    ) -> None:
        super().__init__(
            handlers=handlers,
            config=TxmqBrokerConfig(
                prefix=prefix,
                ack_policy=ack_policy,
                broker_dependencies=dependencies,
                broker_middlewares=middlewares,
                broker_parser=parser,
                broker_decoder=decoder,
                include_in_schema=include_in_schema,
            ),
            routers=routers,
        )
