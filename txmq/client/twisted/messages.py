"""Calls of clients on Twisted that concern single messages: half, find and recall."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from typing import Any, Protocol, Unpack

from pydantic import BaseModel
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater

from txmq.client.blocking.core import core_of
from txmq.client.protocol.letter_edits import BodyCheck, edit_args, revert_args
from txmq.client.protocol.letters import DeadLetter, LetterOptions, LetterSearch
from txmq.client.protocol.message_search import FoundMessage, MessageSearch, message_id_of
from txmq.client.protocol.sender.rows import Fields
from txmq.client.protocol.transaction.decision import is_published
from txmq.client.protocol.transaction.half_message import HalfBundle, HalfMessage
from txmq.client.protocol.transaction.options import CHECK_AFTER_S
from txmq.client.twisted.core import TwistedCore
from txmq.client.twisted.plans import ReplayPlan
from txmq.model.message import Decision, Message, Receipt
from txmq.wire.data_requests import Opcode


class TwistedControlCalls(Protocol):
    """A client that makes control calls."""

    def call(self, name: str, /, **args: object) -> Deferred[dict[str, Any]]: ...


class PlanningClient(TwistedControlCalls, Protocol):
    """A client with a reactor."""

    _core: TwistedCore


class TwistedMessageCalls:
    """The part of the client for single messages."""

    def recall(self: TwistedControlCalls, message: Receipt | str) -> Deferred[None]:
        """Take back a message that was sent with a time of delivery.

        The message is named by its receipt or its id. A second recall does no harm.
        Fails with RecallTooLate where the message is published already, or not known.
        """
        ids = [message_id_of(message)]
        return self.call("message.recall", ids=ids).addCallback(lambda _reply: None)

    async def find(
        self: TwistedControlCalls,
        topic: str | None = None,
        *,
        message_id: Receipt | str | None = None,
        key: str | None = None,
        partition: int | None = None,
        offset: int = 0,
        start: datetime | int | None = None,
        end: datetime | int | None = None,
    ) -> AsyncIterator[FoundMessage]:
        """Find the messages of a topic that match all arguments, for `async for`.

        The arguments and errors are those of the blocking client's `find`.
        """
        search = MessageSearch(topic, message_id, key, partition, offset, start, end)
        while (call := search.next_call()) is not None:
            for found in search.read_reply(await self.call(call[0], **call[1])):
                yield found

    async def letters(
        self: TwistedControlCalls,
        group: str,
        *,
        saved: str | None = None,
        bodies: bool = False,
        **selection: Unpack[LetterOptions],
    ) -> AsyncIterator[DeadLetter]:
        """Select the dead letters of a consumer group, for `async for`.

        The arguments and errors are those of the blocking client's `letters`.
        """
        search = LetterSearch(group, saved, selection, bodies=bodies)
        while (args := search.next_args()) is not None:
            for letter in search.read(await self.call("dlq.list", **args)):
                yield letter

    def plan(self: PlanningClient, name: str) -> ReplayPlan:
        """Return the replay plan of this name. Its methods are coroutines."""
        reactor = self._core.reactor
        return ReplayPlan(self, lambda seconds: deferLater(reactor, seconds), name)

    async def edit_letter(  # what an edit is
        self: TwistedControlCalls,
        letter: DeadLetter,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        model: type[BaseModel] | BodyCheck | None = None,
        operator: str,
        reason: str,
    ) -> int:
        """Give an open dead letter another body or other headers.

        Arguments, result and errors are those of the blocking client's `edit_letter`.
        """
        args = edit_args(
            letter, body=body, headers=headers, model=model, operator=operator, reason=reason
        )
        return int((await self.call("dlq.edit", **args))["edits"])

    async def revert_letter(
        self: TwistedControlCalls, letter: DeadLetter, *, operator: str, reason: str
    ) -> int:
        """Give an edited dead letter what was published again; see the blocking
        client's `revert_letter`.
        """
        args = revert_args(letter, operator=operator, reason=reason)
        return int((await self.call("dlq.edit", **args))["edits"])


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
        check_after: float = CHECK_AFTER_S,
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
            core.send_request(Opcode.DECIDE, bundle.decide_request(outcome), is_published)
        )

    await core.topic(bundle.topic)
    await core.send_request(
        Opcode.GROUP, bundle.store_request(), bundle.require_stored, bundle.store_request
    )
    core_of(core.blocking).answer_checks()
    return HalfMessage(bundle.token, decide)
