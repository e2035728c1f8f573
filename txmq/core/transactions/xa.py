"""XA at the home broker: final outcomes, decisions by hand, and heuristics.

Nothing is rolled back because something is absent. A recoverer that finds a prepared
branch whose token the home broker does not know lets the home broker record the
rollback first. This tombstone answers every later part of the bundle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.events.transactions import HeuristicForgotten, HeuristicSeen, TombstoneWritten
from txmq.core.transactions import branches, indexes
from txmq.core.transactions import lost_records as lost
from txmq.core.transactions.branches import Heuristic
from txmq.core.transactions.decisions import DecideTransaction, decide_checked, decide_transaction
from txmq.core.transactions.model import (
    Transaction,
    get,
    is_forgotten,
    not_stored,
    unknown_transaction,
)
from txmq.errors import BadRequest, UnknownTransaction
from txmq.model.bundle import DECIDED, BundleState
from txmq.model.decider import BY_XA_MANAGER, ByHome
from txmq.model.message import Decision

if TYPE_CHECKING:
    from txmq.core.events.base import RecordContext
    from txmq.core.state.state import State

MAX_HEURISTICS = 1_000  # of one transaction; more than it has branches is a bug
LOST_HINT = "compare the databases, then decide by hand"
WORDS = {Decision.COMMIT: "committed", Decision.ROLLBACK: "rolled back"}


class ResolveOutcome(NamedTuple):
    """Return the outcome from the home broker, whose log is `log_id`.

    `decide`: roll back what is undecided or unknown first.
    """

    token: bytes
    log_id: bytes
    decide: bool
    by: str


class DecideByHand(NamedTuple):
    """Decide a transaction on behalf of an operator.

    `log_id` is this broker's: what it decides itself is never a heuristic.
    """

    token: bytes
    outcome: Decision
    operator: str
    reason: str
    log_id: bytes


class NoteHeuristic(NamedTuple):
    """Record that a branch was found otherwise than decided."""

    token: bytes
    branch: str
    decided: Decision
    found: str
    operator: str
    reason: str


class ForgetHeuristics(NamedTuple):
    """Clear the heuristics of a transaction, which an operator has dealt with."""

    token: bytes
    operator: str
    reason: str


def resolve_outcome(state: State, command: ResolveOutcome, now: int) -> Outcome:
    # The reply None: this broker does not know the transaction, but may store it later.
    row = get(state, command.token)
    if row is None:
        return _resolve_unknown(state, command, now)
    if row.state in DECIDED or not command.decide:
        return Outcome(reply=BundleState.UNDECIDED if row.state is BundleState.OPEN else row.state)
    if lost.may_have_lost_decision(state, row):
        raise UnknownTransaction(f"transaction {command.token.hex()}: {lost.WHY}", hint=LOST_HINT)
    if not _is_home(row, command.log_id):
        hint = "ask its own decider: txmq tx show"
        raise BadRequest(
            f"transaction {command.token.hex()} is not this broker's to decide", hint=hint
        )
    outcome = decide_checked(
        state,
        row,
        DecideTransaction(command.token, Decision.ROLLBACK, command.by, "asked for the outcome"),
    )
    return outcome._replace(reply=BundleState.ROLLED_BACK)


def _resolve_unknown(state: State, command: ResolveOutcome, now: int) -> Outcome:
    if is_forgotten(state, command.token, now):
        message = f"transaction {command.token.hex()} is older than the outcomes that are kept"
        raise UnknownTransaction(message, hint=LOST_HINT)
    if lost.may_have_lost_transaction(state, command.token):
        message = (
            f"transaction {command.token.hex()} is unknown,"
            " and records of the log of its time were lost"
        )
        raise UnknownTransaction(message, hint=LOST_HINT)
    if not command.decide:
        return Outcome()
    tombstone = TombstoneWritten(command.token, ByHome(command.log_id, command.token), command.by)
    return Outcome((tombstone,), BundleState.ROLLED_BACK)


def decide_by_hand(state: State, command: DecideByHand, now: int) -> Outcome:
    token, outcome, operator, reason, log_id = command
    row = get(state, token)
    decision = decide_transaction(
        state, DecideTransaction(token, outcome, f"operator {operator}", reason), now
    )
    if row is None or not _is_anothers(row, log_id):
        return decision
    seen = HeuristicSeen(token, "", int(outcome), WORDS[outcome], operator, reason)
    return decision._replace(events=(*decision.events, seen))


def _is_anothers(row: Transaction, log_id: bytes) -> bool:
    """Return whether only another XA manager may decide this transaction.

    Any decider may roll back an incomplete bundle.
    """
    prepared = row.state is BundleState.UNDECIDED and isinstance(row.decider, BY_XA_MANAGER)
    return prepared and not _is_home(row, log_id)


def _is_home(row: Transaction, log_id: bytes) -> bool:
    return isinstance(row.decider, ByHome) and row.decider.log_id == log_id


def note_heuristic(state: State, command: NoteHeuristic, _now: int) -> Outcome:
    # Several recoverers may find the same: it is one entry, and none once an operator
    # has cleared it. The reply is True in that case.
    if get(state, command.token) is None:
        raise unknown_transaction(command.token)
    known = branches.heuristics(state, command.token)
    seen = HeuristicSeen(*command._replace(decided=int(command.decided)))  # type: ignore[arg-type]  # plain in the log
    if branches.was_cleared(state, command.token, *seen[1:4]):
        return Outcome(reply=True)
    if any(entry[:3] == seen[1:4] for entry in known):
        return Outcome(reply=False)
    if len(known) >= MAX_HEURISTICS:
        message = f"transaction {command.token.hex()} has {len(known)} heuristics"
        raise BadRequest(message, hint="clear them: txmq xa forget")
    return Outcome((seen,), reply=False)


def forget_heuristics(state: State, command: ForgetHeuristics, _now: int) -> Outcome:
    if get(state, command.token) is None:
        raise unknown_transaction(command.token)
    if not branches.has_heuristics(state, command.token):
        return Outcome()
    return Outcome((HeuristicForgotten(*command),))


def apply_tombstone(state: State, event: TombstoneWritten, context: RecordContext) -> None:
    row = not_stored(
        BundleState.ROLLED_BACK,
        event.decider,
        "",
        event.by,
        "never stored here",
        context.stored_at,
    )
    state.transactions.put(event.token, row)
    indexes.note_ended(state, event.token)


def apply_seen(state: State, event: HeuristicSeen, context: RecordContext) -> None:
    branches.add_heuristic(state, event.token, Heuristic(*event[1:], context.stored_at))


def apply_forgotten(state: State, event: HeuristicForgotten, _context: RecordContext) -> None:
    row = get(state, event.token)
    assert row is not None, "a transaction with heuristics does not expire"
    branches.clear_heuristics(state, event.token, row.state)


DECIDERS: Deciders = {
    ResolveOutcome: resolve_outcome,
    DecideByHand: decide_by_hand,
    NoteHeuristic: note_heuristic,
    ForgetHeuristics: forget_heuristics,
}
APPLIERS: Appliers = {
    TombstoneWritten: apply_tombstone,
    HeuristicSeen: apply_seen,
    HeuristicForgotten: apply_forgotten,
}
