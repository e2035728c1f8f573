"""Decisions: a transaction is decided once, by compare-and-set, and what that sets free
is published in the order of its tickets.
"""

from __future__ import annotations

from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.events.transactions import ConflictSeen, ConflictsForgotten, Decided, Released
from txmq.core.state.state import Outcome, Rejected, State
from txmq.core.topics import key_order
from txmq.core.topics.key_order import Release, Waiting
from txmq.core.transactions import actions, backlog, branches, listed, undecided
from txmq.core.transactions.large_bundles import Large, Phase
from txmq.core.transactions.model import KEPT, Transaction, get, takes_early, token_time, unknown
from txmq.errors import Conflict, HeuristicOutcome
from txmq.model.bundle import GroupState, Step, decided, makes_holds, step
from txmq.model.message import Decision
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.core.events.base import Place

CONFLICT_AT = 3  # when, in a row of table `conflicts`
CONFLICTS_KEPT = 30 * 24 * 3600 * 1_000_000
STEPS = {Decision.COMMIT: Step.COMMIT, Decision.ROLLBACK: Step.ROLLBACK}


class Decide(NamedTuple):
    """Decide a transaction. `by` names who: producer, checker, resolver, or an
    operator.
    """

    token: bytes
    outcome: Decision
    by: str
    reason: str = ""


class DecideReceipt(NamedTuple):
    """Where the transaction stands after a decision; `repeated` = it had been decided
    so before.
    """

    state: GroupState
    repeated: bool


def decide_decide(state: State, command: Decide, now: int) -> Outcome | Rejected:
    judged = judge(state, command, now)
    return judged if isinstance(judged, Outcome | Rejected) else decide_now(state, judged, command)


def judge(state: State, command: Decide, now: int) -> Transaction | Outcome | Rejected:
    """What there is to be decided; or the answer, where there is nothing."""
    row = get(state, command.token)
    if row is None:
        late = token_time(command.token) < now - KEPT
        why = (
            "is older than the outcomes that are kept"
            if late
            else "was never stored at this broker"
        )
        return unknown(command.token, why)
    after = step(row.state, STEPS[command.outcome])
    if after is None:
        return _contradiction(state, row, command)
    if decided(row.state):
        return Outcome(reply=DecideReceipt(row.state, repeated=True))
    if row.decider[0] == "job" and state.tables[t.JOB_WORK].get(row.decider[1]) is not None:  # type: ignore[arg-type]  # bytes
        return Rejected(
            Conflict, "its job was decided, and is being carried out", "see: txmq tx show"
        )
    return row


def _contradiction(state: State, row: Transaction, command: Decide) -> Outcome | Rejected:
    name = command.token.hex()
    if row.state is GroupState.OPEN:
        return Rejected(
            Conflict,
            f"transaction {name} is not complete: its last part is missing",
            "store all parts first",
        )
    told: dict[str, object] = {"state": int(row.state)}
    refused = Rejected(
        Conflict, f"transaction {name} is {row.state.name} and stays so", "see: txmq tx show", told
    )
    if branches.by_hand(state, command.token):
        message = f"transaction {name} was decided by hand: it is {row.state.name}, by {row.by}: {row.reason}"
        refused = Rejected(
            HeuristicOutcome,
            message,
            "when it is dealt with: txmq xa forget",
            told | {"by": row.by},
        )
    return Outcome(
        (ConflictSeen(command.token, int(command.outcome), command.by, command.reason),), refused
    )


def decide_now(state: State, row: Transaction, command: Decide) -> Outcome:
    """The decision itself, and all that it sets free."""
    release = Release(state, lambda ticket, token: committed(state, ticket, token))
    after = settle_into(state, release, row, row.waiting(command.token), command.outcome)
    event = Decided(
        command.token, int(command.outcome), command.by, command.reason, *release.taken()
    )
    return Outcome((event,), DecideReceipt(after, repeated=False))


def settle_into(
    state: State, release: Release, row: Transaction, waiting: Waiting, outcome: Decision
) -> GroupState:
    """What becomes of a group that is decided so; and in `release`, what that sets
    free.
    """
    if outcome is Decision.COMMIT:
        return commit_into(state, release, row, waiting)
    if makes_holds(row.decider):
        release.withdraw(waiting)
    return GroupState.ROLLED_BACK


def commit_into(state: State, release: Release, row: Transaction, waiting: Waiting) -> GroupState:
    """Publish a committed group or leave it waiting; what made no holds takes its place
    in the order now. A large one is published piece by piece, from the backlog.
    """
    if waiting.large:
        return GroupState.COMMITTED
    if makes_holds(row.decider):
        return GroupState.PUBLISHED if release.offer(waiting) else GroupState.COMMITTED
    if key_order.meets_a_hold(state, row.batches):
        return GroupState.COMMITTED
    release.publish_now(waiting)
    return GroupState.PUBLISHED


def committed(state: State, ticket: int, token: bytes | None) -> Waiting | None:
    """What stands behind a ticket, if nothing but its keys keeps it from being
    published.
    """
    if token is not None:
        row = get(state, token)
        return row.waiting(token) if row is not None and row.state is GroupState.COMMITTED else None
    queued = state.tables[t.QUEUED].get(t.TICKET_KEY.pack(ticket))
    return None if queued is None else Waiting(ticket, None, (key_order.held(queued),))


def apply_decided(state: State, event: Decided, place: Place) -> None:
    verdict = Decide(event.token, Decision(event.outcome), event.by, event.reason)
    released = event.released
    if (
        released and released[0][0] == event.token
    ):  # whoever is published by his own decision comes first
        _publish_one(state, verdict, released[0], place)
        released = released[1:]
    else:
        settle_one(state, verdict, place, published=False, ticket=place.position)
    apply_released(state, released, place)
    backlog.add_all(state, event.later)


def _publish_one(state: State, verdict: Decide, released: Released, place: Place) -> None:
    """Apply a decision that publishes: what `settle_one` and `apply_released` come to,
    in one step.
    """
    token, _outcome, by, reason = verdict
    _token, ticket, offsets = released
    row = get(state, token)
    assert row is not None, "decided, so it is stored"
    _no_longer_undecided(state, token, row)
    actions.settle(state, token, row.actions, place, committed=True)
    key_order.drop(state, ticket, row.batches)
    key_order.publish(state, row.waiting(token), offsets, place)
    row = row._replace(
        state=GroupState.PUBLISHED, by=by, reason=reason, decided_at=place.stored_at, check_at=0, offsets=offsets,
        batches=tuple([key_order.without_keys(batch) for batch in row.batches]),
    )  # fmt: skip
    state.transactions.put(token, row)
    listed.ended(state, token)


def settle_one(
    state: State, verdict: Decide, place: Place, *, published: bool, ticket: int
) -> None:
    """Apply a decision to one transaction; publication, if it is due, follows in
    `apply_released`.

    `ticket` is its place in the order of its keys where it has to wait and took none
    when it was stored.
    """
    token, outcome, by, reason = verdict
    row = get(state, token)
    assert row is not None, "decided, so it is stored"
    _no_longer_undecided(state, token, row)
    after = GroupState.COMMITTED if outcome is Decision.COMMIT else GroupState.ROLLED_BACK
    row = row._replace(state=after, by=by, reason=reason, decided_at=place.stored_at, check_at=0)
    if row.large is not None:
        row = _settle_large(state, token, row, row.large, outcome, ticket)
    elif outcome is Decision.ROLLBACK:
        if makes_holds(row.decider):
            key_order.drop(state, row.ticket, row.batches)
        row = row._replace(batches=())
        listed.ended(state, token)
    elif not published:
        listed.enter(state, listed.Kind.WAITING, token)
        if not makes_holds(row.decider):
            row = row._replace(ticket=ticket)
            key_order.take(state, row.ticket, token, row.batches)
    actions.settle(state, token, row.actions, place, committed=outcome is Decision.COMMIT)
    state.transactions.put(token, row)


def _settle_large(
    state: State, token: bytes, row: Transaction, large: Large, outcome: Decision, ticket: int
) -> Transaction:
    """The outcome is fixed; whatever follows from it is done piece by piece."""
    if outcome is Decision.ROLLBACK:
        after, phase = GroupState.ROLLED_BACK, Phase.DROPPING
    else:
        after, phase = GroupState.COMMITTED, Phase.CHECKING
        listed.enter(state, listed.Kind.WAITING, token)
        if not takes_early(row.decider):
            row, phase = row._replace(ticket=ticket), Phase.TAKING
    backlog.add(state, row.ticket, token)
    return row._replace(state=after, large=large._replace(phase=phase))


def _no_longer_undecided(state: State, token: bytes, row: Transaction) -> None:
    if row.state is GroupState.OPEN:
        listed.leave(state, listed.Kind.OPEN, token)
    if decided(row.state):
        return
    if row.in_doubt:
        listed.leave(state, listed.Kind.IN_DOUBT, token)
    undecided.leave(state, row.ticket, token)
    branches.drop(state, token, row.decider)
    if row.check_at:
        state.tables[t.DUE].delete(t.DUE_KEY.pack(row.check_at, t.DUE_CHECK, row.ticket))


def apply_released(state: State, released: tuple[Released, ...], place: Place) -> None:
    """Publish, in the order decided, everything that a decision set free."""
    for token, ticket, offsets in released:
        if token is None:
            key = t.TICKET_KEY.pack(ticket)
            waiting = committed(state, ticket, None)
            state.tables[t.QUEUED].delete(key)
        else:
            waiting = committed(state, ticket, token)
        assert waiting is not None, "released, so it was waiting"
        key_order.drop(state, ticket, waiting.batches)
        key_order.publish(state, waiting, offsets, place)
        if token is not None:
            row = get(state, token)
            assert row is not None
            listed.leave(state, listed.Kind.WAITING, token)
            lean = tuple([key_order.without_keys(batch) for batch in row.batches])
            state.transactions.put(
                token, row._replace(state=GroupState.PUBLISHED, offsets=offsets, batches=lean)
            )
            listed.ended(state, token)


def apply_conflict(state: State, event: ConflictSeen, place: Place) -> None:
    state.tables[t.CONFLICTS].put(
        t.TICKET_KEY.pack(place.position),
        (event.token, event.outcome, event.by, place.stored_at, event.reason),
    )


def old_conflicts(state: State, now: int, most: int) -> tuple[ConflictsForgotten | None, bool]:
    """What is to be forgotten of the oldest `most` contradictions, and whether there
    may be more.
    """
    rows: Any = state.tables[t.CONFLICTS].range(b"")
    old = list(
        takewhile(lambda item: item[1][CONFLICT_AT] < now - CONFLICTS_KEPT, islice(rows, most))
    )
    if not old:
        return None, False
    return ConflictsForgotten(t.TICKET_KEY.unpack(old[-1][0])[0] + 1), len(old) == most


def apply_conflicts_forgotten(state: State, event: ConflictsForgotten, place: Place) -> None:
    del place
    table = state.tables[t.CONFLICTS]
    for key, _row in list(table.range(b"", t.TICKET_KEY.pack(event.before))):
        table.delete(key)


DECIDERS = {Decide: decide_decide}
APPLIERS: dict[type, Any] = {
    Decided: apply_decided,
    ConflictSeen: apply_conflict,
    ConflictsForgotten: apply_conflicts_forgotten,
}
