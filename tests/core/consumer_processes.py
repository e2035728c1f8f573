"""What a simulated consumer process has in hand, and what is known of a group from replies alone."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

Message = tuple[int, int, int]  # topic id, partition, offset


class Held(NamedTuple):
    """A message in a consumer's hands."""

    attempt: int
    lease: int


@dataclass(eq=False)
class Consumer:
    """A consumer process. `flight`: replies on their way to it; `broken`: keys of which leases below must go back.

    `back`: messages to be given back when it comes to that. `careful`: before it fetches, all is here or given back.
    """

    group: str
    name: str
    instance: str
    generation: int = 0
    flight: deque[list[tuple[Message, Held]]] = field(default_factory=deque)
    hand: dict[Message, Held] = field(default_factory=dict)
    acks: list[Message] = field(default_factory=list)
    back: list[Message] = field(default_factory=list)
    careful: bool = False
    broken: dict[tuple[int, int], int] = field(default_factory=dict)


@dataclass
class Ledger:
    """What a group's consumers know to be true, from replies alone."""

    done: set[Message] = field(default_factory=set)
    abandoned: set[Message] = field(default_factory=set)
    was_letter: set[Message] = field(default_factory=set)
    deliveries: Counter[Message] = field(default_factory=Counter)
    effects: set[Message] = field(default_factory=set)
