"""Decisions: a transaction is decided once, by compare-and-set.

Bundles and queued batches that waited for it only are published in the same record, in
the order of their tickets.
"""

from __future__ import annotations

from functools import partial
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.events.transactions import ConflictSeen, ConflictsForgotten, Decided, Released
from txmq.core.topics import key_order
from txmq.core.topics.key_order import Publishable, ReleasePlan
from txmq.core.transactions import actions, branches, indexes
from txmq.core.transactions.large_bundles import LargeBundle, PiecePhase
from txmq.core.transactions.model import (
    Transaction,
    get,
    is_forgotten,
    unknown_transaction,
)
from txmq.errors import Conflict, HeuristicOutcome
from txmq.model.bundle import ACCEPTING, DECIDED, BundleState, DecideReceipt
from txmq.model.decider import HOLDING_PART_BY_PART, ORDERED_WHEN_STORED, ByJob
from txmq.model.message import Decision
from txmq.model.units import DAY
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.core.events.base import RecordContext
    from txmq.core.state.state import State

CONFLICT_AT = 3  # index of the time in a row of table `conflicts`
CONFLICT_RETENTION = 30 * DAY


class DecideTransaction(NamedTuple):
    """Decide a transaction. `by` names the producer, checker, resolver or operator."""

    token: bytes
    outcome: Decision
    by: str
    reason: str = ""


def decide_transaction(state: State, command: DecideTransaction, now: int) -> Outcome:
    checked = check_decision(state, command, now)
    if isinstance(checked, Outcome):
        return checked
    return decide_checked(state, checked, command)


def check_decision(state: State, command: DecideTransaction, now: int) -> Transaction | Outcome:
    """Return the transaction to decide, or the reply where there is nothing to
    decide.
    """
    row = get(state, command.token)
    if row is None:
        late = is_forgotten(state, command.token, now)
        why = (
            "is older than the outcomes that are kept"
            if late
            else "was never stored at this broker"
        )
        raise unknown_transaction(command.token, why)
    if row.state not in ACCEPTING[command.outcome]:
        return _conflict(state, row, command)
    if row.state in DECIDED:
        return Outcome(reply=DecideReceipt(row.state, repeated=True))
    if isinstance(row.decider, ByJob) and state.tables[t.JOB_WORK].get(row.decider.job) is not None:
        raise Conflict(
            f"job {row.decider.job.hex()} of the transaction was decided, and is being carried out",
            hint="see: txmq tx show",
        )
    return row


def _conflict(state: State, row: Transaction, command: DecideTransaction) -> Outcome:
    name = command.token.hex()
    if row.state is BundleState.OPEN:
        raise Conflict(
            f"transaction {name} is not complete: its last part is missing",
            hint="store all parts first",
        )
    detail: dict[str, object] = {"state": int(row.state)}
    refused = Conflict(
        f"transaction {name} is {row.state.name} and stays so",
        hint="see: txmq tx show",
        detail=detail,
    )
    if branches.was_decided_by_hand(state, command.token):
        refused = HeuristicOutcome(
            f"transaction {name} was decided by hand: it is {row.state.name},"
            f" by {row.by}: {row.reason}",
            hint="when it is dealt with: txmq xa forget",
            detail=detail | {"by": row.by},
        )
    seen = ConflictSeen(command.token, int(command.outcome), command.by, command.reason)
    return Outcome((seen,), refused)


def decide_checked(state: State, row: Transaction, command: DecideTransaction) -> Outcome:
    """Return the decision and the publications that it makes possible."""
    token, outcome, by, reason = command
    plan = ReleasePlan(state, partial(find_publishable, state))
    after = plan_outcome(state, plan, row, row.publishable(token), outcome)
    event = Decided(token, int(outcome), by, reason, *plan.drain())
    return Outcome((event,), DecideReceipt(after, repeated=False))


def plan_outcome(
    state: State, plan: ReleasePlan, row: Transaction, unit: Publishable, outcome: Decision
) -> BundleState:
    """Plan the publications that an outcome allows; return the bundle's state after it.

    A bundle that held no keys so far takes its place in their order now. A large one is
    published piece by piece, from the backlog.
    """
    ordered = isinstance(row.decider, ORDERED_WHEN_STORED)
    if outcome is Decision.ROLLBACK:
        if ordered:
            plan.withdraw(unit)
        return BundleState.ROLLED_BACK
    if unit.large:
        return BundleState.COMMITTED
    if ordered:
        return BundleState.PUBLISHED if plan.publish_if_free(unit) else BundleState.COMMITTED
    if key_order.meets_held_key(state, row.batches):
        return BundleState.COMMITTED
    plan.publish_unordered(unit)
    return BundleState.PUBLISHED


def find_publishable(state: State, ticket: int, token: bytes | None) -> Publishable | None:
    """Return the committed bundle, or the queued batch, that waits with a ticket."""
    if token is not None:
        row = get(state, token)
        if row is None or row.state is not BundleState.COMMITTED:
            return None
        return row.publishable(token)
    queued = state.tables[t.QUEUED].get(t.TICKET_KEY.pack(ticket))
    return (
        None if queued is None else Publishable(ticket, None, (key_order.unplaced_batch(queued),))
    )


def apply_decided(state: State, event: Decided, context: RecordContext) -> None:
    token, outcome, by, reason, released, later = event
    verdict = DecideTransaction(token, Decision(outcome), by, reason)
    # A bundle that its own decision publishes comes first.
    if released and released[0][0] == token:
        _apply_publication(state, verdict, released[0], context)
        released = released[1:]
    else:
        apply_outcome(state, verdict, context, published=False, ticket=context.position)
    if released:
        apply_released(state, released, context)
    if later:
        indexes.add_all_to_backlog(state, later)


def _apply_publication(
    state: State, verdict: DecideTransaction, released: Released, context: RecordContext
) -> None:
    """Apply a decision that publishes its bundle.

    It amounts to `apply_outcome` and `apply_released`, in one step.
    """
    token, _outcome, by, reason = verdict
    _token, ticket, offsets = released
    row = get(state, token)
    assert row is not None, "decided, so it is stored"
    indexes.remove_undecided(state, token, row)
    if row.actions:
        actions.settle(state, token, row.actions, context, committed=True)
    key_order.release_keys(state, ticket, row.batches)
    key_order.publish(state, row.publishable(token), offsets, context)
    _put_published(
        state,
        token,
        row._replace(by=by, reason=reason, decided_at=context.stored_at, check_at=0),
        offsets,
    )


def apply_outcome(
    state: State,
    verdict: DecideTransaction,
    context: RecordContext,
    *,
    published: bool,
    ticket: int,
) -> None:
    """Apply a decision to one transaction.

    If it is `published`, `apply_released` follows. `ticket` is its place in the order
    of its keys if it has to wait and took none when it was stored.
    """
    token, outcome, by, reason = verdict
    row = get(state, token)
    assert row is not None, "decided, so it is stored"
    indexes.remove_undecided(state, token, row)
    committed = outcome is Decision.COMMIT
    after = BundleState.COMMITTED if committed else BundleState.ROLLED_BACK
    row = row._replace(state=after, by=by, reason=reason, decided_at=context.stored_at, check_at=0)
    ordered = isinstance(row.decider, ORDERED_WHEN_STORED)
    if row.large is not None:
        row = _start_pieces(state, token, row, row.large, ticket)
    elif not committed:
        if ordered:
            key_order.release_keys(state, row.ticket, row.batches)
        row = row._replace(batches=())
        indexes.note_ended(state, token)
    elif not published:
        indexes.add_to_list(state, indexes.ListKind.WAITING, token)
        if not ordered:
            row = row._replace(ticket=ticket)
            key_order.hold_keys(state, row.ticket, token, row.batches)
    if row.actions:
        actions.settle(state, token, row.actions, context, committed=committed)
    state.transactions.put(token, row)


def _start_pieces(
    state: State, token: bytes, row: Transaction, large: LargeBundle, ticket: int
) -> Transaction:
    """Let the backlog publish or drop a decided large bundle piece by piece."""
    phase = PiecePhase.DROPPING
    if row.state is BundleState.COMMITTED:
        phase = PiecePhase.CHECKING
        indexes.add_to_list(state, indexes.ListKind.WAITING, token)
        if not isinstance(row.decider, HOLDING_PART_BY_PART):
            row, phase = row._replace(ticket=ticket), PiecePhase.HOLDING
    indexes.add_to_backlog(state, row.ticket, token)
    return row._replace(large=large._replace(phase=phase))


def apply_released(state: State, released: tuple[Released, ...], context: RecordContext) -> None:
    """Apply: publish what a decision released, in the planned order."""
    for token, ticket, offsets in released:
        unit = find_publishable(state, ticket, token)
        assert unit is not None, "released, so it was waiting"
        if token is None:
            state.tables[t.QUEUED].delete(t.TICKET_KEY.pack(ticket))
        key_order.release_keys(state, ticket, unit.batches)
        key_order.publish(state, unit, offsets, context)
        if token is not None:
            row = get(state, token)
            assert row is not None, "released, so it is stored"
            indexes.remove_from_list(state, indexes.ListKind.WAITING, token)
            _put_published(state, token, row, offsets)


def _put_published(state: State, token: bytes, row: Transaction, offsets: tuple[int, ...]) -> None:
    batches = key_order.without_keys(row.batches)
    row = row._replace(state=BundleState.PUBLISHED, offsets=offsets, batches=batches)
    state.transactions.put(token, row)
    indexes.note_ended(state, token)


def apply_conflict(state: State, event: ConflictSeen, context: RecordContext) -> None:
    state.tables[t.CONFLICTS].put(
        t.TICKET_KEY.pack(context.position),
        (event.token, event.outcome, event.by, context.stored_at, event.reason),
    )


def find_expired_conflicts(
    state: State, now: int, most: int
) -> tuple[ConflictsForgotten | None, bool]:
    """Return the expired ones of the oldest `most` conflicts; True = there may be
    more.
    """
    rows: Any = state.tables[t.CONFLICTS].range(b"")
    expired = list(
        takewhile(lambda item: item[1][CONFLICT_AT] < now - CONFLICT_RETENTION, islice(rows, most))
    )
    if not expired:
        return None, False
    before = t.TICKET_KEY.unpack(expired[-1][0])[0] + 1
    return ConflictsForgotten(before), len(expired) == most


def apply_conflicts_forgotten(
    state: State, event: ConflictsForgotten, _context: RecordContext
) -> None:
    table = state.tables[t.CONFLICTS]
    for key, _row in list(table.range(b"", t.TICKET_KEY.pack(event.before))):
        table.delete(key)


DECIDERS: Deciders = {DecideTransaction: decide_transaction}
APPLIERS: Appliers = {
    Decided: apply_decided,
    ConflictSeen: apply_conflict,
    ConflictsForgotten: apply_conflicts_forgotten,
}
