"""The broker's time where it is in doubt: what is removed, or refused as too old, goes
by a time that is certainly past.

The log's newest time and the clock at a start may differ by days: the broker was down,
or one of the two was wrong. Nobody can tell. The broker serves at the later of both.
What cannot be undone goes by the earlier one (`State.certain`) until the clock has been
steady for `CONFIRMED_S`, or an operator has confirmed it.

`TimeNoted` records how far the two are apart, so that a restart in between changes
nothing. It may set the broker's time as well. What waits for a time then waits no
longer than before, and leases end no earlier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.core.consumers import waiting_times
from txmq.core.events.base import TimeNoted
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.topics import delayed
from txmq.core.transactions import timers
from txmq.core.transactions.model import first_token
from txmq.model.units import HOUR, SECOND

if TYPE_CHECKING:
    from txmq.core.events.base import RecordContext
    from txmq.core.state.state import State

TOLERATED_US = HOUR  # a difference that no retention is as short as
CONFIRMED_S = HOUR // SECOND  # an operator who set a clock wrong has seen the alarm by then


class NoteTime(NamedTuple):
    """Record by how much the broker's time may be ahead of the true one, after it was
    set back by `back`; negative = forward.
    """

    doubted: int
    back: int = 0


def doubt_at_start(state: State, wall: int, now: int) -> int:
    """Return by how much `now`, the broker's time at a start, may be ahead of the true
    one. `wall` is the wall clock's.
    """
    doubted = now - min(wall, state.certain(state.stored_at)) if state.stored_at else 0
    return doubted if doubted > TOLERATED_US else 0


def decide_note(_state: State, command: NoteTime, _now: int) -> Outcome:
    return Outcome((TimeNoted(*command),))


def apply_noted(state: State, event: TimeNoted, _context: RecordContext) -> None:
    if event.back:
        state.stored_at -= event.back
        waiting_times.set_back(state, event.back, state.stored_at)
    if event.back > 0:
        timers.set_back(state, event.back, state.stored_at)
        delayed.set_back(state, event.back, state.stored_at)
        # whatever is lost was stored before the true time
        state.lost_before_time = min(state.lost_before_time, state.stored_at)
        # no backup is of the future, or none that comes would count as newer
        state.backed_up_at = min(state.backed_up_at, state.stored_at)
    state.doubted = event.doubted
    # Outcomes that were forgotten too early may be of any transaction until now: of
    # later ones none was. So no more are refused for it.
    state.expired_to = min(state.expired_to, first_token(state.certain(state.stored_at)))


DECIDERS: Deciders = {NoteTime: decide_note}
APPLIERS: Appliers = {TimeNoted: apply_noted}
