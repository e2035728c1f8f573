"""Simulated consumer processes, and the knowledge of a group that replies give."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from txmq.core.state import failed_messages

Message = tuple[int, int, int]  # topic id, partition, offset


class HeldMessage(NamedTuple):
    """A message that a consumer holds."""

    attempt: int
    lease: int


@dataclass(eq=False)
class ConsumerProcess:
    """A consumer process.

    `flight`: replies on their way to it. `broken`: keys, with the lease number below
    which messages are returned. `back`: messages to be returned later. `careful`:
    everything has to arrive or to be returned before the next fetch.
    """

    kind: str  # the name that it joins
    name: str
    instance: str
    group: str = ""  # as the join told
    generation: int = 0
    replies: deque[list[tuple[Message, HeldMessage]]] = field(default_factory=deque)
    held: dict[Message, HeldMessage] = field(default_factory=dict)
    acks: list[Message] = field(default_factory=list)
    to_return: list[Message] = field(default_factory=list)
    careful: bool = False
    broken: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def static(self) -> bool:
        """True for every third consumer."""
        return self.kind != "cast" and int(self.name[1:]) % 3 == 0

    @property
    def ordered(self) -> bool:
        return self.kind not in ("many", "cast")


@dataclass
class ConsumerLedger:
    """Knowledge of a group's consumers, from replies alone."""

    done: set[Message] = field(default_factory=set)
    abandoned: set[Message] = field(default_factory=set)
    was_letter: set[Message] = field(default_factory=set)
    buried: set[Message] = field(default_factory=set)  # made letters by an operator
    deliveries: Counter[Message] = field(default_factory=Counter)  # those that count
    # consumers that were lost with a message
    deaths: Counter[Message] = field(default_factory=Counter)
    effects: set[Message] = field(default_factory=set)

    def skip(self, messages: set[Message]) -> None:
        """Note messages that an operator skips."""
        self.done |= messages
        self.effects |= messages

    def forget(self, messages: set[Message]) -> None:
        """Note messages that will be delivered as if for the first time."""
        for known in (self.done, self.abandoned, self.was_letter, self.effects):
            known.difference_update(messages)
        for message in messages:
            self.deliveries.pop(message, None)
            self.deaths.pop(message, None)

    def replayed(self, message: Message) -> None:
        """Note replayed messages, whose counts begin anew."""
        self.deliveries[message] = self.deaths[message] = 0

    def returned(self, messages: set[Message], *, died: bool) -> None:
        """Note returned messages. A death counts only if the message was isolated."""
        for message in messages:
            alone = died and self.deaths[message] >= failed_messages.ISOLATED_AFTER
            assert not alone or messages == {message}, (
                f"{message} was to be out alone, and was not: {messages}"
            )
            self.deliveries[message] -= not alone
            self.deaths[message] += died
