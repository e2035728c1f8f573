"""Calls about single messages and letters, of clients on an event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from typing import Unpack

from pydantic import BaseModel

from txmq.client.protocol.awaited.core import AwaitedCalls
from txmq.client.protocol.awaited.letter_calls import AwaitedLetterCalls
from txmq.client.protocol.letter_edits import BodyCheck, edit_args, revert_args
from txmq.client.protocol.letters import DeadLetter, LetterOptions, LetterSearch
from txmq.client.protocol.message_search import FoundMessage, MessageSearch
from txmq.model.message import Receipt


class AwaitedMessageCalls(AwaitedLetterCalls):
    """The part of a client for single messages and letters."""

    async def find(
        self: AwaitedCalls,
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
        self: AwaitedCalls,
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

    async def edit_letter(  # what an edit is
        self: AwaitedCalls,
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
        self: AwaitedCalls, letter: DeadLetter, *, operator: str, reason: str
    ) -> int:
        """Give an edited dead letter what was published again; see the blocking
        client's `revert_letter`.
        """
        args = revert_args(letter, operator=operator, reason=reason)
        return int((await self.call("dlq.edit", **args))["edits"])
