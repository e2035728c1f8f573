"""What a consumer of several brokers is, in both faces: a member of the group at each
of them, taken together.

Each broker shares out its own partitions. One that is away stops only these: its member
comes back by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Generic, Protocol, TypeVar

from txmq.client.log import get_logger
from txmq.client.protocol.consumer.fetched import ReceivedBatch
from txmq.client.protocol.consumer.settings import Settings
from txmq.client.protocol.consumer.settling import Stats
from txmq.errors import BrokerUnavailable, LocalProtocolError, TxmqError
from txmq.model.message import ReceivedMessage

log = get_logger()


class Part(Protocol):
    """A member at one broker, as both faces have it; its methods are described
    there.
    """

    @property
    def closed(self) -> bool: ...
    @property
    def stats(self) -> Stats: ...
    @property
    def serving(self) -> bool: ...
    @property
    def failure(self) -> TxmqError | None: ...
    @property
    def trouble(self) -> TxmqError | OSError | None: ...

    def nack(
        self,
        message: ReceivedMessage,
        delay: float | None = None,
        error: BaseException | str | None = None,
    ) -> None: ...
    def nack_batch(
        self,
        batch: ReceivedBatch,
        delay: float | None = None,
        error: BaseException | str | None = None,
    ) -> None: ...
    def ack_many(self, messages: Iterable[ReceivedMessage]) -> None: ...
    def nack_many(
        self,
        messages: Iterable[ReceivedMessage],
        delay: float | None = None,
        error: BaseException | str | None = None,
    ) -> None: ...
    def dead_letter(self, message: ReceivedMessage, reason: str) -> None: ...
    def postpone(self, message: ReceivedMessage, delay: float | None = None) -> None: ...
    def extend(self, message: ReceivedMessage, seconds: float | None = None) -> None: ...
    def give_back(self, messages: Iterable[ReceivedMessage]) -> None: ...
    @property
    def paused(self) -> frozenset[str]: ...
    def pause(self, *topics: str) -> None: ...
    def resume(self, *topics: str) -> None: ...
    def epoch_of(self, message: ReceivedMessage) -> int: ...


P = TypeVar("P", bound=Part)


class Several(Generic[P]):
    """Members of one group at several brokers. `parts` are they, in the order of the
    brokers.
    """

    settings: Settings
    parts: tuple[P, ...]
    _turn = 0

    @property
    def closed(self) -> bool:
        """Whether it hands out nothing more."""
        return all(part.closed for part in self.parts)

    @property
    def stats(self) -> Stats:
        """What its members have done so far, together."""
        each = [part.stats for part in self.parts]
        return Stats(
            **{field.name: sum(getattr(one, field.name) for one in each) for field in fields(Stats)}
        )

    def part_of(self, delivered: ReceivedMessage | ReceivedBatch) -> P:
        """The member that a message, or batch, came to. Raises LocalProtocolError where
        it is none of its own.
        """
        owner = getattr(getattr(delivered, "parcel", None), "owner", None)
        for part in self.parts:
            if part is owner:
                return part
        raise LocalProtocolError(
            "no message of this consumer", hint="settle it as it was delivered, where it was"
        )

    def nack(
        self,
        message: ReceivedMessage,
        delay: float | None = None,
        error: BaseException | str | None = None,
    ) -> None:
        """The message failed; it comes again after `delay` seconds, or by the policy of
        the group.
        """
        self.part_of(message).nack(message, delay, error)

    def nack_batch(
        self,
        batch: ReceivedBatch,
        delay: float | None = None,
        error: BaseException | str | None = None,
    ) -> None:
        """All messages of the batch failed, but for those that were acked or nacked
        alone.
        """
        self.part_of(batch).nack_batch(batch, delay, error)

    def ack_many(self, messages: Iterable[ReceivedMessage]) -> None:
        """All of these messages are processed."""
        for part, own in self._by_part(messages):
            part.ack_many(own)

    def nack_many(
        self,
        messages: Iterable[ReceivedMessage],
        delay: float | None = None,
        error: BaseException | str | None = None,
    ) -> None:
        """All of these messages failed, but for those that are not in hand any more."""
        for part, own in self._by_part(messages):
            part.nack_many(own, delay, error)

    def dead_letter(self, message: ReceivedMessage, reason: str) -> None:
        """The message goes to the dead letters at once."""
        self.part_of(message).dead_letter(message, reason)

    def postpone(self, message: ReceivedMessage, delay: float | None = None) -> None:
        """The message comes again after `delay` seconds, and this delivery does not
        count.
        """
        self.part_of(message).postpone(message, delay)

    def extend(self, message: ReceivedMessage, seconds: float | None = None) -> None:
        """The message's handler needs longer; as `Consumer.extend`."""
        self.part_of(message).extend(message, seconds)

    def give_back(self, messages: Iterable[ReceivedMessage]) -> None:
        """Hands messages back as if they had never been taken."""
        for message in messages:
            self.part_of(message).give_back([message])

    def pause(self, *topics: str) -> None:
        """Hands out nothing until `resume`, of these topics or at all; as the one of a
        single broker.
        """
        for part in self.parts:
            part.pause(*topics)

    def resume(self, *topics: str) -> None:
        """Goes on after `pause`."""
        for part in self.parts:
            part.resume(*topics)

    @property
    def paused(self) -> frozenset[str]:
        """The topics of which it hands out nothing for now, of whatever broker."""
        return frozenset().union(*(part.paused for part in self.parts))

    def epoch_of(self, message: ReceivedMessage) -> int:
        """The group's epoch when the message came."""
        return self.part_of(message).epoch_of(message)

    def _by_part(
        self, messages: Iterable[ReceivedMessage]
    ) -> Iterable[tuple[P, list[ReceivedMessage]]]:
        """The messages of each member, in their order."""
        found: dict[P, list[ReceivedMessage]] = {}
        for message in messages:
            found.setdefault(self.part_of(message), []).append(message)
        return found.items()

    def _in_turn(self) -> Sequence[P]:
        """Its members, beginning with another one each time, so that a busy broker does
        not keep others waiting.
        """
        self._turn = (self._turn + 1) % len(self.parts)
        return (*self.parts[self._turn :], *self.parts[: self._turn])

    def _have_joined(self) -> bool:
        """Whether no more need be waited for."""
        return all(part.serving for part in self.parts) or any(part.failure for part in self.parts)

    def _not_joined(self, timeout: float) -> TxmqError | None:
        """Why it cannot begin: one of them was refused, or none has joined in time.
        Others come when they can.
        """
        away = [part for part in self.parts if not part.serving]
        failure = next((part.failure for part in self.parts if part.failure is not None), None)
        if failure is None and len(away) < len(self.parts):
            for part in away:
                log.warning(
                    "consumer.broker_away", group=self.settings.group, error=str(part.trouble)
                )
            return None
        why = "; ".join(str(part.trouble) for part in away if part.trouble)
        return failure or BrokerUnavailable(
            f"no broker let the consumer join within {timeout} s: {why}"
        )
