"""Findings of a recovery pass, and the times of their first observation."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, NamedTuple
from uuid import UUID

from txmq.tx.orphans import BranchAction, KnownOutcome
from txmq.tx.postgres.prepared_list import HeldLocks, PreparedTransaction
from txmq.tx.xid import XaBranch

NO_LOCKS: Final = HeldLocks()
Key = tuple[str, str]  # the place and the name of a finding


@dataclass(frozen=True, slots=True)
class Finding:
    """A prepared branch in a database, or a bundle that another broker decides.

    `done`: the `action` was carried out. `needs_operator`: recovery will not do it.
    """

    place: str  # name of the database, or URL of the broker
    name: str  # gid of the branch, or token of the bundle
    token: UUID | None  # None = foreign
    age_s: float
    action: BranchAction
    reason: str
    outcome: KnownOutcome | None = None  # by the home broker; None = there is none
    done: bool = False
    needs_operator: bool = False
    prepared: PreparedTransaction | None = None  # None = a bundle
    locks: HeldLocks = NO_LOCKS

    @property
    def key(self) -> Key:
        return self.place, self.name


class PassReport(NamedTuple):
    """The findings of a pass, and the places that failed with their errors."""

    findings: tuple[Finding, ...]
    troubles: tuple[tuple[str, str], ...]

    @property
    def waiting(self) -> bool:
        """Return whether a later pass may do more."""
        return any(one.action is BranchAction.WAIT for one in self.findings)

    @property
    def needs_operator(self) -> bool:
        """Return whether something needs an operator."""
        return bool(self.troubles) or any(one.needs_operator for one in self.findings)


class Observation(NamedTuple):
    """The first observation of a finding; the other fields: of a prepared branch.

    `timeline` is that of the server that had it last.
    """

    since: float
    branch: XaBranch | None = None
    xid: int = 0
    timeline: int = 0


class Observations:
    """The findings of earlier passes, with their ages by this process's clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._observed: dict[Key, Observation] = {}

    def age(
        self, key: Key, branch: XaBranch | None = None, xid: int = 0, timeline: int = 0
    ) -> float:
        """Return the seconds since the first observation; record a new finding."""
        now = self._clock()
        known = self._observed.get(key)
        since = now if known is None else known.since
        self._observed[key] = Observation(since, branch, xid, timeline)
        return now - since

    def gone(self, place: str, present: Collection[str]) -> list[tuple[Key, Observation]]:
        """Return the earlier findings at a place that are not present any more."""
        return [
            (key, observation)
            for key, observation in self._observed.items()
            if key[0] == place and key[1] not in present
        ]

    def drop(self, key: Key) -> None:
        """Drop a finding whose end is known."""
        self._observed.pop(key, None)
