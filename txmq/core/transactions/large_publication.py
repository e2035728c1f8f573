"""The backlog, step by step: each step looks at one piece of one large group, or at a
few small ones, in one record.

    committed ─► TAKING ─► CHECKING ─► PUBLISHING ─► published        TAKING only where the keys were not held before
    rolled back ─► DROPPING ─► gone

A large group waits in CHECKING for the last earlier ticket of its keys. Then its
offsets are set aside in one record, so that whatever is sent from now on comes after
it, and its pieces are put into place behind gates. Every step can be the last one
before a crash: the tables tell where to go on.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from txmq.core.events.transactions import BacklogDone, GroupWaits, PieceDone, PublicationBegun
from txmq.core.state import visibility
from txmq.core.state.state import Outcome, State
from txmq.core.topics import key_order
from txmq.core.topics.key_order import Release
from txmq.core.transactions import backlog, decisions, jobs, listed
from txmq.core.transactions import large_bundles as pieces
from txmq.core.transactions.large_bundles import Phase
from txmq.core.transactions.model import Transaction, get, is_large
from txmq.model.bundle import GroupState

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.core.events.base import Place
    from txmq.core.topics.key_order import HeldBatch
    from txmq.core.transactions.large_bundles import Large

Later = tuple[tuple[int, bytes | None], ...]


class Progress(NamedTuple):
    """Up to which piece a large group was found free. It is in no record: after a crash
    it is looked at again.
    """

    token: bytes
    piece: int


class Advance(NamedTuple):
    """Do the next step. `durable` is how much of the log is; `checked` what the step
    before this one replied.
    """

    durable: int
    checked: Progress | None = None


class Step(NamedTuple):
    """What a step came to; `idle`: nothing can be done before something else happens or
    is durable.
    """

    checked: Progress | None = None
    idle: bool = False


IDLE = Outcome(reply=Step(idle=True))


def decide_advance(state: State, command: Advance, now: int) -> Outcome:
    del now
    token = visibility.publisher(state)
    if token is None:
        first = next(backlog.rows(state), None)
        if first is None:
            return IDLE
        token = first[1]
    work = None if token is None else jobs.under_way(state, token)
    if work is not None and token is not None:
        return Outcome((jobs.next_step(state, token, work),), Step(), early=True)
    row = None if token is None else get(state, token)
    if row is None or row.large is None or token is None:
        return _small_ones(state)
    return PHASES[row.large.phase](state, token, row, row.large, command)


def _small_ones(state: State) -> Outcome:
    release = Release(state, lambda ticket, token: decisions.committed(state, ticket, token))
    looked_at: list[int] = []
    for ticket, token in backlog.rows(state):
        if release.exhausted or (
            token is not None and (is_large(state, token) or jobs.under_way(state, token))
        ):
            break
        looked_at.append(ticket)
        release.consider(ticket, token)
    return Outcome((BacklogDone(tuple(looked_at), tuple(release.released), release.rest),), Step())


def _take(state: State, token: bytes, row: Transaction, large: Large, command: Advance) -> Outcome:
    """Nothing needs to be taken where nobody else holds a key, and the group's turn has
    come.
    """
    del row
    if (
        not large.done
        and not _spots_of_others(state, large)
        and visibility.all_out_of_the_way(state, command.durable)
    ):
        return _begin(state, token, large)
    return Outcome((PieceDone(token, large.done),), Step(), early=True)


def _drop(state: State, token: bytes, row: Transaction, large: Large, command: Advance) -> Outcome:
    del command
    later = _waiting_for(state, row, large, pieces.piece(state, token, large.done))
    return Outcome((PieceDone(token, large.done, later),), Step(), early=True)


def _check(state: State, token: bytes, row: Transaction, large: Large, command: Advance) -> Outcome:
    checked = command.checked
    number = checked.piece if checked is not None and checked.token == token else large.done
    others = _spots_of_others(state, large)
    if others and number < large.pieces:
        if _blocked(state, row.ticket, pieces.piece(state, token, number), others):
            return Outcome((GroupWaits(token, number),), Step())
        return Outcome(reply=Step(Progress(token, number + 1)), early=True)
    if not visibility.all_out_of_the_way(state, command.durable):
        return Outcome(reply=Step(checked, idle=True))
    return _begin(state, token, large)


def _begin(state: State, token: bytes, large: Large) -> Outcome:
    bases = tuple(
        state.topics_by_id[share.topic_id].ends[share.partition] for share in large.shares
    )
    return Outcome((PublicationBegun(token, bases),), Step(), early=True)


def _publish(
    state: State, token: bytes, row: Transaction, large: Large, command: Advance
) -> Outcome:
    """The last piece's reply waits for the disk, and so does whatever is done next."""
    del command
    later = _waiting_for(state, row, large, pieces.piece(state, token, large.done))
    return Outcome((PieceDone(token, large.done, later),), Step(), early=not large.last)


PHASES: dict[Phase, Callable[[State, bytes, Transaction, Large, Advance], Outcome]] = {
    Phase.TAKING: _take,
    Phase.CHECKING: _check,
    Phase.PUBLISHING: _publish,
    Phase.DROPPING: _drop,
}


def _spots_of_others(state: State, large: Large) -> set[tuple[int, int]]:
    """The partitions in which somebody else holds keys: in all others nothing needs to
    be looked at.
    """
    return {share[:2] for share in large.shares if state.holds[share[:2]] > share.held}


def _keys(batches: tuple[HeldBatch, ...], spots: set[tuple[int, int]]) -> list[key_order.Key]:
    return [key for key in key_order.keys_of(batches) if key[:2] in spots]


def _blocked(
    state: State, ticket: int, batches: tuple[HeldBatch, ...], spots: set[tuple[int, int]]
) -> bool:
    holders = (key_order.next_holder(state, key, ticket) for key in _keys(batches, spots))
    return any(holder is not None and holder[0] < ticket for holder in holders)


def _waiting_for(
    state: State, row: Transaction, large: Large, batches: tuple[HeldBatch, ...]
) -> Later:
    """Those who are committed and come next on keys that are let go of."""
    found: dict[int, bytes | None] = {}
    for key in _keys(batches, _spots_of_others(state, large)):
        holder = key_order.next_holder(state, key, row.ticket)
        if holder is not None:
            found[holder[0]] = holder[1]
    return tuple(
        sorted(
            (n, token)
            for n, token in found.items()
            if decisions.committed(state, n, token) is not None
        )
    )


def apply_waits(state: State, event: GroupWaits, place: Place) -> None:
    del place
    row, large = _large(state, event.token)
    backlog.drop(state, row.ticket)
    state.transactions.put(event.token, row._replace(large=large._replace(done=event.piece)))


def apply_begun(state: State, event: PublicationBegun, place: Place) -> None:
    del place
    row, large = _large(state, event.token)
    shares = tuple(
        share._replace(base=base) for share, base in zip(large.shares, event.bases, strict=True)
    )
    for share in shares:
        state.topics_by_id[share.topic_id].ends[share.partition] = share.base + share.messages
        state.dirty_topics.add(share.topic_id)
    visibility.shut(state, event.token, ((share[:2], share.base) for share in shares))
    after = large._replace(shares=shares, phase=Phase.PUBLISHING, done=0)
    state.transactions.put(event.token, row._replace(large=after))


def apply_piece(state: State, event: PieceDone, place: Place) -> None:
    row, large = _large(state, event.token)
    batches = pieces.piece(state, event.token, event.piece)
    after = APPLY_PIECE[large.phase](state, event.token, row, large, batches, place)
    if large.last:
        row, after = _over(state, event.token, row, after, place)
    else:
        after = after._replace(done=large.done + 1)
    state.transactions.put(event.token, row._replace(large=after))
    backlog.add_all(state, event.later)


def _over(
    state: State, token: bytes, row: Transaction, large: Large, place: Place
) -> tuple[Transaction, Large]:
    """The last piece of a phase is done."""
    if large.phase is Phase.TAKING:
        return row, large._replace(phase=Phase.CHECKING, done=0)
    backlog.drop(state, row.ticket)
    if large.phase is Phase.PUBLISHING:
        row = row._replace(state=GroupState.PUBLISHED)
        listed.leave(state, listed.Kind.WAITING, token)
        visibility.lift(state, place.end)
    else:
        large = large._replace(pieces=0)
    listed.ended(state, token)
    return row, large._replace(phase=Phase.NONE, done=0)


def _apply_take(
    state: State,
    token: bytes,
    row: Transaction,
    large: Large,
    batches: tuple[HeldBatch, ...],
    place: Place,
) -> Large:
    del place
    return pieces.held(large, key_order.take(state, row.ticket, token, batches))


def _apply_publish(
    state: State,
    token: bytes,
    row: Transaction,
    large: Large,
    batches: tuple[HeldBatch, ...],
    place: Place,
) -> Large:
    bases = {share[:2]: share.base for share in large.shares}
    given, offsets = Counter[tuple[int, int]](), []
    for batch in batches:
        if batch.delay is not None:
            offsets.append(pieces.DELAYED)
            key_order.put_off(state, token, batch, batch.delay, place)
        elif batch.count:
            spot = (batch.topic_id, batch.partition)
            offsets.append(bases[spot] + given[spot])
            key_order.point_at(state, batch, offsets[-1], place)
            given[spot] += batch.count
    pieces.published(state, token, large.done, batches, tuple(offsets))
    after = _let_go(state, row, large, batches)
    return after._replace(
        shares=tuple(s._replace(base=s.base + given[s[:2]]) for s in after.shares)
    )


def _apply_drop(
    state: State,
    token: bytes,
    row: Transaction,
    large: Large,
    batches: tuple[HeldBatch, ...],
    place: Place,
) -> Large:
    del place
    pieces.drop(state, token, large.done)
    return _let_go(state, row, large, batches)


def _let_go(state: State, row: Transaction, large: Large, batches: tuple[HeldBatch, ...]) -> Large:
    dropped = key_order.drop(state, row.ticket, batches)
    return pieces.held(large, {spot: -count for spot, count in dropped.items()})


APPLY_PIECE = {
    Phase.TAKING: _apply_take,
    Phase.PUBLISHING: _apply_publish,
    Phase.DROPPING: _apply_drop,
}


def apply_backlog(state: State, event: BacklogDone, place: Place) -> None:
    for ticket in event.tickets:
        backlog.drop(state, ticket)
    decisions.apply_released(state, event.released, place)
    backlog.add_all(state, event.later)


def _large(state: State, token: bytes) -> tuple[Transaction, Large]:
    row = get(state, token)
    assert row is not None, "it is in the backlog, so it is stored"
    assert row.large is not None, "it is large"
    return row, row.large


DECIDERS = {Advance: decide_advance}
APPLIERS = {
    GroupWaits: apply_waits,
    PublicationBegun: apply_begun,
    PieceDone: apply_piece,
    BacklogDone: apply_backlog,
}
