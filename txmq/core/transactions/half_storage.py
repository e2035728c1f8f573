"""Parts: how the group of a token is stored, part by part, until its seal completes
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.batch import deliveries, key_hashes
from txmq.batch.header import DELIVER_AT, KEY
from txmq.core.events.base import Delay
from txmq.core.events.transactions import Decided, GroupRefused, PartStored, StoredBatch
from txmq.core.state.state import Outcome, Rejected, State
from txmq.core.topics import key_order
from txmq.core.topics.admission import admitted
from txmq.core.topics.key_order import HeldBatch, Release, Waiting
from txmq.core.topics.sends import distinct
from txmq.core.transactions import (
    actions,
    backlog,
    branches,
    jobs,
    large_bundles,
    listed,
    undecided,
    watermarks,
)
from txmq.core.transactions.large_bundles import Phase
from txmq.core.transactions.model import KEPT, Transaction, get, takes_early, token_time
from txmq.errors import BadRequest, DigestMismatch, MessageTooLarge, SequenceGap, UnknownTransaction
from txmq.model import limits
from txmq.model.bundle import GroupState, decided
from txmq.model.message import Decision
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.batch import BatchHeader
    from txmq.core.events.base import Place

OPEN_FOR = (
    60 * 1_000_000
)  # from the latest part: then nobody is sending the rest, and nobody can have decided it


class GroupBatch(NamedTuple):
    """One batch of a part, as it came; one with times of delivery has a single
    message.
    """

    topic: str
    epoch: int
    partition: int
    data: bytes
    header: BatchHeader


class StorePart(NamedTuple):
    """Store a part of a group: part 0 describes it, the `sealed` one completes it,
    `commit` decides it (local).
    """

    token: bytes
    part: int
    batches: tuple[GroupBatch, ...]
    sealed: bool
    commit: bool
    digest: bytes
    epoch: int
    decider: tuple[object, ...]
    service: str
    actions: tuple[tuple[object, ...], ...]
    check_after: int  # microseconds to the first check-back; 0 = never
    participants: tuple[tuple[object, ...], ...] = ()
    origin: bytes = b""  # the process that sends it


class GroupReceipt(NamedTuple):
    """Where the group stands after a part was stored."""

    state: GroupState
    ticket: int
    offsets: tuple[int, ...] = ()


def decide_store(state: State, command: StorePart, now: int) -> Outcome | Rejected:
    known = get(state, command.token)
    answer = _stored_before(state, known, command, now) or _malformed(command, known)
    if answer is not None:
        return answer
    batches = _located(state, command.batches)
    if isinstance(batches, Rejected):
        return batches
    refused = branches.refused(state, command.token, command.decider)
    if command.actions and refused is None:
        refused = actions.check(state, command.actions)
    if refused is not None:
        return refused
    event = _part(state, command, known, batches, now)
    attachment = b"".join(batch.data for batch in command.batches)
    receipt = GroupReceipt(_state_after(event, _decider(event, known)), 0, event.offsets or ())
    return Outcome((event,), receipt, attachment)


def _malformed(command: StorePart, known: Transaction | None) -> Rejected | None:
    rows = sum(batch.header.count for batch in command.batches)
    local = "local" in _decider(command, known)[:1]
    if rows > limits.PART_ROWS:
        return Rejected(
            MessageTooLarge,
            f"a part of {rows} rows",
            f"send parts of at most {limits.PART_ROWS} rows",
        )
    if not rows and not command.sealed:
        return Rejected(
            BadRequest,
            "a part of a group without messages, and not the last one",
            "send the next one",
        )
    if local and command.sealed and not command.commit:
        return Rejected(BadRequest, "a local transaction is decided with its seal")
    if command.part and command.commit and not local:
        return Rejected(BadRequest, "only a local transaction is decided with its seal")
    return None


def _part(
    state: State,
    command: StorePart,
    known: Transaction | None,
    batches: tuple[StoredBatch, ...],
    now: int,
) -> PartStored:
    """What is recorded of a part. A group that may be large is kept in pieces from its
    first part on.
    """
    keys = sum(max(1, len(batch.hashes)) for batch in batches)
    large = (
        not command.sealed or keys > large_bundles.KEYS
        if known is None
        else known.large is not None
    )
    offsets = _at_once(state, command, batches) if command.commit and known is None else None
    check_after = command.check_after if known is None else known.check_after
    wait = check_after
    if not command.sealed and not (wait and _decider(command, known)[0] == "postgres"):
        wait = OPEN_FOR
    return PartStored(
        command.token, command.part, batches, command.sealed, command.digest if command.sealed else b"",
        command.epoch, command.decider, command.service, command.actions, now + wait if wait else 0, offsets,
        command.participants, command.commit, large_bundles.KEYS if large and offsets is None else 0,
        0 if command.sealed else check_after, command.origin if _decider(command, known)[0] == "checker" else b"",
    )  # fmt: skip


def _job_is_over(state: State, decider: tuple[Any, ...], now: int) -> bool:
    """A job that was decided takes no more groups: they would never be sent."""
    return decider[:1] == ("job",) and jobs.is_over(state, decider[1], now)


def _stored_before(
    state: State, known: Transaction | None, command: StorePart, now: int
) -> Outcome | Rejected | None:
    """The answer to a part that came before, out of turn or too late; None = store
    it.
    """
    if known is None:
        return _answered_as_first(state, command, now)
    if (
        known.digest and known.digest != command.digest and command.sealed
    ):  # what was never complete has no digest
        return Rejected(
            DigestMismatch, "the token was used for other contents", "a token is never reused"
        )
    if known.state is not GroupState.OPEN or command.part < known.parts:
        return Outcome(reply=GroupReceipt(known.state, known.ticket, known.offsets))
    if command.part > known.parts:
        return Rejected(
            SequenceGap,
            f"part {command.part} after {known.parts} parts",
            "send the missing parts first",
        )
    if _job_is_over(state, known.decider, now):
        late = Decided(
            command.token, int(Decision.ROLLBACK), "job", "the job was decided without it", ()
        )
        return Outcome((late,), GroupReceipt(GroupState.ROLLED_BACK, 0))
    return None


def _answered_as_first(state: State, command: StorePart, now: int) -> Outcome | Rejected | None:
    if command.part:
        missing = f"part {command.part} of a group whose part 0 is missing"
        return Rejected(SequenceGap, missing, "send all parts again")
    if command.actions and watermarks.passed(state, command.actions):
        return _refused(command, "mark", GroupState.PUBLISHED)
    if token_time(command.token) < now - KEPT:
        return Rejected(
            UnknownTransaction,
            "the token is older than the outcomes that are kept",
            "use a new token",
        )
    if _job_is_over(state, command.decider, now):
        return _refused(command, "job", GroupState.ROLLED_BACK)
    return None


def _refused(command: StorePart, by: str, answer: GroupState) -> Outcome:
    """Nothing of it is stored; of what comes in parts, that is remembered for the next
    ones.
    """
    refused = GroupRefused(command.token, command.decider, command.service, by, int(answer))
    return Outcome(() if command.sealed else (refused,), GroupReceipt(answer, 0))


def _located(state: State, batches: tuple[GroupBatch, ...]) -> tuple[StoredBatch, ...] | Rejected:
    located, start = [], 0
    for batch in batches:
        topic = admitted(state, batch.topic, batch.partition, batch.epoch, batch.header, batch.data)
        if isinstance(topic, Rejected):
            return topic
        data, header = batch.data, batch.header
        hashes: tuple[int, ...] = ()
        delay = None
        if header.columns & DELIVER_AT and (carried := deliveries(data, header)):
            # It takes its place among its key's when it is due.
            delay = Delay(carried[0], header.sequence, key_hashes(data, header)[0])
        elif header.columns & KEY:
            hashes = distinct(key_hashes(data, header))
        size, count, tags = len(data), header.count, header.tag_filter
        located.append(
            StoredBatch(topic.topic_id, batch.partition, start, size, count, tags, hashes, delay)
        )
        start += size
    return tuple(located)


def _at_once(
    state: State, command: StorePart, batches: tuple[StoredBatch, ...]
) -> tuple[int, ...] | None:
    """The offsets of a local transaction that meets no held key; None = it has to wait
    behind one, or has too many for a look at each.
    """
    held = key_order.all_held(batches)
    if len(held) > large_bundles.KEYS or (
        sum(len(b.hashes) for b in held) > large_bundles.KEYS and _someone_holds(state, held)
    ):
        return None
    if key_order.meets_a_hold(state, held):
        return None
    release = Release(state, lambda _ticket, _token: None)
    release.publish_now(Waiting(0, command.token, held))
    return release.released[0].offsets


def _someone_holds(state: State, batches: tuple[HeldBatch, ...]) -> bool:
    return any(state.holds[batch.topic_id, batch.partition] for batch in batches)


def _decider(event: PartStored | StorePart, known: Transaction | None) -> tuple[object, ...]:
    """Later parts name none."""
    return event.decider if known is None else known.decider


def _state_after(event: PartStored, decider: tuple[object, ...]) -> GroupState:
    if event.offsets is not None:
        return GroupState.PUBLISHED
    if not event.sealed:
        return GroupState.OPEN
    return GroupState.COMMITTED if event.commit or decider[0] == "local" else GroupState.UNDECIDED


def apply_stored(state: State, event: PartStored, place: Place) -> None:
    known = get(state, event.token)
    batches = key_order.all_held(event.batches, place.attachment)
    row = _first(state, event, place, batches) if known is None else _next(state, event, known)
    if event.slice:
        row = _in_pieces(state, event, row, batches)
    elif known is not None:
        row = row._replace(batches=row.batches + batches)
    if row.state is GroupState.PUBLISHED:
        row = row._replace(offsets=event.offsets or (), decided_at=place.stored_at, by="producer")
        key_order.publish(state, row.waiting(event.token), row.offsets, place)
    elif event.sealed:
        row = _seal(state, event.token, row)
    if decided(row.state):
        if row.state is GroupState.COMMITTED:
            listed.enter(state, listed.Kind.WAITING, event.token)
        actions.settle(state, event.token, row.actions, place, committed=True)
    state.transactions.put(event.token, row)


def _first(
    state: State, event: PartStored, place: Place, batches: tuple[HeldBatch, ...]
) -> Transaction:
    """The row of a group whose first part has come: it is listed as undecided until it
    is decided.
    """
    row = Transaction(
        _state_after(event, event.decider), event.epoch, event.decider, event.service, event.part + 1, place.position,
        event.digest, place.stored_at, () if event.slice else batches, event.actions, event.check_at,
        participants=event.participants, check_after=event.check_after, origin=event.origin,
    )  # fmt: skip
    if event.actions:
        actions.pin(state, event.token, event.actions)
    branches.remember(state, event.token, event.decider)
    if row.state is GroupState.OPEN:
        listed.enter(state, listed.Kind.OPEN, event.token)
    if not decided(row.state):
        undecided.enter(state, row.ticket, event.token)
        if row.check_at:
            state.tables[t.DUE].put(
                t.DUE_KEY.pack(row.check_at, t.DUE_CHECK, row.ticket), (event.token,)
            )
    return row


def _next(state: State, event: PartStored, known: Transaction) -> Transaction:
    """The row of a group after another part: its time runs from the latest one."""
    due = state.tables[t.DUE]
    if known.check_at:
        due.delete(t.DUE_KEY.pack(known.check_at, t.DUE_CHECK, known.ticket))
    after = _state_after(event, known.decider)
    if event.sealed:
        listed.leave(state, listed.Kind.OPEN, event.token)
    if decided(after):
        undecided.leave(state, known.ticket, event.token)
    elif event.check_at:
        due.put(t.DUE_KEY.pack(event.check_at, t.DUE_CHECK, known.ticket), (event.token,))
    check_at = 0 if decided(after) else event.check_at
    return known._replace(
        state=after, parts=event.part + 1, digest=event.digest, check_at=check_at, tries=0
    )


def _in_pieces(
    state: State, event: PartStored, row: Transaction, batches: tuple[HeldBatch, ...]
) -> Transaction:
    """Small groups hold their keys from the seal on, large ones part by part."""
    large = large_bundles.add(
        state, event.token, row.large or large_bundles.NEW, batches, event.slice
    )
    if takes_early(row.decider) or row.state is GroupState.COMMITTED:
        large = large_bundles.held(large, key_order.take(state, row.ticket, event.token, batches))
    return row._replace(large=large)


def _seal(state: State, token: bytes, row: Transaction) -> Transaction:
    """The group is complete. What is committed with the seal waits for its keys, or is
    published piece by piece.
    """
    if row.decider[0] == "job":
        state.tables[t.JOB_PARTS].put(t.JOB_PART_KEY.pack(row.decider[1], token), ())
    if row.state is GroupState.UNDECIDED:
        branches.put(state, token, row.decider)
    if row.large is None:
        if takes_early(row.decider) or row.state is GroupState.COMMITTED:
            key_order.take(state, row.ticket, token, row.batches)
    elif row.state is GroupState.COMMITTED:
        backlog.add(state, row.ticket, token)
        row = row._replace(large=row.large._replace(phase=Phase.CHECKING))
    return row


def apply_refused(state: State, event: GroupRefused, place: Place) -> None:
    row = Transaction(
        GroupState(event.state), 0, event.decider, event.service, 0, 0, b"", place.stored_at, (), (), 0,
        by=event.by, reason="it came too late", decided_at=place.stored_at,
    )  # fmt: skip
    state.transactions.put(event.token, row)
    listed.ended(state, event.token)


DECIDERS = {StorePart: decide_store}
APPLIERS: dict[type, Any] = {PartStored: apply_stored, GroupRefused: apply_refused}
