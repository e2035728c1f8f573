"""Half storage: bundles are stored part by part, until the seal completes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.batch import delivery_times, key_hashes
from txmq.batch.header import DELIVER_AT, KEY
from txmq.core.events.delays import Delay
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.events.transactions import Decided, GroupRefused, PartStored, UnpublishedBatch
from txmq.core.topics import key_order
from txmq.core.topics.key_order import Publishable, ReleasePlan, UnplacedBatch
from txmq.core.topics.sends import distinct_hashes
from txmq.core.topics.topics import find_writable
from txmq.core.transactions import actions, branches, indexes, jobs, large_bundles, watermarks
from txmq.core.transactions.indexes import ListKind
from txmq.core.transactions.large_bundles import PiecePhase
from txmq.core.transactions.model import Transaction, get, is_forgotten, not_stored
from txmq.errors import BadRequest, DigestMismatch, MessageTooLarge, SequenceGap, UnknownTransaction
from txmq.model import limits
from txmq.model.bundle import DECIDED, BundleReceipt, BundleState
from txmq.model.decider import (
    BY_XA_MANAGER,
    DECIDER_TYPES,
    HOLDING_PART_BY_PART,
    ByBroker,
    ByChecker,
    ByForeign,
    ByJob,
    ByPostgres,
    Decider,
    read_decider,
)
from txmq.model.message import Decision
from txmq.model.topic_partition import TopicPartition
from txmq.model.units import MINUTE
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.batch import BatchHeader
    from txmq.core.events.base import RecordContext
    from txmq.core.state.state import State

# An open bundle whose next part does not come in time is rolled back: its producer is
# gone, and never got a receipt for the whole bundle.
OPEN_TIMEOUT = MINUTE
# The database tells whether the producer is gone; a job has a time of its own, because
# the rows of its tasks come as slowly as somebody computes them.
WITH_OWN_TIME = (ByPostgres, ByJob)


class BundleBatch(NamedTuple):
    """A batch of a part, as it was sent. A batch with delays has a single message."""

    topic: str
    epoch: int
    partition: int
    data: bytes
    header: BatchHeader


class StorePart(NamedTuple):
    """Store a part of a bundle.

    Part 0 describes the bundle; later parts have no decider. The `sealed` part
    completes it, and `commit` decides it at once (local and one-phase transactions).
    """

    token: bytes
    part: int
    batches: tuple[BundleBatch, ...]
    sealed: bool
    commit: bool
    digest: bytes
    epoch: int
    decider: Decider | None
    service: str
    actions: tuple[tuple[object, ...], ...]
    check_after: int  # microseconds to the first check-back; 0 = never
    participants: tuple[tuple[object, ...], ...] = ()
    origin: bytes = b""  # the process that sends it


def store_part(state: State, command: StorePart, now: int) -> Outcome:
    row = get(state, command.token)
    reply = _early_reply(state, row, command, now)
    if reply is not None:
        return reply
    decider = command.decider if row is None else row.decider
    assert decider is not None, "part 0 names it"
    _check_form(command, decider)
    batches = _admit(state, command.batches)
    if isinstance(command.decider, ByForeign):
        branches.check_xid(state, command.token, command.decider)
    if command.actions:
        actions.check(state, command.actions)
    event = _stored(state, command, row, decider, batches, now)
    receipt = BundleReceipt(_state_after(event, decider), 0, event.offsets or ())
    return Outcome((event,), receipt, b"".join([batch.data for batch in command.batches]))


def _early_reply(
    state: State, row: Transaction | None, command: StorePart, now: int
) -> Outcome | None:
    """Return the reply to a part that is repeated, out of turn or too late."""
    if row is None:
        return _early_reply_to_first(state, command, now)
    # A bundle that was never complete has no digest.
    if row.digest and row.digest != command.digest and command.sealed:
        raise DigestMismatch(
            f"token {command.token.hex()} was used for other contents",
            hint="a token is never reused",
        )
    if row.state is not BundleState.OPEN or command.part < row.parts:
        return Outcome(reply=BundleReceipt(row.state, row.ticket, row.offsets))
    if command.part > row.parts:
        raise SequenceGap(
            f"part {command.part} after {row.parts} parts", hint="send the missing parts first"
        )
    if isinstance(row.decider, ByJob) and jobs.is_over(state, row.decider.job, now):
        late = Decided(
            command.token, int(Decision.ROLLBACK), "job", "the job was decided without it", ()
        )
        return Outcome((late,), BundleReceipt(BundleState.ROLLED_BACK, 0))
    return None


def _early_reply_to_first(state: State, command: StorePart, now: int) -> Outcome | None:
    if command.part:
        raise SequenceGap(
            f"part {command.part} of a transaction whose part 0 is missing",
            hint="send all parts again",
        )
    if command.actions and watermarks.is_passed(state, command.actions):
        return _refuse(command, "mark", BundleState.PUBLISHED)
    if is_forgotten(state, command.token, now):
        raise UnknownTransaction(
            f"token {command.token.hex()} is older than the outcomes that are kept",
            hint="use a new token",
        )
    if isinstance(command.decider, ByJob) and jobs.is_over(state, command.decider.job, now):
        return _refuse(command, "job", BundleState.ROLLED_BACK)
    return None


def _refuse(command: StorePart, by: str, state: BundleState) -> Outcome:
    """Refuse a bundle. If more parts will come, an event records the refusal."""
    refused = GroupRefused(command.token, command.decider or (), command.service, by, int(state))
    return Outcome(() if command.sealed else (refused,), BundleReceipt(state, 0))


def _check_form(command: StorePart, decider: Decider) -> None:
    rows = 0
    for batch in command.batches:
        rows += batch.header.count
    local = isinstance(decider, ByBroker)
    if rows > limits.PART_ROWS:
        raise MessageTooLarge(
            f"a part of {rows} messages", hint=f"send parts of at most {limits.PART_ROWS} messages"
        )
    if not rows and not command.sealed:
        raise BadRequest(
            f"part {command.part} of a transaction has no messages, and is not the last one",
            hint="send no empty parts before the last one",
        )
    if local and command.sealed and not command.commit:
        raise BadRequest("a local transaction is decided with its seal")
    if command.part and command.commit and not local:
        raise BadRequest("only a local transaction is decided with its seal")


def _admit(state: State, batches: tuple[BundleBatch, ...]) -> tuple[UnpublishedBatch, ...]:
    stored, start = [], 0
    for batch in batches:
        topic = find_writable(
            state, batch.topic, batch.partition, batch.epoch, batch.header, batch.data
        )
        data, header = batch.data, batch.header
        hashes: tuple[int, ...] = ()
        delay = None
        if header.columns & DELIVER_AT and (carried := delivery_times(data, header)):
            # A delayed message takes its place in the order of its key when it is due.
            delay = Delay(carried[0], header.sequence, key_hashes(data, header)[0])
        elif header.columns & KEY:
            hashes = distinct_hashes(key_hashes(data, header))
        size, count, tags = len(data), header.count, header.tag_filter
        stored.append(
            UnpublishedBatch(
                topic.topic_id, batch.partition, start, size, count, tags, hashes, delay
            )
        )
        start += size
    return tuple(stored)


def _stored(
    state: State,
    command: StorePart,
    row: Transaction | None,
    decider: Decider,
    batches: tuple[UnpublishedBatch, ...],
    now: int,
) -> PartStored:
    """Return the event of a part. A bundle that may become large is stored in pieces
    from part 0 on.
    """
    if row is None:
        check_after = command.check_after
        offsets = _offsets_at_once(state, command, batches) if command.commit else None
        keys = sum([max(1, len(batch.hashes)) for batch in batches])
        large = not command.sealed or keys > large_bundles.KEYS_PER_PIECE
    else:
        check_after, offsets, large = row.check_after, None, row.large is not None
    wait = check_after
    if not command.sealed and not (wait and isinstance(decider, WITH_OWN_TIME)):
        wait = OPEN_TIMEOUT
    return PartStored(
        command.token,
        command.part,
        batches,
        command.sealed,
        command.digest if command.sealed else b"",
        command.epoch,
        command.decider or (),
        command.service,
        command.actions,
        now + wait if wait else 0,
        offsets,
        command.participants,
        command.commit,
        large_bundles.KEYS_PER_PIECE if large and offsets is None else 0,
        0 if command.sealed else check_after,
        command.origin if isinstance(decider, ByChecker) else b"",
    )


def _offsets_at_once(
    state: State, command: StorePart, batches: tuple[UnpublishedBatch, ...]
) -> tuple[int, ...] | None:
    """Return the offsets of a bundle that is committed as it is stored.

    None = it has to wait for a held key, or has too many keys to examine each.
    """
    unplaced = key_order.unplaced_batches(batches)
    keys = sum(len(batch.hashes) for batch in unplaced)
    if len(unplaced) > large_bundles.KEYS_PER_PIECE or (
        keys > large_bundles.KEYS_PER_PIECE and _partitions_have_holders(state, unplaced)
    ):
        return None
    if key_order.meets_held_key(state, unplaced):
        return None
    plan = ReleasePlan(state, lambda _ticket, _token: None)
    plan.publish_unordered(Publishable(0, command.token, unplaced))
    return plan.drain()[0][0].offsets


def _partitions_have_holders(state: State, batches: tuple[UnplacedBatch, ...]) -> bool:
    return any(
        state.held_keys[TopicPartition(batch.topic_id, batch.partition)] for batch in batches
    )


def _state_after(event: PartStored, decider: Decider) -> BundleState:
    if event.offsets is not None:
        return BundleState.PUBLISHED
    if not event.sealed:
        return BundleState.OPEN
    if event.commit or isinstance(decider, ByBroker):
        return BundleState.COMMITTED
    return BundleState.UNDECIDED


def apply_stored(state: State, event: PartStored, context: RecordContext) -> None:
    token = event.token
    known = get(state, token)
    batches = key_order.unplaced_batches(event.batches, context.attachment_position)
    if known is None:
        row = _add_first(state, event, context, batches)
    else:
        row = _add_next(state, event, known)
    if event.slice:
        row = _add_pieces(state, event, row, batches)
    elif known is not None:
        row = row._replace(batches=row.batches + batches)
    if row.state is BundleState.PUBLISHED:
        row = row._replace(offsets=event.offsets or (), decided_at=context.stored_at, by="producer")
        key_order.publish(state, row.publishable(token), row.offsets, context)
    elif event.sealed:
        row = _seal(state, token, row)
    if row.state in DECIDED:
        if row.state is BundleState.COMMITTED:
            indexes.add_to_list(state, ListKind.WAITING, token)
        actions.settle(state, token, row.actions, context, committed=True)
    state.transactions.put(token, row)


def _add_first(
    state: State, event: PartStored, context: RecordContext, batches: tuple[UnplacedBatch, ...]
) -> Transaction:
    token, decider = event.token, event.decider
    if not isinstance(decider, DECIDER_TYPES):  # read from the log
        decider = read_decider(decider)
    row = Transaction(
        _state_after(event, decider),
        event.epoch,
        decider,
        event.service,
        event.part + 1,
        context.position,
        event.digest,
        context.stored_at,
        () if event.slice else batches,
        event.actions,
        event.check_at,
        participants=event.participants,
        check_after=event.check_after,
        origin=event.origin,
    )
    if event.actions:
        actions.reserve(state, token, event.actions)
    if isinstance(decider, ByForeign):
        branches.put_xid(state, token, decider)
    if row.state is BundleState.OPEN:
        indexes.add_to_list(state, ListKind.OPEN, token)
    if row.state not in DECIDED:
        indexes.add_undecided(state, token, row.ticket, row.check_at, decider)
    return row


def _add_next(state: State, event: PartStored, row: Transaction) -> Transaction:
    """Apply another part to a row: its time runs from the latest one."""
    after, check_at = _state_after(event, row.decider), event.check_at
    if after in DECIDED:
        indexes.remove_undecided(state, event.token, row)
        check_at = 0
    else:
        if event.sealed:
            indexes.remove_from_list(state, ListKind.OPEN, event.token)
        indexes.move_check(state, event.token, row, check_at)
    return row._replace(
        state=after, parts=event.part + 1, digest=event.digest, check_at=check_at, tries=0
    )


def _add_pieces(
    state: State, event: PartStored, row: Transaction, batches: tuple[UnplacedBatch, ...]
) -> Transaction:
    """Apply: small bundles hold their keys from the seal on, large ones part by
    part.
    """
    large = large_bundles.add_batches(
        state, event.token, row.large or large_bundles.NEW, batches, event.slice
    )
    if isinstance(row.decider, HOLDING_PART_BY_PART) or row.state is BundleState.COMMITTED:
        held = key_order.hold_keys(state, row.ticket, event.token, batches)
        large = large_bundles.add_holds(large, held)
    return row._replace(large=large)


def _seal(state: State, token: bytes, row: Transaction) -> Transaction:
    """Apply: the bundle is complete.

    A bundle that is committed with the seal waits for its keys, or is published piece
    by piece.
    """
    decider = row.decider
    if isinstance(decider, ByJob):
        state.tables[t.JOB_PARTS].put(t.JOB_PART_KEY.pack(decider.job, token), ())
    if row.state is BundleState.UNDECIDED and isinstance(decider, BY_XA_MANAGER):
        indexes.add_prepared(state, token)
    if row.large is None:
        if isinstance(decider, HOLDING_PART_BY_PART) or row.state is BundleState.COMMITTED:
            key_order.hold_keys(state, row.ticket, token, row.batches)
    elif row.state is BundleState.COMMITTED:
        indexes.add_to_backlog(state, row.ticket, token)
        row = row._replace(large=row.large._replace(phase=PiecePhase.CHECKING))
    return row


def apply_refused(state: State, event: GroupRefused, context: RecordContext) -> None:
    refused, at = BundleState(event.state), context.stored_at
    row = not_stored(refused, event.decider, event.service, event.by, "it came too late", at)
    state.transactions.put(event.token, row)
    indexes.note_ended(state, event.token)


DECIDERS: Deciders = {StorePart: store_part}
APPLIERS: Appliers = {PartStored: apply_stored, GroupRefused: apply_refused}
