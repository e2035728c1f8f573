"""A database as far as transactions see one: rows under locks, token rows, fences,
clients whose connection dies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred

from txmq.model.message import Decision

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from tests.simulation.clock import Clock
    from txmq.core.transactions.model import Transaction


class Fenced(Exception):
    """A resolver was there first: the transaction can only roll back."""


class Database:
    """Outlives every broker. A row's version grows by one with each committed
    transaction on its key.
    """

    def __init__(self, clock: Clock, rng: Random) -> None:
        self._clock, self._rng = clock, rng
        self.versions: dict[str, int] = {}
        self.committed: dict[bytes, tuple[str, int]] = {}
        self.fences: set[bytes] = set()
        self._inserted: set[bytes] = set()
        self._queues: dict[str, list[Deferred[None]]] = {}

    async def lock(self, key: str) -> int:
        """The next version of the row, once nobody else holds it."""
        queue = self._queues.setdefault(key, [])
        mine: Deferred[None] = Deferred()
        queue.append(mine)
        if queue[0] is mine:
            mine.callback(None)
        await mine
        return self.versions.get(key, 0) + 1

    def insert_token(self, token: bytes) -> None:
        """The token row, not yet visible. Raises Fenced."""
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

    def knows(self, decider: tuple[Any, ...]) -> bool:
        """As a resolver of the broker's: this is the only database."""
        return bool(decider[0] == "postgres")

    def status(self) -> tuple[()]:
        """As a resolver of the broker's: nothing to be told."""
        return ()

    def ask(
        self, token: bytes, row: Transaction, answered: Callable[[bytes, Decision, str, str], None]
    ) -> None:
        """As a resolver of the broker's."""
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
