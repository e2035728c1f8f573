"""Half messages that nobody waits for one by one: many of them are under way at once,
and share frames.

What `HalfTransaction` does in a block, for one message and without a thread that waits:
its group goes to the broker, the local work begins once that is durable, and then the
decision goes out. Should it never come, the broker asks the checker. Both faces stand
on it: it knows no connection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Self, TypeVar
from uuid import UUID

from txmq.client.blocking.sender.producer import micros_now
from txmq.client.blocking.transaction.bundles import EPOCH, parts_of
from txmq.client.blocking.transaction.options import CHECK_AFTER_S, seconds
from txmq.client.blocking.transaction.transaction import MICROSECONDS
from txmq.client.protocol.sender.topics import Topics
from txmq.client.protocol.settings import Settings
from txmq.client.protocol.transaction.buffer import Buffer
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import ConfigError, TransactionAborted, UnknownTopic
from txmq.model.bundle import GroupState
from txmq.model.message import COMMIT, ROLLBACK, Decision, Message, check_name
from txmq.wire.group import Description, pack_part, unpack_group_receipt
from txmq.wire.headers import Decide, pack_decide, unpack_decide_receipt

F = TypeVar("F", covariant=True)  # Future[bool], or Deferred[bool] on the Twisted face


class HalfMessage(Generic[F]):
    """A half message that the broker has on its disk: nobody sees it before it is
    committed.

    `token` names it everywhere, `message_id` is that of the message.
    """

    def __init__(self, token: UUID, decide: Callable[[Decision], F]) -> None:
        self.token, self.message_id = token, f"{token.hex}-0"
        self._decide = decide

    def commit(self) -> F:
        """Sends the message. What comes is whether consumers can see it; else it waits
        for earlier ones of its key.

        Fails with Conflict where the checker or an operator has decided otherwise.
        Where the answer is missing (its `outcome` is "unknown"), do it again, or leave
        it to the checker.
        """
        return self._decide(COMMIT)

    def rollback(self) -> F:
        """Drops the message; otherwise as `commit`."""
        return self._decide(ROLLBACK)


@dataclass(frozen=True, slots=True)
class HalfGroup:
    """The group of one half message, yet to be stored."""

    token: UUID
    topic: str
    _topics: Topics
    _buffer: Buffer
    _description: Description

    @classmethod
    def of(
        cls,
        topics: Topics,
        settings: Settings,
        checker: str,
        topic: str,
        message: Message,
        partition: int | None,
        check_after: float,
    ) -> Self:
        """Raises ConfigError for a client without a service, and as a send for a
        message that cannot be.
        """
        if not settings.service:
            hint = "give the client one: txmq.connect(url, service=...)"
            raise ConfigError("service", "check-backs go to a service", hint=hint)
        buffer = Buffer(topics)
        buffer.add(topic, message, micros_now(), partition)
        after = (
            CHECK_AFTER_S if check_after == CHECK_AFTER_S else seconds("check_after", check_after)
        )
        decider = ("checker", check_name(checker, "checker"))
        described = Description(decider, settings.service, (), int(after * MICROSECONDS))
        return cls(new_token(), topic, topics, buffer, described)

    def payload(self) -> bytes:
        """Of its GROUP, by what is known of the topic now. Raises UnknownTopic where
        that is nothing any more.
        """
        if self._topics.known(self.topic) is None:
            raise UnknownTopic(f"there is no topic {self.topic!r} any more", hint="create it")
        [part] = parts_of(self.token, self._description, self._buffer.build(self.token).batches)
        return b"".join(pack_part(part))

    def decision(self, outcome: Decision) -> bytes:
        """The payload of its DECIDE."""
        by = f"producer {self._description.service}"
        return pack_decide(Decide(outcome, self.token.bytes, EPOCH, by))

    def check_stored(self, payload: bytes) -> None:
        """Raises TransactionAborted where it was rolled back before its receipt
        came.
        """
        if unpack_group_receipt(payload).state == GroupState.ROLLED_BACK:
            raise TransactionAborted(
                f"transaction {self.token} was rolled back", hint="txmq tx show tells by whom"
            )


def is_published(payload: bytes) -> bool:
    """What the receipt of a decision tells."""
    return unpack_decide_receipt(payload).state == GroupState.PUBLISHED
