"""XA: the home broker's answer for good, decisions by hand, and the journal of what
went otherwise.

Nothing is rolled back because something is absent. Whoever finds a prepared branch of a
token that its home broker does not know has the rollback written there first: a
tombstone, which every part that comes later meets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.events.transactions import HeuristicForgotten, HeuristicSeen, TombstoneWritten
from txmq.core.state.state import Outcome, Rejected, State
from txmq.core.transactions import branches, listed
from txmq.core.transactions import lost_records as lost
from txmq.core.transactions.branches import Heuristic
from txmq.core.transactions.decisions import Decide, decide_decide, decide_now
from txmq.core.transactions.model import KEPT, Transaction, get, token_time, unknown
from txmq.errors import BadRequest, UnknownTransaction
from txmq.model.bundle import GroupState, decided
from txmq.model.message import Decision

if TYPE_CHECKING:
    from txmq.core.events.base import Place

MOST_HEURISTICS = 1_000  # of one transaction: more than it has branches is a loop somewhere
LOST_HINT = "nobody can tell: compare the databases, then decide by hand"
WORDS = {Decision.COMMIT: "committed", Decision.ROLLBACK: "rolled back"}


class AskOutcome(NamedTuple):
    """How the home broker, whose log is `log_id`, decided. `decide`: what is undecided
    or unknown is rolled back.
    """

    token: bytes
    log_id: bytes
    decide: bool
    by: str


class DecideByHand(NamedTuple):
    """An operator's decision; `log_id` is this broker's, whose own decisions are
    nobody's heuristics.
    """

    token: bytes
    outcome: Decision
    operator: str
    reason: str
    log_id: bytes


class NoteHeuristic(NamedTuple):
    """A branch of a transaction was found otherwise than decided."""

    token: bytes
    branch: str
    decided: Decision
    found: str
    operator: str
    reason: str


class ForgetHeuristics(NamedTuple):
    """The heuristics of a transaction have been dealt with."""

    token: bytes
    operator: str
    reason: str


def decide_outcome(state: State, command: AskOutcome, now: int) -> Outcome | Rejected:
    """The reply is a GroupState, or None: it was never heard of here, and may yet
    be.
    """
    row = get(state, command.token)
    if row is None:
        return _unheard_of(state, command, now)
    if decided(row.state) or not command.decide:
        return Outcome(reply=GroupState.UNDECIDED if row.state is GroupState.OPEN else row.state)
    if lost.may_be_decided(state, row):
        return Rejected(
            UnknownTransaction, f"transaction {command.token.hex()}: {lost.WHY}", LOST_HINT
        )
    if row.decider[:2] != ("home", command.log_id):
        hint = "ask its own decider: txmq tx show"
        return Rejected(
            BadRequest, f"transaction {command.token.hex()} is not this broker's to decide", hint
        )
    outcome = decide_now(
        state, row, Decide(command.token, Decision.ROLLBACK, command.by, "asked for the outcome")
    )
    return outcome._replace(reply=GroupState.ROLLED_BACK)


def _unheard_of(state: State, command: AskOutcome, now: int) -> Outcome | Rejected:
    if token_time(command.token) < now - KEPT:
        message = f"transaction {command.token.hex()} is older than the outcomes that are kept"
        return Rejected(
            UnknownTransaction,
            message,
            "nobody can tell any more: compare the databases, then decide",
        )
    if lost.may_be_known(state, command.token):
        message = f"transaction {command.token.hex()} is not known, and records of the log of its time were lost"
        return Rejected(UnknownTransaction, message, LOST_HINT)
    if not command.decide:
        return Outcome()
    tombstone = TombstoneWritten(command.token, ("home", command.log_id, command.token), command.by)
    return Outcome((tombstone,), GroupState.ROLLED_BACK)


def decide_by_hand(state: State, command: DecideByHand, now: int) -> Outcome | Rejected:
    token, outcome, operator, reason, log_id = command
    row = get(state, token)
    decision = decide_decide(state, Decide(token, outcome, f"operator {operator}", reason), now)
    if isinstance(decision, Rejected) or row is None or not _is_anothers(row, log_id):
        return decision
    seen = HeuristicSeen(token, "", int(outcome), WORDS[outcome], operator, reason)
    return decision._replace(events=(*decision.events, seen))


def _is_anothers(row: Transaction, log_id: bytes) -> bool:
    """Whether the decision is another's to make: of what is prepared; what is not
    complete anybody may roll back.
    """
    prepared = row.state is GroupState.UNDECIDED and row.decider[0] in branches.KINDS
    return prepared and row.decider[:2] != ("home", log_id)


def decide_note(state: State, command: NoteHeuristic, now: int) -> Outcome | Rejected:
    """The same finding again, which several recoverers make, is no further entry, nor
    one that was dealt with before. The reply tells whether it was.
    """
    del now
    if get(state, command.token) is None:
        return unknown(command.token)
    known = branches.heuristics(state, command.token)
    seen = HeuristicSeen(*command._replace(decided=int(command.decided)))  # type: ignore[arg-type]  # plain in the log
    if branches.was_dealt_with(state, command.token, *seen[1:4]):
        return Outcome(reply=True)
    if any(entry[:3] == seen[1:4] for entry in known):
        return Outcome(reply=False)
    if len(known) >= MOST_HEURISTICS:
        message = f"transaction {command.token.hex()} has {len(known)} entries in its journal"
        return Rejected(BadRequest, message, "say that they are dealt with: txmq xa forget")
    return Outcome((seen,), reply=False)


def decide_forget(state: State, command: ForgetHeuristics, now: int) -> Outcome | Rejected:
    del now
    if get(state, command.token) is None:
        return unknown(command.token)
    if not branches.has_heuristics(state, command.token):
        return Outcome()
    return Outcome((HeuristicForgotten(*command),))


def apply_tombstone(state: State, event: TombstoneWritten, place: Place) -> None:
    row = Transaction(
        GroupState.ROLLED_BACK, 0, event.decider, "", 0, 0, b"", place.stored_at, (), (), 0,
        by=event.by, reason="never stored here", decided_at=place.stored_at,
    )  # fmt: skip
    state.transactions.put(event.token, row)
    listed.ended(state, event.token)


def apply_seen(state: State, event: HeuristicSeen, place: Place) -> None:
    branches.add(state, event.token, Heuristic(*event[1:], place.stored_at))


def apply_forgotten(state: State, event: HeuristicForgotten, place: Place) -> None:
    del place
    row = get(state, event.token)
    assert row is not None, "what has heuristics is kept"
    branches.dealt_with(state, event.token, row.state)


DECIDERS: dict[type, Any] = {
    AskOutcome: decide_outcome,
    DecideByHand: decide_by_hand,
    NoteHeuristic: decide_note,
    ForgetHeuristics: decide_forget,
}
APPLIERS: dict[type, Any] = {
    TombstoneWritten: apply_tombstone,
    HeuristicSeen: apply_seen,
    HeuristicForgotten: apply_forgotten,
}
