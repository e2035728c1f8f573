"""What was lost to a repair of the log (`txmq log repair`), and what must not be
decided from its absence any more.

Among the records that cannot be read may be the decision of any transaction that was
stored before them, and all of a transaction that was begun by then. Where somebody else
decides, a database or a checker, the answer is still to be had. What this broker
decides by itself, for want of anything that says otherwise, is left to an operator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from txmq.core.transactions.model import token_time

if TYPE_CHECKING:
    from txmq.core.state.state import State
    from txmq.core.transactions.model import Transaction

CLOCKS_US: Final = 3600 * 1_000_000  # by which the clock of a token's maker may have been ahead
WHY: Final = (
    "records of the log were lost since it was stored, and its decision may have been among them"
)


def apply_lost(state: State, end: int) -> None:
    """Apply: the log has nothing to say up to that position."""
    state.lost_to, state.lost_before = end, 0


def booted(state: State, at: int) -> None:
    """Apply: all that was lost had been stored before this."""
    if state.lost_to and not state.lost_before:
        state.lost_before = at


def may_be_decided(state: State, row: Transaction) -> bool:
    """Whether an undecided transaction may have been decided in a record that was
    lost.
    """
    return row.ticket < state.lost_to


def may_be_known(state: State, token: bytes) -> bool:
    """Whether a token that is not known may be that of a transaction that was lost."""
    return bool(state.lost_to) and token_time(token) <= state.lost_before + CLOCKS_US
