"""A database as transactions see one: rows under locks, token rows and token fences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twisted.internet.defer import Deferred

from txmq.broker.checkback.resolvers import LeaseStatus
from txmq.model.decider import ByPostgres, DatabaseId, Decider
from txmq.model.message import Decision

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from tests.simulation.clock import SimulatedClock
    from txmq.core.transactions.model import Transaction


class Fenced(Exception):
    """A resolver has fenced the token, so the transaction can only roll back."""


class SimulatedDatabase:
    """A database that outlives every broker.

    The version of a row grows by one with each committed transaction on its key. The
    broker uses it through the interface of its resolvers.
    """

    def __init__(self, clock: SimulatedClock, rng: Random) -> None:
        self._clock, self._rng = clock, rng
        self.versions: dict[str, int] = {}
        self.committed: dict[bytes, tuple[str, int]] = {}
        self.fences: set[bytes] = set()
        self._inserted: set[bytes] = set()
        self._queues: dict[str, list[Deferred[None]]] = {}

    async def lock(self, key: str) -> int:
        """Return the next version of the row, once no other transaction locks it."""
        queue = self._queues.setdefault(key, [])
        mine: Deferred[None] = Deferred()
        queue.append(mine)
        if queue[0] is mine:
            mine.callback(None)
        await mine
        return self.versions.get(key, 0) + 1

    def insert_token(self, token: bytes) -> None:
        """Insert the token row, which is invisible until COMMIT. Raises Fenced."""
        if token in self.fences:
            raise Fenced
        self._inserted.add(token)

    def commit(self, token: bytes, key: str, version: int) -> None:
        self._inserted.discard(token)
        self.committed[token] = (key, version)
        self.versions[key] = version
        self._unlock(key)

    def roll_back(self, token: bytes, key: str) -> None:
        self._inserted.discard(token)
        self._unlock(key)

    def _unlock(self, key: str) -> None:
        queue = self._queues[key]
        queue.pop(0)
        if queue:
            queue[0].callback(None)

    def may_resolve(self, decider: Decider) -> bool:
        """Return whether the database decides: it is the only one."""
        return decider.kind == "postgres"

    def left_behind(self, decider: ByPostgres) -> str:
        """Return that there was no failover."""
        del decider
        return ""

    def lease_of(self, database: DatabaseId) -> LeaseStatus:
        """Return that the broker asks for no lease."""
        del database
        return LeaseStatus(held=False, directory=None)

    def note_bundle(self, database: DatabaseId | ByPostgres) -> None:
        """Do nothing: the database has no copies."""
        del database

    def reports(self) -> dict[DatabaseId, int]:
        """Return that no reports are stored."""
        return {}

    def status(self) -> tuple[()]:
        """Return the state of no resolver: the simulation has none to report."""
        return ()

    def resolve(
        self, token: bytes, row: Transaction, answered: Callable[[bytes, Decision, str, str], None]
    ) -> None:
        """Answer a check-back after a while."""
        del row
        self._clock.callLater(self._rng.random() * 0.02, self._answer, token, answered)

    def _answer(self, token: bytes, answered: Callable[[bytes, Decision, str, str], None]) -> None:
        if self._rng.random() < 0.2:
            answered(token, Decision.UNKNOWN, "resolver", "no connection")
        elif token in self.committed:
            answered(token, Decision.COMMIT, "resolver", "")
        elif token in self._inserted:
            answered(token, Decision.UNKNOWN, "resolver", "in progress")
        else:
            self.fences.add(token)
            answered(token, Decision.ROLLBACK, "resolver", "")
