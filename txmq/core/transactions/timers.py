"""Upkeep: the timers of transactions, and of snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.core.events.base import SnapshotNoted
from txmq.core.events.transactions import CheckPlanned
from txmq.core.state.state import Outcome, State
from txmq.core.transactions import listed
from txmq.core.transactions.model import get
from txmq.model.bundle import decided
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.core.events.base import Place


class PlanCheck(NamedTuple):
    """Set the time of the next check-back, after one was tried or was due; 0 = there is
    none.
    """

    token: bytes
    check_at: int
    tries: int
    in_doubt: bool


class NoteSnapshot(NamedTuple):
    """Let the log go on after a snapshot that stands for its end."""

    position: int


def decide_plan(state: State, command: PlanCheck, now: int) -> Outcome:
    del now
    row = get(state, command.token)
    if row is None or decided(row.state):
        return Outcome()
    return Outcome(
        (CheckPlanned(command.token, command.check_at, command.tries, command.in_doubt),)
    )


def apply_planned(state: State, event: CheckPlanned, place: Place) -> None:
    del place
    row = get(state, event.token)
    assert row is not None, "checked, so it is stored"
    if event.in_doubt != row.in_doubt:
        (listed.enter if event.in_doubt else listed.leave)(state, listed.Kind.IN_DOUBT, event.token)
    due = state.tables[t.DUE]
    if row.check_at:
        due.delete(t.DUE_KEY.pack(row.check_at, t.DUE_CHECK, row.ticket))
    if event.check_at:
        due.put(t.DUE_KEY.pack(event.check_at, t.DUE_CHECK, row.ticket), (event.token,))
    state.transactions.put(
        event.token,
        row._replace(check_at=event.check_at, tries=event.tries, in_doubt=event.in_doubt),
    )


def decide_note(state: State, command: NoteSnapshot, now: int) -> Outcome:
    del state, now
    return Outcome((SnapshotNoted(command.position),))


def apply_noted(state: State, event: SnapshotNoted, place: Place) -> None:
    """The record is all that was wanted."""


DECIDERS = {PlanCheck: decide_plan, NoteSnapshot: decide_note}
APPLIERS = {CheckPlanned: apply_planned, SnapshotNoted: apply_noted}
