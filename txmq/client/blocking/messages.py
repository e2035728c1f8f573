"""Calls of the blocking client that concern single messages: find, recall, letters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Protocol, Unpack

from pydantic import BaseModel

from txmq.client.blocking.letter_calls import BlockingLetterCalls
from txmq.client.blocking.plans import ReplayPlan
from txmq.client.protocol.letter_edits import BodyCheck, edit_args, revert_args
from txmq.client.protocol.letters import DeadLetter, LetterOptions, LetterSearch
from txmq.client.protocol.message_search import FoundMessage, MessageSearch, message_id_of
from txmq.model.message import Receipt


class ControlCalls(Protocol):
    """A client that makes control calls."""

    def call(self, name: str, /, **args: object) -> dict[str, Any]: ...


class BlockingMessageCalls(BlockingLetterCalls):
    """The part of the blocking client for single messages."""

    def recall(self: ControlCalls, message: Receipt | str) -> None:
        """Take back a message that was sent with a time of delivery.

        The message is named by its receipt or its id. A second recall does no harm.
        Raises RecallTooLate where the message is published already, or not known.
        """
        self.call("message.recall", ids=[message_id_of(message)])

    def find(
        self: ControlCalls,
        topic: str | None = None,
        *,
        message_id: Receipt | str | None = None,
        key: str | None = None,
        partition: int | None = None,
        offset: int = 0,
        start: datetime | int | None = None,
        end: datetime | int | None = None,
    ) -> Iterator[FoundMessage]:
        """Find the messages of a topic that match all arguments, page by page.

        They come in the order of partitions and offsets. A `partition` and a span of
        storage time (from `start`, before `end`) narrow the search; the broker scans
        the rest. A `message_id` alone finds a message that waits for its time, or one
        of a transaction of the last seven days, in any topic. Raises UnknownTopic, and
        the errors of a call.
        """
        search = MessageSearch(topic, message_id, key, partition, offset, start, end)
        while (asked := search.next_call()) is not None:
            yield from search.read_reply(self.call(asked[0], **asked[1]))

    def letters(
        self: ControlCalls,
        group: str,
        *,
        saved: str | None = None,
        bodies: bool = False,
        **selection: Unpack[LetterOptions],
    ) -> Iterator[DeadLetter]:
        """Select the dead letters of a consumer group, page by page, in the order of
        their deaths.

        The letters have all properties in `selection`, or those of the selection that
        was `saved` by its name; by default they are the open ones. Those that die after
        the first page are left out. Raises UnknownGroup, UnknownTopic, and the errors
        of a call.
        """
        search = LetterSearch(group, saved, selection, bodies=bodies)
        while (args := search.next_args()) is not None:
            yield from search.read(self.call("dlq.list", **args))

    def plan(self: ControlCalls, name: str) -> ReplayPlan:
        """Return the replay plan of this name, to create it, to look at it, or to order
        what the broker shall do with it.
        """
        return ReplayPlan(self, name)

    def edit_letter(  # what an edit is
        self: ControlCalls,
        letter: DeadLetter,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        model: type[BaseModel] | BodyCheck | None = None,
        operator: str,
        reason: str,
    ) -> int:
        """Give an open dead letter another body, other headers (all of them), or both,
        for its group only; return the number of its edits.

        It stays the same message, and an inbox knows it as such. A new body is first
        checked against `model`: a pydantic model, or a function that raises an
        exception.
        Raises LocalProtocolError where it does not fit, Conflict where the letter is
        not open any more, or was edited since `letter` was read.
        """
        args = edit_args(
            letter, body=body, headers=headers, model=model, operator=operator, reason=reason
        )
        return int(self.call("dlq.edit", **args)["edits"])

    def revert_letter(self: ControlCalls, letter: DeadLetter, *, operator: str, reason: str) -> int:
        """Give an edited dead letter what was published again; return the number of its
        edits, this one included.
        """
        args = revert_args(letter, operator=operator, reason=reason)
        return int(self.call("dlq.edit", **args)["edits"])
