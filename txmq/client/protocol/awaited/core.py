"""Core of a face for the coroutines of this folder: its requests, topics and clock.

The blocking face has `txmq.client.blocking.at_once`.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol, TypeVar
from uuid import UUID

from txmq.client.protocol.conversation import Payload
from txmq.client.protocol.sender.accumulator import SideRequest
from txmq.client.protocol.sender.topics import TopicCache, TopicMetadata
from txmq.client.protocol.settings import ClientSettings

T = TypeVar("T")


class AwaitedCore(Protocol):
    """The shared state of one client."""

    settings: ClientSettings
    topics: TopicCache

    def seconds(self) -> float:
        """Return the time of the clock of deadlines."""

    def sleep(self, seconds: float) -> Awaitable[object]:
        """Wait for so many seconds."""

    async def call(
        self,
        name: str,
        args: dict[str, Any],
        *,
        repeat: bool = False,
        within: float | None = None,
    ) -> dict[str, Any]:
        """Return the result of a control call; with `repeat`, it is made again after a
        lost connection. `within` = the seconds for the answer; None = the client's.
        """

    async def ask_any_node(
        self, name: str, args: dict[str, Any], deadline: float
    ) -> dict[str, Any]:
        """Return the result of a control call that each node of a cluster answers."""

    async def topic(self, topic: str) -> TopicMetadata:
        """Return a topic from the cache, or else from the broker."""

    async def refresh(self, topic: str, within: float | None = None) -> TopicMetadata:
        """Return the topic as the broker describes it now, `within` so many seconds."""

    async def log_id(self, within: float | None = None) -> UUID:
        """Return the id of the broker's log. Raises as a call, unless it is known."""

    async def request(
        self,
        opcode: int,
        payload: Payload = b"",
        *,
        repeat: bool = False,
        within: float | None = None,
    ) -> bytes:
        """Return the payload of the reply to a request; as `call`."""

    async def send_request(self, request: SideRequest[T]) -> T:
        """Return the reply to a request that may share its frame with others. It is
        repeated after each lost connection.
        """


class AwaitedClient(Protocol):
    """A client, or what stands for the blocking one."""

    @property
    def _core(self) -> AwaitedCore: ...
