"""Calls of clients on Twisted that concern single messages: half, find and recall."""

from __future__ import annotations

from typing import Unpack

from twisted.internet.defer import Deferred

from txmq.client.blocking.core import core_of
from txmq.client.protocol.awaited.messages import AwaitedMessageCalls
from txmq.client.protocol.sender.accumulator import SideRequest
from txmq.client.protocol.sender.rows import Fields
from txmq.client.protocol.transaction.decision import is_published
from txmq.client.protocol.transaction.half_message import HalfBundle, HalfMessage
from txmq.client.protocol.transaction.options import CHECK_AFTER_S
from txmq.client.twisted.core import TwistedCore
from txmq.model.durations import Duration
from txmq.model.message import Decision, Message, Receipt
from txmq.wire.data_requests import Opcode


class TwistedMessageCalls(AwaitedMessageCalls):
    """The part of the client for single messages."""

    _core: TwistedCore

    def recall(self, message: Receipt | str) -> Deferred[None]:  # type: ignore[override]  # begins at once
        """Take back a message that was sent with a time of delivery.

        The message is named by its receipt or its id. A second recall does no harm.
        Fails with RecallTooLate where the message is published already, or not known.
        """
        return Deferred.fromCoroutine(super().recall(message))


class TwistedHalfCalls:
    """The part of the client for half messages, which needs no threads."""

    _core: TwistedCore

    def half(
        self,
        topic: str,
        body: bytes,
        *,
        checker: str,
        partition: int | None = None,
        check_after: Duration = CHECK_AFTER_S,
        **fields: Unpack[Fields],
    ) -> Deferred[HalfMessage[Deferred[bool]]]:
        """Store a half message: `half = await client.half(…)`.

        The Deferred fires once the message is durable. The local work follows, and then
        `await half.commit()` or `half.rollback()`. Half messages of one turn of the
        reactor share a frame. The rest is as for `half_async` of the blocking client.
        """
        core, message = self._core, Message(body, **fields)
        bundle = HalfBundle.of(
            core.topics, core.settings, checker, topic, message, partition, check_after
        )
        return Deferred.fromCoroutine(_store_half(core, bundle))


async def _store_half(core: TwistedCore, bundle: HalfBundle) -> HalfMessage[Deferred[bool]]:
    def decide(outcome: Decision) -> Deferred[bool]:
        return Deferred.fromCoroutine(
            core.send_request(
                SideRequest(Opcode.DECIDE, bundle.decide_request(outcome), is_published)
            )
        )

    await core.topic(bundle.topic)
    await core.send_request(
        SideRequest(
            Opcode.GROUP, bundle.store_request(), bundle.require_stored, bundle.store_request
        )
    )
    core_of(core.blocking).answer_checks()
    return bundle.half_message(decide)
