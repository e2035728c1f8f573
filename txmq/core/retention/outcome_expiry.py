"""Expiry of outcomes and of other records that have no topic, some rows in each step.

- Producing sessions: 7 days after their last send.
- Outcomes of transactions: 7 days after the time of their tokens. Those without a final
  outcome, or with heuristics that nobody has cleared, stay.
- Conflicts, that is contradictions of a decision: 30 days.
- Decisions of jobs: 7 days, or 400 where the token stands for a name.
- Producer instances: 30 days after the last connection.
- Failures of messages that were processed: as retention removes the message.
- Watermarks: never. Without its watermark a source would be stored a second time.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.events.topics import ProducerForgotten
from txmq.core.events.transactions import TransactionsForgotten
from txmq.core.retention import past_failures
from txmq.core.state.state import State
from txmq.core.transactions import branches, decisions, indexes, instances, jobs, large_bundles
from txmq.core.transactions.large_bundles import PiecePhase
from txmq.core.transactions.model import OUTCOME_RETENTION, Transaction, first_token, get
from txmq.model.bundle import BundleState
from txmq.model.units import DAY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from txmq.core.events.base import Event, RecordContext

STEP_ROWS = 250  # touched by one step, so that no apply takes long
FINAL_STATES = (BundleState.PUBLISHED, BundleState.ROLLED_BACK)
PRODUCER_RETENTION = 7 * DAY  # since the last send


class ExpireOutcomes(NamedTuple):
    """Timer: one step of the expiry. `kind` is an index of `KINDS`, `after` the place
    that the previous step has reached.

    `connected` are the keys of producer instances with a connected process. The reply
    is the command of the next step; None = all is done for now.
    """

    kind: int = 0
    after: bytes = b""
    connected: frozenset[bytes] = frozenset()


class ExpiryStep(NamedTuple):
    """The events of a step, and the place for the next one; None = the kind is done."""

    events: tuple[Event, ...]
    after: bytes | None = None


def decide_expire(state: State, command: ExpireOutcomes, now: int) -> Outcome:
    events, after = KINDS[command.kind](state, command, state.certain(now))
    following = (
        command._replace(kind=command.kind + 1, after=b"")
        if after is None
        else command._replace(after=after)
    )
    return Outcome(events, following if following.kind < len(KINDS) else None)


def _producers(state: State, _command: ExpireOutcomes, now: int) -> ExpiryStep:
    idle = (
        name
        for name, producer in state.producers.items()
        if producer.seen_at < now - PRODUCER_RETENTION
    )
    found = tuple(islice(idle, STEP_ROWS))
    return ExpiryStep(
        (ProducerForgotten(found),) if found else (), b"" if len(found) == STEP_ROWS else None
    )


def _transactions(state: State, _command: ExpireOutcomes, now: int) -> ExpiryStep:
    # Tokens sort by their time. No row is scanned twice, because many rows may have to
    # stay; transactions that end later are in the list LATE.
    stop = first_token(now - OUTCOME_RETENTION)
    rows: Any = state.transactions.range(state.expired_to, stop)
    old, upto = _final_transactions(state, rows)
    if upto is None:
        return ExpiryStep(
            (TransactionsForgotten(old, stop),) if old or _has_any_before(state, stop) else ()
        )
    return ExpiryStep((TransactionsForgotten(old, upto),), b"")


def _has_any_before(state: State, stop: bytes) -> bool:
    # Without rows to pass there is no event: an idle broker writes nothing.
    return next(iter(state.transactions.range(state.expired_to, stop)), None) is not None


def _late_transactions(state: State, command: ExpireOutcomes, _now: int) -> ExpiryStep:
    names = indexes.listed_tokens(state, indexes.ListKind.LATE, command.after)
    rows = ((token, state.transactions.get(token)) for token in names)
    old, upto = _final_transactions(state, rows)
    return ExpiryStep((TransactionsForgotten(old, state.expired_to),) if old else (), upto)


def _final_transactions(
    state: State, rows: Iterable[tuple[bytes, Any]]
) -> tuple[tuple[bytes, ...], bytes | None]:
    """Return the tokens that expire, and the first token not examined; None = all
    were.
    """
    old: list[bytes] = []
    touched = 0
    for scanned, (token, row) in enumerate(rows):
        if max(scanned, touched) >= STEP_ROWS:
            return tuple(old), token
        found = Transaction(*row)
        large = large_bundles.read_large(found.large)
        idle = large is None or large.phase is PiecePhase.NONE
        owing = branches.has_heuristics(state, token) or indexes.is_listed(
            state, indexes.ListKind.UNVERIFIED, token
        )
        if found.state in FINAL_STATES and idle and not owing:
            touched += 1 if large is None else 1 + large.pieces
            old.append(token)
    return tuple(old), None


def _conflicts(state: State, _command: ExpireOutcomes, now: int) -> ExpiryStep:
    event, more = decisions.find_expired_conflicts(state, now, STEP_ROWS)
    return ExpiryStep(() if event is None else (event,), b"" if more else None)


def _jobs(state: State, command: ExpireOutcomes, now: int) -> ExpiryStep:
    event, after = jobs.find_expired(state, now, command.after, STEP_ROWS)
    return ExpiryStep(() if event is None else (event,), after)


def _instances(state: State, command: ExpireOutcomes, now: int) -> ExpiryStep:
    return ExpiryStep(
        *instances.find_expired(state, now, command.after, command.connected, STEP_ROWS)
    )


def _histories(state: State, command: ExpireOutcomes, _now: int) -> ExpiryStep:
    event, after = past_failures.find_over(state, command.after, STEP_ROWS)
    return ExpiryStep(() if event is None else (event,), after)


KINDS: tuple[Callable[[State, ExpireOutcomes, int], ExpiryStep], ...] = (
    _producers, _transactions, _late_transactions, _conflicts, _jobs, _instances, _histories,
)  # fmt: skip


def apply_transactions_forgotten(
    state: State, event: TransactionsForgotten, _context: RecordContext
) -> None:
    for token in event.tokens:
        row = get(state, token)
        assert row is not None, "only rows that exist expire"
        branches.forget(state, token, row.decider)
        for number in range(0 if row.large is None else row.large.pieces):
            large_bundles.drop_piece(state, token, number)
        indexes.remove_from_list(state, indexes.ListKind.LATE, token)
        state.transactions.delete(token)
    state.expired_to = max(state.expired_to, event.looked)


def apply_producers_forgotten(
    state: State, event: ProducerForgotten, _context: RecordContext
) -> None:
    for name in event.producers:
        state.producers.pop(name, None)
        state.dirty_producers.add(name)


DECIDERS: Deciders = {ExpireOutcomes: decide_expire}
APPLIERS: Appliers = {
    TransactionsForgotten: apply_transactions_forgotten,
    ProducerForgotten: apply_producers_forgotten,
}
