"""What one pass of recovery found, and since when it has been seen."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, NamedTuple
from uuid import UUID

from txmq.tx.orphans import Action, Word
from txmq.tx.postgres.prepared_list import Hold, Prepared
from txmq.tx.xid import Branch

NOTHING_HELD: Final = Hold()
Key = tuple[str, str]  # where: a database's name or a broker's URL; what: a gid or a token


@dataclass(frozen=True, slots=True)
class Finding:
    """A prepared branch of a database, or a group at a broker that somebody else
    decides.

    `action` is what is to be done; `done`: it has been. `needs_hand`: it never will be
    without an operator.
    """

    where: str
    what: str  # the gid; of a group, its token
    token: UUID | None  # None: foreign
    age_s: float
    action: Action
    reason: str
    word: Word | None = None  # how the home broker decided; None: there is none
    done: bool = False
    needs_hand: bool = False
    prepared: Prepared | None = None  # None: it is a group
    hold: Hold = NOTHING_HELD

    @property
    def key(self) -> Key:
        return self.where, self.what


class Report(NamedTuple):
    """What a pass found, and which databases and brokers could not be asked: (name or
    URL, why).
    """

    findings: tuple[Finding, ...]
    troubles: tuple[tuple[str, str], ...]

    @property
    def waiting(self) -> bool:
        """Whether another pass, later, may do more."""
        return any(one.action is Action.WAIT for one in self.findings)

    @property
    def needs_hand(self) -> bool:
        """Whether something stays as it is until an operator has seen to it."""
        return bool(self.troubles) or any(one.needs_hand for one in self.findings)


class Sighting(NamedTuple):
    """Something that was found in an earlier pass; branches with their transaction's
    id, which was prepared.
    """

    since: float
    branch: Branch | None = None
    xid: int = 0


class Sightings:
    """What earlier passes have found, and for how long it has stood, by this process's
    own clock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: dict[Key, Sighting] = {}

    def age(self, key: Key, branch: Branch | None = None, xid: int = 0) -> float:
        """Seconds since the first pass that found it."""
        now = self._clock()
        return now - self._seen.setdefault(key, Sighting(now, branch, xid)).since

    def gone(self, where: str, present: Collection[str]) -> list[tuple[Key, Sighting]]:
        """What had been found there, and is there no more."""
        return [
            (key, seen)
            for key, seen in self._seen.items()
            if key[0] == where and key[1] not in present
        ]

    def drop(self, key: Key) -> None:
        """It has ended, and how is known."""
        self._seen.pop(key, None)
