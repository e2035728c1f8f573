"""What a simulated consumer process has in hand, and what is known of a group from
replies alone.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from txmq.core.consumers import poison

Message = tuple[int, int, int]  # topic id, partition, offset


class Held(NamedTuple):
    """A message in a consumer's hands."""

    attempt: int
    lease: int


@dataclass(eq=False)
class Consumer:
    """A consumer process. `flight`: replies on their way to it; `broken`: keys of which
    leases below must go back.

    `back`: messages to be given back when it comes to that. `careful`: before it
    fetches, all is here or given back.
    """

    kind: str  # the name that it joins
    name: str
    instance: str
    group: str = ""  # as the join told
    generation: int = 0
    flight: deque[list[tuple[Message, Held]]] = field(default_factory=deque)
    hand: dict[Message, Held] = field(default_factory=dict)
    acks: list[Message] = field(default_factory=list)
    back: list[Message] = field(default_factory=list)
    careful: bool = False
    broken: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def static(self) -> bool:
        """Every third one is."""
        return self.kind != "cast" and int(self.name[1:]) % 3 == 0

    @property
    def ordered(self) -> bool:
        return self.kind not in ("many", "cast")


@dataclass
class Ledger:
    """What a group's consumers know to be true, from replies alone."""

    done: set[Message] = field(default_factory=set)
    abandoned: set[Message] = field(default_factory=set)
    was_letter: set[Message] = field(default_factory=set)
    deliveries: Counter[Message] = field(default_factory=Counter)  # those that count
    deaths: Counter[Message] = field(
        default_factory=Counter
    )  # consumers that were lost with a message
    effects: set[Message] = field(default_factory=set)

    def skip(self, messages: set[Message]) -> None:
        """An operator says that these are done with."""
        self.done |= messages
        self.effects |= messages

    def forget(self, messages: set[Message]) -> None:
        """These come again as if they never had."""
        for known in (self.done, self.abandoned, self.was_letter, self.effects):
            known.difference_update(messages)
        for message in messages:
            self.deliveries.pop(message, None)
            self.deaths.pop(message, None)

    def replayed(self, message: Message) -> None:
        """All counts begin anew."""
        self.deliveries[message] = self.deaths[message] = 0

    def given_back(self, messages: set[Message], *, died: bool) -> None:
        """These are no longer out. A death counts only for what had been lost often
        enough to go out alone.
        """
        for message in messages:
            alone = died and self.deaths[message] >= poison.ALONE
            assert not alone or messages == {message}, (
                f"{message} was to be out alone, and was not: {messages}"
            )
            self.deliveries[message] -= not alone
            self.deaths[message] += died
