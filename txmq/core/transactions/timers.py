"""Timers: the next check-backs of transactions, and notes of snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.events.base import SnapshotNoted
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.events.transactions import CheckPlanned
from txmq.core.transactions import indexes
from txmq.core.transactions.model import get
from txmq.model.bundle import DECIDED
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.core.events.base import RecordContext
    from txmq.core.state.state import State


class PlanCheck(NamedTuple):
    """Set the time of the next check-back, 0 = none, after one was tried or was due."""

    token: bytes
    check_at: int
    tries: int
    in_doubt: bool


class NoteSnapshot(NamedTuple):
    """Record a snapshot that stands for the log up to `position`."""

    position: int


def plan_check(state: State, command: PlanCheck, _now: int) -> Outcome:
    row = get(state, command.token)
    if row is None or row.state in DECIDED:
        return Outcome()
    return Outcome((CheckPlanned(*command),))


def apply_planned(state: State, event: CheckPlanned, _context: RecordContext) -> None:
    row = get(state, event.token)
    assert row is not None, "checked, so it is stored"
    if event.in_doubt and not row.in_doubt:
        indexes.add_to_list(state, indexes.ListKind.IN_DOUBT, event.token)
    elif row.in_doubt and not event.in_doubt:
        indexes.remove_from_list(state, indexes.ListKind.IN_DOUBT, event.token)
    indexes.move_check(state, event.token, row, event.check_at)
    state.transactions.put(
        event.token,
        row._replace(check_at=event.check_at, tries=event.tries, in_doubt=event.in_doubt),
    )


def note_snapshot(_state: State, command: NoteSnapshot, _now: int) -> Outcome:
    return Outcome((SnapshotNoted(command.position),))


def apply_noted(state: State, event: SnapshotNoted, context: RecordContext) -> None:
    """Apply: nothing, the record is all that is needed."""


def set_back(state: State, back: int, now: int) -> None:
    """Apply: the time is `now`, and was later by `back`. Check-backs wait for as long
    as before.
    """
    rows: Any = list(state.tables[t.DUE].range(t.DUE_KEY.pack(now + 1, 0, 0)))
    for _key, (token,) in rows:
        row = get(state, token)
        assert row is not None, "the index leads to the row"
        check_at = max(row.check_at - back, now)
        indexes.move_check(state, token, row, check_at)
        state.transactions.put(token, row._replace(check_at=check_at))


DECIDERS: Deciders = {PlanCheck: plan_check, NoteSnapshot: note_snapshot}
APPLIERS: Appliers = {CheckPlanned: apply_planned, SnapshotNoted: apply_noted}
