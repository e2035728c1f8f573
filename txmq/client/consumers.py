"""Consuming from several brokers: a member of the group at each of them, and one place where their messages come out.

Each broker shares out its own partitions. One that is away stops only these: its member comes back by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import partial
from threading import Condition, Event
from typing import TYPE_CHECKING, Self, TypeVar

from txmq.client.consumer import Consumer
from txmq.client.consuming.hands import Hands
from txmq.client.consuming.parcels import ReceivedBatch
from txmq.client.consuming.settings import Settings
from txmq.client.consuming.settling import Stats
from txmq.client.core import Core
from txmq.client.log import get_logger
from txmq.client.runner import run_handler
from txmq.client.taking import Taking
from txmq.client.together import together
from txmq.errors import BrokerUnavailable, LocalProtocolError
from txmq.message import ReceivedMessage

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection  # noqa: N812 (a class, whatever its name)

CLOSE_S = 10.0
T = TypeVar("T")
log = get_logger()


class Consumers(Taking):
    """Members of one group at several brokers. For any number of threads, and for use with `with`.

    Made by `consumer` of a client of several brokers; as a Consumer of one otherwise. `parts` are its members, in the
    order of the brokers.
    """

    def __init__(self, cores: Sequence[Core], settings: Settings) -> None:
        self.settings = settings
        self._changed = Condition()
        self.parts = tuple(Consumer(core, settings, self._changed) for core in cores)
        self._handlers = 0
        self._turn = 0

    def join(self, timeout: float) -> None:
        """Becomes a member wherever a broker answers in time. Called once, by the client.

        Raises BrokerUnavailable where none does, and why one refuses.
        """
        for part in self.parts:
            part.start()
        with self._changed:
            self._changed.wait_for(self._all_have_joined, timeout)
            away = [part for part in self.parts if not part.serving]
            failure = next((part.failure for part in self.parts if part.failure is not None), None)
        if failure is not None or len(away) == len(self.parts):
            together([part.abandon for part in self.parts])
            why = "; ".join(str(part.trouble) for part in away if part.trouble)
            raise failure or BrokerUnavailable(f"no broker let the consumer join within {timeout} s: {why}")
        for part in away:
            log.warning("consumer.broker_away", group=self.settings.group, error=str(part.trouble))

    def _all_have_joined(self) -> bool:
        return all(part.serving for part in self.parts) or any(part.failure for part in self.parts)

    @property
    def closed(self) -> bool:
        """Whether it hands out nothing more."""
        return all(part.closed for part in self.parts)

    @property
    def stats(self) -> Stats:
        """What its members have done so far, together."""
        each = [part.stats for part in self.parts]
        return Stats(**{field.name: sum(getattr(one, field.name) for one in each) for field in fields(Stats)})

    def taken(self, take: Callable[[Hands, float], T], now: float) -> T | None:
        """What `take` finds at the first of its members that has something."""
        found = (part.taken(take, now) for part in self._in_turn())
        return next(filter(None, found), None)

    def _in_turn(self) -> Iterable[Consumer]:
        """Its members, beginning with another one each time, so that a busy broker does not keep others waiting."""
        self._turn = (self._turn + 1) % len(self.parts)
        return (*self.parts[self._turn :], *self.parts[: self._turn])

    def part_of(self, delivered: ReceivedMessage | ReceivedBatch) -> Consumer:
        """The member that a message, or batch, came to. Raises LocalProtocolError where it is none of its own."""
        parcel = getattr(delivered, "parcel", None)
        owner = getattr(parcel, "owner", None)
        if not isinstance(owner, Consumer) or owner not in self.parts:
            raise LocalProtocolError("no message of this consumer", hint="settle it as it was delivered, where it was")
        return owner

    def ack(self, message: ReceivedMessage, *, wait: bool = False) -> None:
        """The message is processed."""
        self.part_of(message).ack(message, wait=wait)

    def ack_batch(self, batch: ReceivedBatch, *, wait: bool = False) -> None:
        """All messages of the batch are processed, but for those that were acked or nacked alone."""
        self.part_of(batch).ack_batch(batch, wait=wait)

    def nack(
        self, message: ReceivedMessage, delay: float | None = None, error: BaseException | str | None = None
    ) -> None:
        """The message failed; it comes again after `delay` seconds, or by the policy of the group."""
        self.part_of(message).nack(message, delay, error)

    def nack_batch(
        self, batch: ReceivedBatch, delay: float | None = None, error: BaseException | str | None = None
    ) -> None:
        """All messages of the batch failed, but for those that were acked or nacked alone."""
        self.part_of(batch).nack_batch(batch, delay, error)

    def dead_letter(self, message: ReceivedMessage, reason: str) -> None:
        """The message goes to the dead letters at once."""
        self.part_of(message).dead_letter(message, reason)

    def postpone(self, message: ReceivedMessage, delay: float | None = None) -> None:
        """The message comes again after `delay` seconds, and this delivery does not count."""
        self.part_of(message).postpone(message, delay)

    def give_back(self, messages: Iterable[ReceivedMessage]) -> None:
        """Hands messages back as if they had never been taken."""
        for message in messages:
            self.part_of(message).give_back([message])

    def pause(self) -> None:
        """Hands out nothing until `resume`; as `Consumer.pause`."""
        for part in self.parts:
            part.pause()

    def resume(self) -> None:
        """Goes on after `pause`."""
        for part in self.parts:
            part.resume()

    def holds(self, message: ReceivedMessage) -> bool:
        """Whether the message is in hand, neither acked nor nacked."""
        return self.part_of(message).holds(message)

    def epoch_of(self, message: ReceivedMessage) -> int:
        """The group's epoch when the message came."""
        return self.part_of(message).epoch_of(message)

    def inbox_of(self, message: ReceivedMessage) -> str:
        """The group that the inbox counts the message in: offsets of several brokers are told apart."""
        return self.part_of(message).inbox_name

    def count(self, *, duplicates: int = 0, retried: int = 0) -> None:
        """Adds to the stats what only handlers know."""
        self.parts[0].count(duplicates=duplicates, retried=retried)

    def run(
        self,
        handler: Callable[..., object],
        *,
        inbox: Callable[[], Connection] | None = None,
        threads: int = 1,
        batch: int | None = None,
        batch_wait: float = 0.0,
        idle_exit: float | None = None,
        stop: Event | None = None,
    ) -> None:
        """Calls the handler for each message, of whatever broker; as `Consumer.run`."""
        run_handler(
            self,
            handler,
            inbox,
            threads=threads,
            batch=batch,
            batch_wait=batch_wait,
            idle_exit=idle_exit,
            stop=stop,
        )

    def close(self, timeout: float = CLOSE_S) -> None:
        """Leaves the group everywhere, as `Consumer.close` does."""
        deadline = time.monotonic() + timeout
        for part in self.parts:
            part.take_no_more()
        with self._changed:
            self._changed.wait_for(lambda: not self._handlers, timeout)
        together([partial(part.close, max(0.0, deadline - time.monotonic())) for part in self.parts])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
