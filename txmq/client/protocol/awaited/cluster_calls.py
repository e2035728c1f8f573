"""Control calls of a client of several brokers, in all faces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Generic, NoReturn, Protocol, TypeVar, Unpack

from txmq.client.log import LastingTrouble, get_logger
from txmq.client.protocol.audit import AuditEntry, AuditOptions
from txmq.client.protocol.awaited.core import AwaitedCore
from txmq.client.protocol.letters import DeadLetter, LetterOptions
from txmq.client.protocol.lives import Trace, merged
from txmq.client.protocol.message_search import FindOptions, FoundMessage, TraceOptions
from txmq.client.protocol.sender.routing import SendRoute, of_one_broker, recall_refusal
from txmq.client.protocol.settings import no_spool
from txmq.errors import ClientClosed, TxmqError, UnknownGroup, UnknownTopic
from txmq.model.message import Receipt
from txmq.wire.data_requests import Opcode


class CallingClient(Protocol):
    """The client of one of several brokers."""

    def recall(self, message: Receipt | str) -> Awaitable[None]: ...
    def letters(
        self,
        group: str,
        *,
        saved: str | None = None,
        bodies: bool = False,
        **selection: Unpack[LetterOptions],
    ) -> AsyncIterator[DeadLetter]: ...
    def audit(self, **wanted: Unpack[AuditOptions]) -> AsyncIterator[AuditEntry]: ...
    def trace(
        self, key: str | None = None, *, limit: int = 20, **wanted: Unpack[TraceOptions]
    ) -> Awaitable[Trace]: ...
    def find(
        self, topic: str | None = None, **wanted: Unpack[FindOptions]
    ) -> AsyncIterator[FoundMessage]: ...


C = TypeVar("C", bound=CallingClient)
RETRY_S = 1.0  # between two questions whether a found broker is there
log = get_logger()


async def wait_answer(core: AwaitedCore, broker: int) -> None:
    """Wait until a broker that was found has answered. Raises ClientClosed."""
    away = LastingTrouble("cluster.log_away", broker=broker)
    while True:
        try:
            await core.request(Opcode.PING)
        except ClientClosed:
            raise
        except TxmqError as error:
            away.warn(error)
            await core.sleep(RETRY_S)
        else:
            log.info("cluster.log_found", broker=broker)
            return


class ClusterCalls(ABC, Generic[C]):
    """The calls that go to one broker after the other."""

    clients: tuple[C, ...]

    @abstractmethod
    async def _route(self, topic: str, key: str | None, partition: int | None) -> SendRoute:
        """Return the broker of a message, and its partition there."""

    async def letters(
        self,
        group: str,
        *,
        saved: str | None = None,
        bodies: bool = False,
        **selection: Unpack[LetterOptions],
    ) -> AsyncGenerator[DeadLetter, None]:
        """Select the dead letters of a consumer group, one broker after the other.

        See `Client.letters`. Raises UnknownGroup or UnknownTopic where no broker has
        one, and BrokerUnavailable where one of them is away, after the letters of those
        before.
        """
        unknown = list[UnknownGroup | UnknownTopic]()
        for client in self.clients:
            try:
                async for letter in client.letters(group, saved=saved, bodies=bodies, **selection):
                    yield letter
            except (UnknownGroup, UnknownTopic) as error:
                unknown.append(error)
        if len(unknown) == len(self.clients):
            raise unknown[0]

    async def audit(self, **wanted: Unpack[AuditOptions]) -> AsyncIterator[AuditEntry]:
        """Iterate over what operators did, one broker after the other."""
        for client in self.clients:
            async for entry in client.audit(**wanted):
                yield entry

    async def trace(
        self, key: str | None = None, *, limit: int = 20, **wanted: Unpack[TraceOptions]
    ) -> Trace:
        """Return the life of what is found at all brokers; `limit` is that of each. See
        `Client.trace`.
        """
        return merged([await one.trace(key, limit=limit, **wanted) for one in self.clients])

    async def find(
        self, topic: str | None = None, **wanted: Unpack[FindOptions]
    ) -> AsyncGenerator[FoundMessage, None]:
        """Find the messages that match all arguments, one broker after the other.

        See `Client.find`. Raises UnknownTopic where no broker has the topic, and
        BrokerUnavailable where one of them is away, after the messages of those before.
        """
        clients, partition = self.clients, wanted.pop("partition", None)
        if partition is not None and topic is not None:
            broker, wanted["partition"] = await self._route(topic, None, partition)
            clients = (self.clients[broker],)
        unknown = list[UnknownTopic]()
        for client in clients:
            try:
                async for found in client.find(topic, **wanted):
                    yield found
            except UnknownTopic as error:
                unknown.append(error)
        if len(unknown) == len(clients):
            raise unknown[0]

    async def recall(self, message: Receipt | str) -> None:
        """Take back a message that was sent with a time of delivery; see
        `Client.recall`.

        Asks one broker after the other. Raises BrokerUnavailable where one is away and
        the others do not have the message.
        """
        refusals = list[TxmqError]()
        for client in self.clients:
            try:
                await client.recall(message)
            except TxmqError as error:
                refusals.append(error)
            else:
                return
        raise recall_refusal(refusals)


def _of_one(name: str, why: str) -> Callable[..., NoReturn]:
    """Return a call of clients of one broker as one that is refused."""

    def refused(*_args: object, **_options: object) -> NoReturn:
        raise of_one_broker(f"{name}(…)")

    refused.__name__ = name
    refused.__doc__ = f"{why}: `client.{name}` of one of `clients`."
    return refused


class OneBrokerCalls:
    """The calls that concern one broker."""

    @property
    def spool(self) -> NoReturn:
        """A cluster has no spool. Raises ConfigError."""
        raise no_spool()

    def call(self, name: str, /, **args: object) -> NoReturn:
        """Control calls concern one broker: `client.call` of one of `clients`."""
        raise of_one_broker(f"call({name!r}, …)")

    def describe_cluster(self) -> NoReturn:
        """Nodes share one log: `client.describe_cluster` of one of `clients`."""
        raise of_one_broker("describe_cluster()")

    edit_letter = _of_one("edit_letter", "A letter is at one broker")
    revert_letter = _of_one("revert_letter", "A letter is at one broker")
    replay_letters = _of_one("replay_letters", "Letters are at one broker")
    abandon_letters = _of_one("abandon_letters", "Letters are at one broker")
    retry_now = _of_one("retry_now", "Retries are at one broker")
    bury_retries = _of_one("bury_retries", "Retries are at one broker")
    skip_retries = _of_one("skip_retries", "Retries are at one broker")
    redrive_letters = _of_one("redrive_letters", "Letters are at one broker")
    try_letter = _of_one("try_letter", "A letter is at one broker")
    export_letters = _of_one("export_letters", "Letters are at one broker")
    import_letters = _of_one("import_letters", "Copies go to one broker")

    def job(self, token: object = None, **options: object) -> NoReturn:
        """A job is at one broker: `client.job` of one of `clients`."""
        raise of_one_broker("job(…)")
