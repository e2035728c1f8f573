"""The backlog, step by step.

Each step is one record. It processes one piece of a large bundle, or a few small
bundles.

    committed ───► HOLDING ─► CHECKING ─► PUBLISHING ─► published
    rolled back ─► DROPPING ─► gone

HOLDING is needed only where the bundle did not hold its keys before. In CHECKING a
large bundle waits for the last earlier ticket of its keys. Then one record reserves its
offsets, so that messages sent from now on come after it, and its pieces are
published behind visibility barriers. Every step can be the last one before a crash: the
tables say where to continue.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.events.transactions import BacklogDone, GroupWaits, PieceDone, PublicationBegun
from txmq.core.state import visibility
from txmq.core.topics import key_order, lost_batches
from txmq.core.topics.key_order import ReleasePlan
from txmq.core.transactions import decisions, indexes, jobs, large_bundles
from txmq.core.transactions.large_bundles import PiecePhase
from txmq.core.transactions.model import Transaction, get, is_large
from txmq.model.bundle import BundleState
from txmq.model.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from txmq.core.events.base import RecordContext
    from txmq.core.state.state import State
    from txmq.core.topics.key_order import Holder, UnplacedBatch
    from txmq.core.transactions.large_bundles import LargeBundle


class CheckedPieces(NamedTuple):
    """The pieces before `piece` have no earlier ticket on their keys.

    This is in no record: after a crash the bundle is checked again.
    """

    token: bytes
    piece: int


class AdvanceBacklog(NamedTuple):
    """Do the next step of the backlog.

    `durable` is the durable end of the log, `checked` that of the last step's reply.
    """

    durable: int
    checked: CheckedPieces | None = None


class BacklogStep(NamedTuple):
    """The reply of a step.

    `idle`: the next step has to wait for another decision or for a flush.
    """

    checked: CheckedPieces | None = None
    idle: bool = False


IDLE = Outcome(reply=BacklogStep(idle=True))


def advance_backlog(state: State, command: AdvanceBacklog, _now: int) -> Outcome:
    token = visibility.publishing_token(state)
    if token is None:
        first = next(indexes.backlog_rows(state), None)
        if first is None:
            return IDLE
        token = first[1]
    work = None if token is None else jobs.get_progress(state, token)
    if work is not None and token is not None:
        return Outcome((jobs.next_step(state, token, work),), BacklogStep(), early=True)
    row = None if token is None else get(state, token)
    if row is None or row.large is None or token is None:
        return _release_small(state)
    return PHASES[row.large.phase](state, token, row, row.large, command)


def _release_small(state: State) -> Outcome:
    plan = ReleasePlan(state, partial(decisions.find_publishable, state))
    considered: list[int] = []
    for ticket, token in indexes.backlog_rows(state):
        if plan.exhausted or (
            token is not None and (is_large(state, token) or jobs.get_progress(state, token))
        ):
            break
        considered.append(ticket)
        plan.consider(ticket, token)
    return Outcome((BacklogDone(tuple(considered), *plan.drain()),), BacklogStep())


def _hold(
    state: State, token: bytes, _row: Transaction, large: LargeBundle, command: AdvanceBacklog
) -> Outcome:
    # Keys need not be held if no other ticket holds any, and publication can begin.
    if (
        not large.done
        and not _contested(state, large)
        and visibility.all_passed(state, command.durable)
    ):
        return _begin(state, token, large)
    return Outcome((PieceDone(token, large.done),), BacklogStep(), early=True)


def _drop(
    state: State, token: bytes, row: Transaction, large: LargeBundle, _command: AdvanceBacklog
) -> Outcome:
    later = _next_holders(state, row, large, large_bundles.get_piece(state, token, large.done))
    return Outcome((PieceDone(token, large.done, later),), BacklogStep(), early=True)


def _check(
    state: State, token: bytes, row: Transaction, large: LargeBundle, command: AdvanceBacklog
) -> Outcome:
    checked = command.checked
    number = checked.piece if checked is not None and checked.token == token else large.done
    contested = _contested(state, large)
    if contested and number < large.pieces:
        if _blocked(state, row.ticket, large_bundles.get_piece(state, token, number), contested):
            return Outcome((GroupWaits(token, number),), BacklogStep())
        return Outcome(reply=BacklogStep(CheckedPieces(token, number + 1)), early=True)
    if not visibility.all_passed(state, command.durable):
        return Outcome(reply=BacklogStep(checked, idle=True))
    return _begin(state, token, large)


def _begin(state: State, token: bytes, large: LargeBundle) -> Outcome:
    bases = tuple(
        state.topics_by_id[one.topic_id].end_offsets[one.partition] for one in large.partitions
    )
    return Outcome((PublicationBegun(token, bases),), BacklogStep(), early=True)


def _publish(
    state: State, token: bytes, row: Transaction, large: LargeBundle, _command: AdvanceBacklog
) -> Outcome:
    # The reply to the last piece waits for the disk, and so does the next step.
    later = _next_holders(state, row, large, large_bundles.get_piece(state, token, large.done))
    return Outcome((PieceDone(token, large.done, later),), BacklogStep(), early=not large.last)


PHASES: dict[
    PiecePhase, Callable[[State, bytes, Transaction, LargeBundle, AdvanceBacklog], Outcome]
] = {
    PiecePhase.HOLDING: _hold,
    PiecePhase.CHECKING: _check,
    PiecePhase.PUBLISHING: _publish,
    PiecePhase.DROPPING: _drop,
}


def _contested(state: State, large: LargeBundle) -> set[TopicPartition]:
    """Return the partitions in which other tickets hold keys, too."""
    return {
        one.topic_partition
        for one in large.partitions
        if state.held_keys[one.topic_partition] > one.held
    }


def _keys(
    batches: Iterable[UnplacedBatch], partitions: Container[TopicPartition]
) -> Iterable[key_order.OrderKey]:
    return key_order.keys_of(_in(batches, partitions))


def _in(
    batches: Iterable[UnplacedBatch], partitions: Container[TopicPartition]
) -> list[UnplacedBatch]:
    """Return the batches of these partitions. Mostly there are none: so the keys of the
    others, which are many, are not looked at.
    """
    return [one for one in batches if (one.topic_id, one.partition) in partitions]


def _blocked(
    state: State, ticket: int, batches: tuple[UnplacedBatch, ...], partitions: set[TopicPartition]
) -> bool:
    holders = (key_order.next_holder(state, key, ticket) for key in _keys(batches, partitions))
    return any(holder is not None and holder[0] < ticket for holder in holders)


def _next_holders(
    state: State, row: Transaction, large: LargeBundle, batches: tuple[UnplacedBatch, ...]
) -> tuple[Holder, ...]:
    """Return the committed holders that come next on keys that are released now."""
    found: dict[int, bytes | None] = {}
    for key in _keys(batches, _contested(state, large)):
        holder = key_order.next_holder(state, key, row.ticket)
        if holder is not None:
            found[holder[0]] = holder[1]
    return tuple(
        sorted(
            (n, token)
            for n, token in found.items()
            if decisions.find_publishable(state, n, token) is not None
        )
    )


def apply_waits(state: State, event: GroupWaits, _context: RecordContext) -> None:
    row, large = _large(state, event.token)
    indexes.remove_from_backlog(state, row.ticket)
    state.transactions.put(event.token, row._replace(large=large._replace(done=event.piece)))


def apply_begun(state: State, event: PublicationBegun, context: RecordContext) -> None:
    row, large = _large(state, event.token)
    partitions = tuple(
        one._replace(base=base) for one, base in zip(large.partitions, event.bases, strict=True)
    )
    for one in partitions:
        topic = state.topics_by_id[one.topic_id]
        lost_batches.move_end(state, topic, one.partition, one.base, one.messages, context)
        state.dirty_topics.add(one.topic_id)
    visibility.put_up(
        state,
        event.token,
        ((one.topic_partition, one.base) for one in partitions),
    )
    after = large._replace(
        partitions=partitions, phase=PiecePhase.PUBLISHING, done=0, begun=context.end
    )
    state.transactions.put(event.token, row._replace(large=after))


def apply_piece(state: State, event: PieceDone, context: RecordContext) -> None:
    row, large = _large(state, event.token)
    batches = large_bundles.get_piece(state, event.token, event.piece)
    after = APPLY_PIECE[large.phase](state, event.token, row, large, batches, context)
    if large.last:
        row, after = _end_phase(state, event.token, row, after, context)
    else:
        after = after._replace(done=large.done + 1)
    state.transactions.put(event.token, row._replace(large=after))
    indexes.add_all_to_backlog(state, event.later)


def _end_phase(
    state: State, token: bytes, row: Transaction, large: LargeBundle, context: RecordContext
) -> tuple[Transaction, LargeBundle]:
    """Apply: the last piece of a phase is processed."""
    if large.phase is PiecePhase.HOLDING:
        return row, large._replace(phase=PiecePhase.CHECKING, done=0)
    indexes.remove_from_backlog(state, row.ticket)
    if large.phase is PiecePhase.PUBLISHING:
        row = row._replace(state=BundleState.PUBLISHED)
        indexes.remove_from_list(state, indexes.ListKind.WAITING, token)
        visibility.lift(state, context.end)
    else:
        large = large._replace(pieces=0)
    indexes.note_ended(state, token)
    return row, large._replace(phase=PiecePhase.NONE, done=0)


def _apply_hold(
    state: State,
    token: bytes,
    row: Transaction,
    large: LargeBundle,
    batches: tuple[UnplacedBatch, ...],
    _context: RecordContext,
) -> LargeBundle:
    return large_bundles.add_holds(large, key_order.hold_keys(state, row.ticket, token, batches))


def _apply_publish(
    state: State,
    token: bytes,
    row: Transaction,
    large: LargeBundle,
    batches: tuple[UnplacedBatch, ...],
    context: RecordContext,
) -> LargeBundle:
    bases = {one.topic_partition: one.base for one in large.partitions}
    given, offsets = Counter[TopicPartition](), []
    # Messages that come between two pieces have later offsets. Theirs is the later
    # place in the order of publication, too, by which key fences release a key's
    # messages. The barrier keeps readers out until the last piece is durable.
    begun = context._replace(end=large.begun or context.end)
    for batch in batches:
        if batch.delay is not None:
            offsets.append(large_bundles.DELAYED)
            key_order.delay_message(state, token, batch, batch.delay, context)
        elif batch.count:
            tp = TopicPartition(batch.topic_id, batch.partition)
            offsets.append(bases[tp] + given[tp])
            key_order.publish_batch(state, batch, offsets[-1], begun)
            given[tp] += batch.count
    large_bundles.put_published(state, token, large.done, batches, tuple(offsets))
    after = _release(state, row, large, batches)
    return after._replace(
        partitions=tuple(
            s._replace(base=s.base + given[s.topic_partition]) for s in after.partitions
        )
    )


def _apply_drop(
    state: State,
    token: bytes,
    row: Transaction,
    large: LargeBundle,
    batches: tuple[UnplacedBatch, ...],
    _context: RecordContext,
) -> LargeBundle:
    large_bundles.drop_piece(state, token, large.done)
    return _release(state, row, large, batches)


def _release(
    state: State, row: Transaction, large: LargeBundle, batches: tuple[UnplacedBatch, ...]
) -> LargeBundle:
    holding = {one.topic_partition for one in large.partitions if one.held}
    released = key_order.release_keys(state, row.ticket, _in(batches, holding))
    return large_bundles.add_holds(large, {tp: -count for tp, count in released.items()})


APPLY_PIECE = {
    PiecePhase.HOLDING: _apply_hold,
    PiecePhase.PUBLISHING: _apply_publish,
    PiecePhase.DROPPING: _apply_drop,
}


def apply_backlog(state: State, event: BacklogDone, context: RecordContext) -> None:
    for ticket in event.tickets:
        indexes.remove_from_backlog(state, ticket)
    decisions.apply_released(state, event.released, context)
    indexes.add_all_to_backlog(state, event.later)


def _large(state: State, token: bytes) -> tuple[Transaction, LargeBundle]:
    row = get(state, token)
    assert row is not None, "it is in the backlog, so it is stored"
    assert row.large is not None, "it is large"
    return row, row.large


DECIDERS: Deciders = {AdvanceBacklog: advance_backlog}
APPLIERS: Appliers = {
    GroupWaits: apply_waits,
    PublicationBegun: apply_begun,
    PieceDone: apply_piece,
    BacklogDone: apply_backlog,
}
