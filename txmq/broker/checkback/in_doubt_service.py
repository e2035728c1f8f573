"""What has been undecided for too long is flagged in doubt, whether anybody could be
asked about it or not.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import structlog

from txmq.core.transactions.model import get
from txmq.core.transactions.timers import PlanCheck
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.broker.engine import Engine

AT_ONCE = 250  # transactions in one look
SECOND = 1_000_000
log = structlog.get_logger()


class Doubts:
    """Looks at each undecided transaction once, when it is `after_s` old; the first
    stored comes first.

    Jobs have their own time: a day's write is not in doubt before it is over.
    """

    def __init__(self, engine: Engine, after_s: float) -> None:
        self._engine, self._limit = engine, int(after_s * SECOND)
        self._after = b""  # the row that was looked at last

    def tick(self) -> None:
        """Timer: flag those that have come of age."""
        state, latest = self._engine.state, self._engine.now() - self._limit
        rows: Any = state.tables[t.UNDECIDED].range(self._after + b"\0" if self._after else b"")
        for key, (token,) in list(islice(rows, AT_ONCE)):
            row = get(state, token)
            assert row is not None, "it is undecided, so it is stored"
            if row.stored_at > latest:
                return
            self._after = key
            if not row.in_doubt and row.decider[0] != "job":
                log.error(
                    "transaction.in_doubt", token=token.hex(), service=row.service, tries=row.tries
                )
                self._engine.submit(
                    PlanCheck(token, row.check_at, row.tries, in_doubt=True), _ignore
                )


def _ignore(reply: object) -> None:
    """The flag is told by the state."""
