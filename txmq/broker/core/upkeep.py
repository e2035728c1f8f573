"""Upkeep: timers of transactions, and what is forgotten after its time."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.broker.core import branches, listed, pieces
from txmq.broker.core import tables as t
from txmq.broker.core.events import CheckPlanned, ProducerForgotten, TransactionsForgotten
from txmq.broker.core.pieces import Phase
from txmq.broker.core.state import Outcome, State
from txmq.broker.core.transactions import KEPT, Transaction, get
from txmq.tx.group import GroupState, decided

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.broker.core.events import Place

AT_ONCE = 250  # rows that one sweep may touch, so that no apply takes long
FORGETTABLE = (GroupState.PUBLISHED, GroupState.ROLLED_BACK)
PRODUCERS_KEPT = 7 * 24 * 3600 * 1_000_000  # idle for so long (ARCHITECTURE 5)


class PlanCheck(NamedTuple):
    """Set the time of the next check-back, after one was tried or was due."""

    token: bytes
    check_at: int
    tries: int
    in_doubt: bool


class Sweep(NamedTuple):
    """Timer: forget producers that are idle and outcomes that are old, those of tokens from `after` on.

    The reply is the token to go on from, if there may be more to forget; else it is empty.
    """

    after: bytes = b""


def due_checks(state: State, now: int, limit: int) -> Iterator[bytes]:
    """Tokens of undecided transactions whose check-back is due, the longest due first."""
    start, stop = t.DUE_KEY.pack(0, 0, 0), t.DUE_KEY.pack(now + 1, 0, 0)
    for key, row in state.tables[t.DUE].range(start, stop):
        if t.DUE_KEY.unpack(key)[1] == t.DUE_CHECK and limit > 0:
            limit -= 1
            yield row[0]


def decide_plan(state: State, command: PlanCheck, now: int) -> Outcome:
    del now
    row = get(state, command.token)
    if row is None or decided(row.state):
        return Outcome()
    return Outcome((CheckPlanned(command.token, command.check_at, command.tries, command.in_doubt),))


def apply_planned(state: State, event: CheckPlanned, place: Place) -> None:
    del place
    row = get(state, event.token)
    assert row is not None, "checked, so it is stored"
    if event.in_doubt != row.in_doubt:
        (listed.enter if event.in_doubt else listed.leave)(state, listed.Kind.IN_DOUBT, event.token)
    due = state.tables[t.DUE]
    if row.check_at:
        due.delete(t.DUE_KEY.pack(row.check_at, t.DUE_CHECK, row.ticket))
    due.put(t.DUE_KEY.pack(event.check_at, t.DUE_CHECK, row.ticket), (event.token,))
    state.transactions.put(
        event.token, row._replace(check_at=event.check_at, tries=event.tries, in_doubt=event.in_doubt)
    )


def decide_sweep(state: State, command: Sweep, now: int) -> Outcome:
    idle = [name for name, producer in state.producers.items() if producer.seen_at < now - PRODUCERS_KEPT][:AT_ONCE]
    old, looked = _old_transactions(state, command.after, now)
    events = (
        *((ProducerForgotten(tuple(idle)),) if idle else ()),
        *((TransactionsForgotten(tuple(old)),) if old else ()),
    )
    return Outcome(events, looked)


def _old_transactions(state: State, after: bytes, now: int) -> tuple[list[bytes], bytes]:
    """What is to be forgotten, and where to go on; tokens sort by their time.

    What is undecided or yet to be published is never forgotten, nor what was decided by hand and not dealt with: there
    may be more of that at the beginning than one sweep looks at.
    """
    old: list[bytes] = []
    stop = ((now - KEPT) // 1_000).to_bytes(6, "big").ljust(16, b"\0")
    touched = 0
    for looked, (token, row) in enumerate(state.transactions.range(after, stop)):
        if max(looked, touched) >= AT_ONCE:
            return old, token
        found = Transaction._make(row)
        large = pieces.of_row(found.large)
        idle = large is None or large.phase is Phase.NONE
        if found.state in FORGETTABLE and idle and not branches.has_heuristics(state, token):
            touched += 1 if large is None else 1 + large.pieces
            old.append(token)
    return old, b""


def apply_transactions_forgotten(state: State, event: TransactionsForgotten, place: Place) -> None:
    del place
    for token in event.tokens:
        row = get(state, token)
        assert row is not None, "it was there when it was found old"
        branches.forget(state, token, row.decider)
        for number in range(0 if row.large is None else row.large.pieces):
            pieces.drop(state, token, number)
        state.transactions.delete(token)


def apply_producers_forgotten(state: State, event: ProducerForgotten, place: Place) -> None:
    del place
    for name in event.producers:
        state.producers.pop(name, None)
        state.dirty_producers.add(name)


DECIDERS = {PlanCheck: decide_plan, Sweep: decide_sweep}
APPLIERS = {
    CheckPlanned: apply_planned,
    TransactionsForgotten: apply_transactions_forgotten,
    ProducerForgotten: apply_producers_forgotten,
}
