"""Records lost to a repair or a restore of the log, and what must not be concluded from
absence.

Among the records that cannot be read may be the decision of any transaction that was
stored before them, and all of a transaction that was begun by then. Where a database or
a checker decides, the broker can still ask. What this broker would decide by itself,
because nothing says otherwise, is left to an operator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from txmq.core.transactions.model import token_time
from txmq.model.units import HOUR

if TYPE_CHECKING:
    from txmq.core.state.state import State
    from txmq.core.transactions.model import Transaction

CLOCK_SKEW: Final = HOUR  # by which the clock of a token's maker may have been ahead
WHY: Final = (
    "records of the log were lost since it was stored, and its decision may have been among them"
)


def apply_lost(state: State, end: int) -> None:
    """Apply: the log was repaired, and records before position `end` were lost."""
    state.lost_log_end, state.lost_before_time = end, 0


def apply_booted(state: State, at: int) -> None:
    """Apply: all that was lost had been stored before the time `at`."""
    if state.lost_log_end and not state.lost_before_time:
        state.lost_before_time = at


def may_have_lost_decision(state: State, row: Transaction) -> bool:
    """Return whether the decision of an undecided transaction may have been lost."""
    restored = state.restores[-1].position if state.restores else 0
    return row.ticket < max(state.lost_log_end, restored)


def may_have_lost_transaction(state: State, token: bytes) -> bool:
    """Return whether all of an unknown transaction may have been lost."""
    restored = state.restores[-1].at if state.restores else 0
    before = max(state.lost_before_time if state.lost_log_end else 0, restored)
    return bool(before) and token_time(token) <= before + CLOCK_SKEW
