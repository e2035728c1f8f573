"""The in-doubt flag: set on transactions that have been undecided for too long."""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import structlog

from txmq.core.transactions.model import get
from txmq.core.transactions.timers import PlanCheck
from txmq.errors import RequestRejected
from txmq.model.decider import ByJob
from txmq.model.units import SECOND
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.broker.engine.engine import Engine

TRANSACTIONS_PER_TICK = 250
log = structlog.get_logger()


class InDoubtService:
    """Visits each undecided transaction once, when it is `after_s` old, in the order in
    which they were stored. A decider that could not be reached makes no difference.

    Jobs have a time limit of their own: a day's write is not in doubt before it ends.
    """

    def __init__(self, engine: Engine, after_s: float) -> None:
        self._engine, self._limit_us = engine, int(after_s * SECOND)
        self._visited_to = b""  # the key of the last row that was visited

    def use(self, after_s: float) -> None:
        """Go by another age. Who has the flag keeps it."""
        self._limit_us, self._visited_to = int(after_s * SECOND), b""

    def tick(self) -> None:
        """Timer: flag the transactions that have reached the age."""
        if self._engine.store.read_only:
            return
        state, latest = self._engine.state, self._engine.now() - self._limit_us
        start = self._visited_to + b"\0" if self._visited_to else b""
        rows: Any = state.tables[t.UNDECIDED].range(start)
        for key, (token, *_database) in list(islice(rows, TRANSACTIONS_PER_TICK)):
            row = get(state, token)
            assert row is not None, "the table holds stored transactions only"
            if row.stored_at > latest:
                return
            before, self._visited_to = self._visited_to, key
            if not row.in_doubt and not isinstance(row.decider, ByJob):
                log.error(
                    "transaction.in_doubt", token=token.hex(), service=row.service, tries=row.tries
                )
                command = PlanCheck(token, row.check_at, row.tries, in_doubt=True)
                self._engine.submit(command, partial(self._flagged, before))
                if self._visited_to != key:
                    return

    def _flagged(self, before: bytes, reply: object) -> None:
        """Visit the row again if the flag was refused: the disk may be full."""
        if isinstance(reply, RequestRejected):
            self._visited_to = min(self._visited_to, before)
