"""Core of a face for the coroutines of this folder: its requests, topics and clock."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Protocol, TypeVar
from uuid import UUID

from txmq.client.protocol.conversation import Payload
from txmq.client.protocol.sender.topics import TopicCache, TopicMetadata
from txmq.client.protocol.settings import ClientSettings

T = TypeVar("T")


class AwaitedCalls(Protocol):
    """A client that makes control calls."""

    def call(self, name: str, /, **args: object) -> Awaitable[dict[str, Any]]:
        """Return the reply to a control call."""


class AwaitedCore(Protocol):
    """The shared state of one client on an event loop."""

    settings: ClientSettings
    topics: TopicCache

    @property
    def known_log_id(self) -> UUID | None:
        """The id of the broker's log, if it is known without asking."""

    def seconds(self) -> float:
        """Return the time of the loop's clock."""

    def sleep(self, seconds: float) -> Awaitable[object]:
        """Wait for so many seconds."""

    def start(self, work: Coroutine[Any, Any, object]) -> None:
        """Begin work that nobody waits for. A TxmqError of it is dropped."""

    def gather(self, works: Iterable[Coroutine[Any, Any, T]]) -> Awaitable[list[T | Exception]]:
        """Begin all works at once, and wait until each has ended."""

    async def call(
        self, name: str, args: dict[str, Any], *, repeat: bool = False
    ) -> dict[str, Any]:
        """Return the result of a control call; with `repeat`, it is made again after a
        lost connection.
        """

    async def topic(self, topic: str) -> TopicMetadata:
        """Return a topic from the cache, or else from the broker."""

    async def refresh(self, topic: str) -> TopicMetadata:
        """Return the topic as the broker describes it now."""

    async def send_request(
        self,
        opcode: int,
        payload: Payload,
        decode: Callable[[bytes], T] = ...,
        rebuild: Callable[[], bytes] | None = None,
    ) -> T:
        """Return the decoded reply to a request.

        It is repeated after each lost connection.
        """
