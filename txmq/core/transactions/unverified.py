"""Decisions by hand that the transaction's database has not confirmed.

An operator may decide a transaction while its database cannot be asked. The token stays
on a list until the database has been asked after all. Where it has decided otherwise,
that is a recorded conflict. Where it is lost for good, or has lost the transaction in a
failover, the operator takes the token off the list by deciding it so once more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.events.transactions import ConflictSeen, VerificationOwed
from txmq.core.transactions import indexes
from txmq.core.transactions.indexes import ListKind
from txmq.core.transactions.model import get
from txmq.core.transactions.xa import DecideByHand, decide_by_hand
from txmq.model.bundle import ACCEPTING, DECIDED
from txmq.model.decider import ByPostgres

if TYPE_CHECKING:
    from txmq.core.events.base import RecordContext
    from txmq.core.state.state import State
    from txmq.model.message import Decision


class ForceDecision(NamedTuple):
    """Decide by hand what a database may decide otherwise."""

    decision: DecideByHand


class CompareDecision(NamedTuple):
    """Compare a forced decision with the answer of its database."""

    token: bytes
    found: Decision
    by: str
    reason: str


def force_decision(state: State, command: ForceDecision, now: int) -> Outcome:
    row = get(state, command.decision.token)
    outcome = decide_by_hand(state, command.decision, now)
    if row is None or not isinstance(row.decider, ByPostgres):
        return outcome
    token, again = command.decision.token, row.state in DECIDED
    same = row.state in ACCEPTING[command.decision.outcome]
    if again and not (same and indexes.is_listed(state, ListKind.UNVERIFIED, token)):
        return outcome
    owed = VerificationOwed(token, owed=not again)
    return outcome._replace(events=(*outcome.events, owed))


def compare_decision(state: State, command: CompareDecision, _now: int) -> Outcome:
    token, found, by, reason = command
    row = get(state, token)
    if row is None or not indexes.is_listed(state, ListKind.UNVERIFIED, token):
        return Outcome()
    done = VerificationOwed(token, owed=False)
    if row.state in ACCEPTING[found]:
        return Outcome((done,))
    return Outcome((ConflictSeen(token, int(found), by, reason), done))


def apply_owed(state: State, event: VerificationOwed, _context: RecordContext) -> None:
    if event.owed:
        indexes.add_to_list(state, ListKind.UNVERIFIED, event.token)
    else:
        indexes.remove_from_list(state, ListKind.UNVERIFIED, event.token)
        indexes.note_ended(state, event.token)


DECIDERS: Deciders = {ForceDecision: force_decision, CompareDecision: compare_decision}
APPLIERS: Appliers = {VerificationOwed: apply_owed}
