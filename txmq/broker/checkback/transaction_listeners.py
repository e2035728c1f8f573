"""Listeners to the decisions and check-backs of transactions, such as metrics.

Events arrive in the reactor's thread as they are recorded, and may not be on disk yet:
fit for counting, not for acting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from txmq.core.events.transactions import ConflictSeen, Decided, JobDecided
from txmq.core.transactions.model import Transaction
from txmq.model.decider import DECIDERS, read_decider
from txmq.model.message import Decision

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.broker.engine.engine import Engine
    from txmq.core.events.base import RecordContext
    from txmq.model.decider import Decider

STORED_AT = Transaction._fields.index("stored_at")
DECIDER = Transaction._fields.index("decider")


class TransactionListener(Protocol):
    """A listener to all transactions."""

    def checked(self, kind: str, answer: Decision) -> None:
        """Note the answer to a check-back; `kind` is the decider's."""

    def decided(self, outcome: Decision, by: str, after_us: int) -> None:
        """Note a decision, and the time since its transaction was stored."""

    def job_decided(self, committed: int, rolled_back: int, by: str) -> None:
        """Note the numbers of transactions that one decision of a job decided."""

    def contradicted(self, by: str) -> None:
        """Note a request for the other outcome of a decided transaction."""

    def unresolvable(self) -> None:
        """Note a transaction that was refused: no resolver leads to its database."""


class TransactionListeners:
    """The listeners to transactions: to `all` of them, to the decisions of one kind of
    decider, and `by_token` to one decision (each called once).
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.all: list[TransactionListener] = []
        self.by_token: dict[bytes, Callable[[bytes], None]] = {}
        self._by_kind: dict[object, Callable[[Decided, Decider], None]] = {}
        self.unresolvable_at = 0  # when a transaction was last refused for want of a resolver
        engine.listen(Decided, self._decided)
        engine.listen(JobDecided, self._job_decided)
        engine.listen(ConflictSeen, self._contradicted)

    def on_decision_by(
        self, decider: type[Decider], listener: Callable[[Decided, Decider], None]
    ) -> None:
        """Call `listener` with each decision on a transaction of this kind of
        decider.
        """
        [kind] = [kind for kind, known in DECIDERS.items() if known is decider]
        self._by_kind[kind] = listener

    def checked(self, kind: str, answer: Decision) -> None:
        for listener in self.all:
            listener.checked(kind, answer)

    def unresolvable(self) -> None:
        self.unresolvable_at = self._engine.now()
        for listener in self.all:
            listener.unresolvable()

    def _decided(self, event: Decided, context: RecordContext) -> None:
        if (waiting := self.by_token.pop(event.token, None)) is not None:
            waiting(event.token)
        row: Any = self._engine.state.transactions.get(event.token)
        if (interested := self._by_kind.get(row[DECIDER][0])) is not None:
            interested(event, read_decider(row[DECIDER]))
        if self.all:
            after_us, outcome = context.stored_at - row[STORED_AT], Decision(event.outcome)
            for listener in self.all:
                listener.decided(outcome, event.by, after_us)

    def _job_decided(self, event: JobDecided, _context: RecordContext) -> None:
        for listener in self.all:
            listener.job_decided(len(event.winners), len(event.losers), event.by)

    def _contradicted(self, event: ConflictSeen, _context: RecordContext) -> None:
        for listener in self.all:
            listener.contradicted(event.by)
