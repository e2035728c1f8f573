"""The blocking client for what is stated once: coroutines that block, never suspend."""

from __future__ import annotations

import time
from typing import Any, TypeVar
from uuid import UUID

from txmq.client.blocking.core import BlockingCore
from txmq.client.protocol.awaited.messages import AwaitedMessageCalls
from txmq.client.protocol.conversation import Payload
from txmq.client.protocol.sender.accumulator import SideRequest
from txmq.client.protocol.sender.topics import TopicMetadata

T = TypeVar("T")


class CoreAtOnce:
    """The core, as an AwaitedCore."""

    def __init__(self, core: BlockingCore) -> None:
        self._core, self.settings, self.topics = core, core.settings, core.topics
        self.seconds = core.seconds

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251  # no loop waits

    async def call(
        self,
        name: str,
        args: dict[str, Any],
        *,
        repeat: bool = False,
        within: float | None = None,
    ) -> dict[str, Any]:
        return self._core.call(name, args, timeout=within, repeat=repeat)

    async def ask_any_node(
        self, name: str, args: dict[str, Any], deadline: float
    ) -> dict[str, Any]:
        return self._core.ask_any_node(name, args, deadline)

    async def topic(self, topic: str) -> TopicMetadata:
        return self.topics.get(topic)

    async def refresh(self, topic: str, within: float | None = None) -> TopicMetadata:
        return self.topics.refresh(topic, within)

    async def log_id(self, within: float | None = None) -> UUID:
        self._core.require_reachable(within)
        return self._core.log_id

    async def request(
        self,
        opcode: int,
        payload: Payload = b"",
        *,
        repeat: bool = False,
        within: float | None = None,
    ) -> bytes:
        return self._core.request(opcode, payload, timeout=within, repeat=repeat)

    async def send_request(self, request: SideRequest[T]) -> T:
        return request.decode(self._core.request(request.opcode, request.payload, repeat=True))


class ClientAtOnce(AwaitedMessageCalls):
    """The client's calls as all faces have them."""

    def __init__(self, core: BlockingCore) -> None:
        self._core = CoreAtOnce(core)
