"""Half messages without a block: one message each, many of them under way at once.

`HalfTransaction` does the same in a block, with a thread that waits. Here the bundle
goes to the broker, the local work begins once the bundle is durable, and then the
decision goes out. If the decision never comes, the broker asks the checker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Self, TypeVar
from uuid import UUID

from txmq.client.protocol.sender.rows import micros_now
from txmq.client.protocol.sender.topics import TopicCache
from txmq.client.protocol.settings import ClientSettings, require_seconds
from txmq.client.protocol.transaction.buffer import Buffer
from txmq.client.protocol.transaction.decision import decide_request
from txmq.client.protocol.transaction.open_work import begin_work, end_work
from txmq.client.protocol.transaction.options import CHECK_AFTER_S
from txmq.client.protocol.transaction.parts import split_into_parts
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import ConfigError, TransactionAborted, UnknownTopic
from txmq.model.bundle import BundleState
from txmq.model.decider import ByChecker
from txmq.model.durations import Duration
from txmq.model.message import COMMIT, ROLLBACK, Decision, Message, check_name
from txmq.model.units import SECOND
from txmq.wire.bundle import BundleDescription, pack_part, unpack_bundle_receipt

# Future[bool], or what the face has in its place.
F = TypeVar("F", covariant=True)  # noqa: PLC0105


class HalfMessage(Generic[F]):
    """A half message that the broker has made durable; nobody sees it before the
    commit.

    `token` names the transaction in lists, logs and errors.
    """

    def __init__(self, token: UUID, decide: Callable[[Decision], F]) -> None:
        self.token, self.message_id = token, f"{token.hex}-0"
        self._decide = decide
        begin_work(token, self)

    def commit(self) -> F:
        """Send the message; the result is True if consumers can see it already.

        False: the message waits for earlier ones of its key. Fails with Conflict if the
        checker or an operator has decided otherwise. If the answer is missing (the
        error's `outcome` is "unknown"), call it again, or leave the decision to the
        checker.
        """
        end_work(self.token)
        return self._decide(COMMIT)

    def rollback(self) -> F:
        """Drop the message. Fails as `commit` does."""
        end_work(self.token)
        return self._decide(ROLLBACK)


@dataclass(frozen=True, slots=True)
class HalfBundle:
    """The bundle of one half message, before it is stored."""

    token: UUID
    topic: str
    _topics: TopicCache
    _buffer: Buffer
    _description: BundleDescription

    @classmethod
    def of(
        cls,
        topics: TopicCache,
        settings: ClientSettings,
        checker: str,
        topic: str,
        message: Message,
        partition: int | None,
        check_after: Duration,
    ) -> Self:
        """Check the arguments and build the bundle.

        Raises ConfigError for a client without a service, and as `send` does.
        """
        if not settings.service:
            raise no_service()
        buffer = Buffer(topics)
        buffer.add(topic, message, micros_now(), partition)
        decider = ByChecker(check_name(checker, "checker"))
        seconds = CHECK_AFTER_S
        if check_after != CHECK_AFTER_S:
            seconds = require_seconds("check_after", check_after)
        description = BundleDescription(decider, settings.service, (), int(seconds * SECOND))
        return cls(new_token(), topic, topics, buffer, description)

    def store_request(self) -> bytes:
        """Return the payload of the GROUP request.

        Raises UnknownTopic if the topic has been deleted meanwhile.
        """
        if self._topics.cached(self.topic) is None:
            raise UnknownTopic(f"There is no topic {self.topic!r} any more", hint="create it")
        batches = self._buffer.build(self.token).batches
        [part] = split_into_parts(self.token, self._description, batches)
        return b"".join(pack_part(part))

    def half_message(self, decide: Callable[[Decision], F]) -> HalfMessage[F]:
        """Return the stored half message, which is decided by that call."""
        telemetry = self._topics.telemetry
        if telemetry is None:
            return HalfMessage(self.token, decide)

        def traced(outcome: Decision) -> F:
            decided: F = telemetry.decide(self.token, outcome).around(lambda: decide(outcome))
            return decided

        return HalfMessage(self.token, traced)

    def decide_request(self, outcome: Decision) -> bytes:
        """Return the payload of the DECIDE request."""
        return decide_request(self.token, outcome, self._description.service)

    def require_stored(self, receipt: bytes) -> None:
        """Raise TransactionAborted if the bundle was rolled back before its receipt."""
        if unpack_bundle_receipt(receipt).state == BundleState.ROLLED_BACK:
            raise TransactionAborted(
                f"Transaction {self.token} was rolled back",
                hint="`txmq tx show` tells who rolled it back",
            )


def no_service() -> ConfigError:
    """Return the error of a client without a service, to which check-backs go."""
    return ConfigError(
        "service",
        "check-backs go to a service, and this client has none",
        hint="give it one: txmq.connect(url, service=...)",
    )
