"""Calls about single messages and letters, of clients of any face."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, Unpack
from uuid import UUID

from pydantic import BaseModel

from txmq.client.protocol.awaited.letter_calls import AwaitedLetterCalls
from txmq.client.protocol.awaited.plans import ReplayPlan
from txmq.client.protocol.letter_edits import BodyCheck, edit_args, revert_args
from txmq.client.protocol.letters import DeadLetter, LetterOptions, LetterSearch
from txmq.client.protocol.message_search import (
    FindOptions,
    FoundMessage,
    MessageSearch,
    message_id_of,
)
from txmq.errors import ConnectionLost
from txmq.model.cluster import ClusterView, ListedLog, LogList, NodeView
from txmq.model.message import Receipt


class AwaitedMessageCalls(AwaitedLetterCalls):
    """The part of a client for single messages and letters."""

    async def describe_cluster(self) -> ClusterView:
        """Return the nodes that share the broker's log, and the logs that are listed
        with it, as the first node that answers knows them: the leader, if there is one.
        """
        told = await self._cluster_description()
        listed = told["logs"]
        logs = tuple(ListedLog(**one | {"log_id": UUID(one["log_id"])}) for one in listed["logs"])
        return ClusterView(
            **told
            | {
                "nodes": tuple(NodeView(**one) for one in told["nodes"]),
                "logs": LogList(listed["version"], logs),
            }
        )

    async def _cluster_description(self) -> dict[str, Any]:
        """Ask another node, or the same again, where one ends before it answers."""
        settings = self._core.settings
        deadline = self._core.seconds() + settings.timeout
        for _retry in range(settings.retries):
            with suppress(ConnectionLost):
                return await self._core.ask_any_node("cluster.describe", {}, deadline)
        return await self._core.ask_any_node("cluster.describe", {}, deadline)

    async def recall(self, message: Receipt | str) -> None:
        """Take back a message that was sent with a time of delivery.

        The message is named by its receipt or its id. A second recall does no harm.
        Raises RecallTooLate where the message is published already, or not known.
        """
        await self._core.call("message.recall", {"ids": [message_id_of(message)]})

    async def find(
        self, topic: str | None = None, **wanted: Unpack[FindOptions]
    ) -> AsyncIterator[FoundMessage]:
        """Find the messages of a topic that match all arguments, page by page.

        They come in the order of partitions and offsets. `FindOptions` describes the
        arguments. Without a topic, a key, a body or a header finds messages of all
        topics. A `message_id` alone finds a message that waits for its time, or one of
        a transaction of the last seven days, in any topic. Raises UnknownTopic,
        InvalidPath, and the errors of a call.
        """
        search = MessageSearch(topic, **wanted)
        while (asked := search.next_call()) is not None:
            for found in search.read_reply(await self._core.call(*asked)):
                yield found

    async def letters(
        self,
        group: str,
        *,
        saved: str | None = None,
        bodies: bool = False,
        **selection: Unpack[LetterOptions],
    ) -> AsyncIterator[DeadLetter]:
        """Select the dead letters of a consumer group, or messages that are retried, in
        the order of their deaths or first failures, page by page.

        The letters have all properties in `selection`, or those of the selection that
        was `saved` by its name; by default they are the open ones. Those that die after
        the first page are left out. Raises UnknownGroup, UnknownTopic, and the errors
        of a call.
        """
        search = LetterSearch(group, saved, selection, bodies=bodies)
        while (args := search.next_args()) is not None:
            for letter in search.read(await self._core.call("dlq.list", args)):
                yield letter

    def plan(self, name: str) -> ReplayPlan:
        """Return the replay plan of this name, to create it, to look at it, or to order
        what the broker shall do with it.
        """
        return ReplayPlan(self, name)

    async def edit_letter(  # what an edit is
        self,
        letter: DeadLetter,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        model: type[BaseModel] | BodyCheck | None = None,
        any_format: bool = False,
        operator: str,
        reason: str,
    ) -> int:
        """Give an open dead letter, or a message that waits for a retry, another body,
        other headers (all of them), or both, for its group only; return the number of
        its edits.

        It stays the same message, and an inbox knows it as such. A new body is first
        checked against `model`: a pydantic model, or a function that raises an
        exception.
        Raises LocalProtocolError where it does not fit, BadRequest where the former
        body is JSON and the new one is not, unless it may have `any_format`. Raises
        Conflict where the letter is not open any more, a consumer has the message in
        hand, or it was edited since `letter` was read.
        """
        args = edit_args(
            letter,
            body=body,
            headers=headers,
            model=model,
            any_format=any_format,
            operator=operator,
            reason=reason,
        )
        return int((await self._core.call("dlq.edit", args))["edits"])

    async def revert_letter(self, letter: DeadLetter, *, operator: str, reason: str) -> int:
        """Give an edited dead letter what was published again; return the number of its
        edits, this one included.
        """
        args = revert_args(letter, operator=operator, reason=reason)
        return int((await self._core.call("dlq.edit", args))["edits"])
