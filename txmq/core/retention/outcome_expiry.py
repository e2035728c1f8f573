"""Sweeping: what is forgotten after its time, a slice of it in each step.

| what | kept for |
|---|---|
| producing sessions | 7 days since their last send |
| outcomes of transactions | 7 days since their tokens were made; what is not over and dealt with stays |
| contradicted decisions | 30 days |
| decisions of jobs | 7 days where the token tells its time; 400 days where it stands for a name (`jobs`) |
| producer instances | 30 days since one was last seen connected |
| marks | for ever: without its mark a source would be stored again (`marks`); there is one for each source |
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.events.base import ProducerForgotten
from txmq.core.events.transactions import TransactionsForgotten
from txmq.core.state.state import Outcome, State
from txmq.core.transactions import branches, decisions, instances, jobs, large_bundles, listed
from txmq.core.transactions.large_bundles import Phase
from txmq.core.transactions.model import KEPT, Transaction, get
from txmq.model.bundle import GroupState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from txmq.core.events.base import Event, Place

AT_ONCE = 250  # rows that one step may touch, so that no apply takes long
FORGETTABLE = (GroupState.PUBLISHED, GroupState.ROLLED_BACK)
PRODUCERS_KEPT = 7 * 24 * 3600 * 1_000_000  # idle for so long (ARCHITECTURE 5)


class Sweep(NamedTuple):
    """Timer: one step. `kind` is the number of what is swept, `after` where the step
    before came to.

    `connected` are the producer instances of which somebody is connected, as keys of
    their table. The reply is the next step's command, None = that was all for now.
    """

    kind: int = 0
    after: bytes = b""
    connected: frozenset[bytes] = frozenset()


class Swept(NamedTuple):
    """What a step found to be forgotten, and where the next one goes on; None = there
    is no more of the kind.
    """

    events: tuple[Event, ...]
    after: bytes | None = None


def decide_sweep(state: State, command: Sweep, now: int) -> Outcome:
    events, after = KINDS[command.kind](state, command, now)
    following = (
        command._replace(kind=command.kind + 1, after=b"")
        if after is None
        else command._replace(after=after)
    )
    return Outcome(events, following if following.kind < len(KINDS) else None)


def _producers(state: State, command: Sweep, now: int) -> Swept:
    del command
    idle = (
        name
        for name, producer in state.producers.items()
        if producer.seen_at < now - PRODUCERS_KEPT
    )
    found = tuple(islice(idle, AT_ONCE))
    return Swept(
        (ProducerForgotten(found),) if found else (), b"" if len(found) == AT_ONCE else None
    )


def _transactions(state: State, command: Sweep, now: int) -> Swept:
    """Tokens sort by their time, and what was looked through is not looked at again:
    there may be very much that must be kept. What of that comes to its end later is
    listed.
    """
    del command
    stop = ((now - KEPT) // 1_000).to_bytes(6, "big").ljust(16, b"\0")
    rows: Any = state.transactions.range(state.swept, stop)
    old, upto = _old_ones(state, rows)
    if upto is None:
        return Swept((TransactionsForgotten(old, stop),) if old or _any(state, stop) else ())
    return Swept((TransactionsForgotten(old, upto),), b"")


def _any(state: State, stop: bytes) -> bool:
    """Whether there is anything to get past, so that an idle broker writes nothing."""
    return next(iter(state.transactions.range(state.swept, stop)), None) is not None


def _late(state: State, command: Sweep, now: int) -> Swept:
    del now
    names = listed.tokens(state, listed.Kind.LATE, command.after)
    rows = ((token, state.transactions.get(token)) for token in names)
    old, upto = _old_ones(state, rows)
    return Swept((TransactionsForgotten(old, state.swept),) if old else (), upto)


def _old_ones(
    state: State, rows: Iterable[tuple[bytes, Any]]
) -> tuple[tuple[bytes, ...], bytes | None]:
    """What of them is to be forgotten, and the first that was not looked at any
    more.
    """
    old: list[bytes] = []
    touched = 0
    for looked, (token, row) in enumerate(rows):
        if max(looked, touched) >= AT_ONCE:
            return tuple(old), token
        found = Transaction(*row)
        large = large_bundles.of_row(found.large)
        idle = large is None or large.phase is Phase.NONE
        if found.state in FORGETTABLE and idle and not branches.has_heuristics(state, token):
            touched += 1 if large is None else 1 + large.pieces
            old.append(token)
    return tuple(old), None


def _conflicts(state: State, command: Sweep, now: int) -> Swept:
    del command
    event, more = decisions.old_conflicts(state, now, AT_ONCE)
    return Swept(() if event is None else (event,), b"" if more else None)


def _jobs(state: State, command: Sweep, now: int) -> Swept:
    event, after = jobs.old(state, now, command.after, AT_ONCE)
    return Swept(() if event is None else (event,), after)


def _instances(state: State, command: Sweep, now: int) -> Swept:
    return Swept(*instances.old(state, now, command.after, command.connected, AT_ONCE))


KINDS: tuple[Callable[[State, Sweep, int], Swept], ...] = (
    _producers, _transactions, _late, _conflicts, _jobs, _instances,
)  # fmt: skip


def apply_transactions_forgotten(state: State, event: TransactionsForgotten, place: Place) -> None:
    del place
    for token in event.tokens:
        row = get(state, token)
        assert row is not None, "it was there when it was found old"
        branches.forget(state, token, row.decider)
        for number in range(0 if row.large is None else row.large.pieces):
            large_bundles.drop(state, token, number)
        listed.leave(state, listed.Kind.LATE, token)
        state.transactions.delete(token)
    state.swept = max(state.swept, event.looked)


def apply_producers_forgotten(state: State, event: ProducerForgotten, place: Place) -> None:
    del place
    for name in event.producers:
        state.producers.pop(name, None)
        state.dirty_producers.add(name)


DECIDERS = {Sweep: decide_sweep}
APPLIERS: dict[type, Any] = {
    TransactionsForgotten: apply_transactions_forgotten,
    ProducerForgotten: apply_producers_forgotten,
}
