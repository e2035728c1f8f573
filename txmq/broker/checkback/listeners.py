"""Who wants to know what becomes of transactions: metrics, and whoever keeps something
until a decision.

Told in the reactor's thread as it is recorded, when it may not be on disk yet: fit for
counting, not for acting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from txmq.core.events.transactions import ConflictSeen, Decided, JobDecided
from txmq.core.transactions.model import Transaction
from txmq.model.message import Decision

if TYPE_CHECKING:
    from txmq.broker.engine import Engine
    from txmq.core.events.base import Place

STORED_AT = Transaction._fields.index("stored_at")


class Watcher(Protocol):
    """Whoever wants to know."""

    def checked(self, kind: str, answer: Decision) -> None:
        """Somebody answered a check-back; `kind` is the decider's."""

    def decided(self, outcome: Decision, by: str, after_us: int) -> None:
        """A transaction was decided, so long after it was stored."""

    def job_decided(self, committed: int, rolled_back: int, by: str) -> None:
        """So many transactions of a job were decided, all at once."""

    def contradicted(self, by: str) -> None:
        """Somebody asked for the other outcome of a decided transaction."""

    def unresolvable(self) -> None:
        """A transaction was refused, because no resolver leads to the database that
        decides it.
        """


class Watching:
    """Tells all `watchers`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.watchers: list[Watcher] = []
        self.unresolvable_at = 0  # when a transaction was last refused for want of a resolver
        listeners: dict[type, Any] = {
            Decided: self._decided,
            JobDecided: self._job,
            ConflictSeen: self._contradicted,
        }
        for event, listener in listeners.items():
            engine.listen(event, listener)

    def checked(self, kind: str, answer: Decision) -> None:
        for watcher in self.watchers:
            watcher.checked(kind, answer)

    def unresolvable(self) -> None:
        self.unresolvable_at = self._engine.now()
        for watcher in self.watchers:
            watcher.unresolvable()

    def _decided(self, event: Decided, place: Place) -> None:
        if not self.watchers:
            return
        row: Any = self._engine.state.transactions.get(event.token)
        after, outcome = place.stored_at - row[STORED_AT], Decision(event.outcome)
        for watcher in self.watchers:
            watcher.decided(outcome, event.by, after)

    def _job(self, event: JobDecided, place: Place) -> None:
        del place
        for watcher in self.watchers:
            watcher.job_decided(len(event.winners), len(event.losers), event.by)

    def _contradicted(self, event: ConflictSeen, place: Place) -> None:
        del place
        for watcher in self.watchers:
            watcher.contradicted(event.by)
