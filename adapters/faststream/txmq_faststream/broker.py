"""The broker of an application."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Unpack
from urllib.parse import urlsplit

from fast_depends import dependency_provider
from faststream._internal.broker import BrokerUsecase
from faststream._internal.constants import EMPTY
from faststream._internal.context.repository import ContextRepo
from faststream._internal.di import FastDependsConfig
from faststream.message import gen_cor_id
from faststream.middlewares import AckPolicy
from faststream.response.publish_type import PublishType
from faststream.specification.schema import BrokerSpec

from txmq.aio import Client, Cluster, connect
from txmq.client.protocol.sender.rows import Fields
from txmq.client.protocol.settings import Options
from txmq.errors import RequestRejected, TxmqError
from txmq.model.message import Receipt, ReceivedMessage
from txmq_faststream.config import TxmqBrokerConfig, make_logger
from txmq_faststream.message import TxmqMessage
from txmq_faststream.producer import TxmqProducer
from txmq_faststream.registrator import TxmqRegistrator
from txmq_faststream.response import TxmqPublishCommand
from txmq_faststream.subscriber import TxmqSubscriber
from txmq_faststream.transactions import Joinable, Scope, entered

if TYPE_CHECKING:
    from types import TracebackType

    from fast_depends import Provider
    from fast_depends.dependencies import Dependant
    from fast_depends.library.serializer import SerializerProto
    from faststream._internal.basic_types import LoggerProto, SendableMessage
    from faststream._internal.parser import CodecProto
    from faststream._internal.types import BrokerMiddleware, CustomCallable, IdGenerator
    from faststream.security import BaseSecurity
    from faststream.specification.schema.extra import Tag, TagDict


class TxmqBroker(
    TxmqRegistrator, BrokerUsecase[ReceivedMessage, Client | Cluster, TxmqBrokerConfig]
):
    """A broker of FastStream, over one broker of txmq; for a list of URLs, several."""

    def __init__(
        self,
        url: str | list[str] = "txmq://127.0.0.1:7650",
        *,
        service: str | None = None,
        group: str = "",
        reply_topic: str | None = None,
        client: Options | None = None,
        graceful_timeout: float | None = 15.0,
        ack_policy: AckPolicy = EMPTY,
        dependencies: Sequence[Dependant] = (),
        middlewares: Sequence[BrokerMiddleware[Any, Any]] = (),
        routers: Iterable[TxmqRegistrator] = (),
        parser: CustomCallable | None = None,
        decoder: CustomCallable | None = None,
        codec: CodecProto | None = None,
        id_generator: IdGenerator = gen_cor_id,
        description: str | None = None,
        tags: Iterable[Tag | TagDict] = (),
        security: BaseSecurity | None = None,
        specification_url: str | list[str] | None = None,
        logger: LoggerProto | None = EMPTY,
        log_level: int = logging.INFO,
        apply_types: bool = True,
        serializer: SerializerProto | None = EMPTY,
        provider: Provider | None = None,
        context: ContextRepo | None = None,
    ) -> None:
        """`service` and `client` are those of `txmq.aio.connect`. `group`: of the
        subscribers that name none. `reply_topic`: where answers to `request` come, a
        topic of this service alone. The rest is as of FastStream's other brokers.
        """
        urls = [url] if isinstance(url, str) else url
        shown = [specification_url] if isinstance(specification_url, str) else specification_url
        super().__init__(
            url=url,
            service=service,
            **(client or {}),
            routers=routers,
            config=TxmqBrokerConfig(
                producer=TxmqProducer(parser, decoder, reply_topic),
                group=group,
                broker_middlewares=middlewares,
                broker_parser=parser,
                broker_decoder=decoder,
                broker_codec=codec,
                logger=make_logger(logger=logger, log_level=log_level),
                fd_config=FastDependsConfig(
                    use_fastdepends=apply_types,
                    serializer=serializer,
                    provider=provider or dependency_provider,
                    context=context or ContextRepo(),
                ),
                broker_dependencies=dependencies,
                graceful_timeout=graceful_timeout,
                ack_policy=ack_policy,
                id_generator=id_generator,
                extra_context={"broker": self},
            ),
            specification=BrokerSpec(
                description=description,
                url=shown or [_without_user(one) for one in urls],
                protocol=urlsplit(urls[0]).scheme,
                protocol_version=None,
                tags=tags,
                security=security,
            ),
        )

    @property
    def client(self) -> Client | Cluster:
        """The client of txmq, for what FastStream has no words for. Raises
        IncorrectState before the broker is connected.
        """
        client: Client | Cluster = self.config.broker_config.client
        return client

    async def _connect(self) -> Client | Cluster:
        client: Client | Cluster = connect(**self._connection_kwargs)
        config = self.config.broker_config
        config.connected = client
        config.producer.connect(client, config.fd_config._serializer, config.broker_codec)  # noqa: SLF001  # FastStream's
        return client

    async def start(self) -> None:
        """Connect, and have the subscribers join their groups."""
        await self.connect()
        await super().start()

    async def stop(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> None:
        """Let handlers finish, leave the groups and close the client."""
        try:
            await super().stop(exc_type, exc_val, exc_tb)
        finally:
            client, self._connection = self._connection, None
            await self.config.broker_config.producer.disconnect()
            self.config.broker_config.connected = None
            if client is not None:
                await client.close()

    async def ping(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109  # FastStream's
        """Return whether the broker answers, and each subscriber still works."""
        client = self._connection
        if client is None or not all(
            one.alive for one in self.subscribers if isinstance(one, TxmqSubscriber)
        ):
            return False
        clients = client.clients if isinstance(client, Cluster) else (client,)
        try:
            for one in clients:
                await one.call("broker.show")
        except RequestRejected:
            return True  # to refuse is an answer
        except TxmqError:
            return False
        return True

    @contextmanager
    def within(self, transaction: Joinable) -> Iterator[None]:
        """Publish the messages of the block if the transaction commits.

        It may be any transaction of txmq, such as `broker.client.transaction(
        connection)`.
        """
        with entered(Scope(transaction)):
            yield

    def _command(
        self, *bodies: SendableMessage, correlation_id: str | None, **options: Any
    ) -> TxmqPublishCommand:
        """Return the command to publish these bodies, with an id where it has none."""
        first, *others = bodies or (None,)
        correlation_id = correlation_id or self.config.id_generator()
        return TxmqPublishCommand(first, *others, correlation_id=correlation_id, **options)

    async def publish(
        self,
        message: SendableMessage = None,
        topic: str = "",
        *,
        partition: int | None = None,
        correlation_id: str | None = None,
        reply_to: str = "",
        **fields: Unpack[Fields],
    ) -> Receipt | None:
        """Publish a message: it is stored on return.

        Returns the receipt; None in a transaction. `fields` are headers, key, tag,
        delay and so on, as of `client.send`.
        """
        cmd = self._command(
            message,
            topic=topic,
            partition=partition,
            fields=fields,
            reply_to=reply_to,
            correlation_id=correlation_id,
        )
        receipt: Receipt | None = await self._basic_publish(cmd, producer=self.config.producer)
        return receipt

    async def publish_batch(  # type: ignore[override]
        self,
        *messages: SendableMessage,
        topic: str,
        partition: int | None = None,
        correlation_id: str | None = None,
        **fields: Unpack[Fields],
    ) -> list[Receipt]:
        """Publish messages together, and return their receipts in order.

        It is not all or nothing, but in a transaction, which has no receipts yet.
        """
        cmd = self._command(
            *messages,
            topic=topic,
            partition=partition,
            fields=fields,
            correlation_id=correlation_id,
        )
        receipts: list[Receipt] = await self._basic_publish_batch(
            cmd, producer=self.config.producer
        )
        return receipts

    async def request(  # type: ignore[override]
        self,
        message: SendableMessage = None,
        topic: str = "",
        *,
        timeout: float = 30.0,  # noqa: ASYNC109  # FastStream's
        partition: int | None = None,
        correlation_id: str | None = None,
        **fields: Unpack[Fields],
    ) -> TxmqMessage:
        """Publish a message and return the answer of its handler.

        Raises TimeoutError, and LocalProtocolError where the broker has no
        `reply_topic`. A request whose answer is late is handled all the same: give it a
        `ttl` if it should not be.
        """
        cmd = self._command(
            message,
            topic=topic,
            partition=partition,
            fields=fields,
            correlation_id=correlation_id,
            timeout=timeout,
            _publish_type=PublishType.REQUEST,
        )
        answer: TxmqMessage = await self._basic_request(cmd, producer=self.config.producer)
        return answer


def _without_user(url: str) -> str:
    """Return the URL as a document may show it."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
