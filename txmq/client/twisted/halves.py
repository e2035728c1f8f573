"""Half messages on the Twisted face, without threads: those of one turn of the reactor
share a frame.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from twisted.internet.defer import Deferred

from txmq.client.blocking.transaction.half_message import HalfGroup, HalfMessage, is_published
from txmq.client.blocking.transaction.options import CHECK_AFTER_S
from txmq.model.message import Decision, Message
from txmq.wire.headers import Opcode

if TYPE_CHECKING:
    from txmq.client.blocking.sender.producer import Fields
    from txmq.client.twisted.core import Core


class HalfCalls:
    """The part of the client for half messages."""

    core: Core

    def half(
        self,
        topic: str,
        body: bytes,
        *,
        checker: str,
        partition: int | None = None,
        check_after: float = CHECK_AFTER_S,
        **fields: Unpack[Fields],
    ) -> Deferred[HalfMessage[Deferred[bool]]]:
        """Stores a half message, and gives it once it is durable: `half = await
        client.half(...)`, then the local work, then `await half.commit()` or
        `half.rollback()`. Otherwise as `half_async` of the blocking client.
        """
        core, message = self.core, Message(body, **fields)
        group = HalfGroup.of(
            core.topics, core.settings, checker, topic, message, partition, check_after
        )
        return Deferred.fromCoroutine(_stored(core, group))


async def _stored(core: Core, group: HalfGroup) -> HalfMessage[Deferred[bool]]:
    def decide(outcome: Decision) -> Deferred[bool]:
        return Deferred.fromCoroutine(
            core.carried(Opcode.DECIDE, group.decision(outcome), is_published)
        )

    await core.shape(group.topic)
    await core.carried(Opcode.GROUP, group.payload(), group.check_stored, group.payload)
    return HalfMessage(group.token, decide)
