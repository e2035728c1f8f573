"""Transactions: how the group of a token is stored, part by part, and what is remembered of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.batch import key_hashes
from txmq.broker.core import branches, holds, listed, marks
from txmq.broker.core import consumer_actions as actions
from txmq.broker.core import tables as t
from txmq.broker.core.events import PartStored, StoredBatch
from txmq.broker.core.holds import HeldBatch, Release, Waiting
from txmq.broker.core.sends import distinct
from txmq.broker.core.state import Outcome, Rejected, State
from txmq.broker.core.topics import find
from txmq.errors import BadRequest, DigestMismatch, SequenceGap, UnknownTransaction
from txmq.tx.group import GroupState, makes_holds

if TYPE_CHECKING:
    from txmq.batch import BatchHeader
    from txmq.broker.core.events import Place

KEPT = 7 * 24 * 3600 * 1_000_000  # outcomes are remembered for a week; older tokens are refused (ARCHITECTURE 4)


class GroupBatch(NamedTuple):
    """One batch of a part, as it came."""

    topic: str
    epoch: int
    partition: int
    data: bytes
    header: BatchHeader


class StorePart(NamedTuple):
    """Store a part of a group. Part 0 describes the group; the part with `sealed` completes it; `commit` decides it
    at once (local).
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


class GroupReceipt(NamedTuple):
    """Where the group stands after a part was stored."""

    state: GroupState
    ticket: int
    offsets: tuple[int, ...] = ()


class Transaction(NamedTuple):
    """A row of table `transactions`."""

    state: GroupState
    epoch: int
    decider: tuple[object, ...]
    service: str
    parts: int
    ticket: int  # position of the sealing record; 0 = not sealed
    digest: bytes
    stored_at: int
    batches: tuple[HeldBatch, ...]
    actions: tuple[tuple[object, ...], ...]
    check_at: int
    tries: int = 0
    in_doubt: bool = False
    by: str = ""
    reason: str = ""
    decided_at: int = 0
    offsets: tuple[int, ...] = ()
    participants: tuple[tuple[object, ...], ...] = ()

    def waiting(self, token: bytes) -> Waiting:
        """This transaction as something that wants offsets. What made no holds has no key to wait for."""
        return Waiting(self.ticket, token, self.batches)


def get(state: State, token: bytes) -> Transaction | None:
    """The transaction of a token."""
    row = state.transactions.get(token)
    if row is None:
        return None
    found = Transaction._make(row)
    return found._replace(state=GroupState(found.state), batches=tuple(HeldBatch._make(b) for b in found.batches))


def oldest_undecided(state: State) -> bytes | None:
    """The oldest token that is not decided here; None = all are."""
    rows = state.tables[t.UNDECIDED].range(b"")
    return min((token for _key, (token,) in rows), default=None)


def token_time(token: bytes) -> int:
    """When a UUIDv7 was made, in microseconds."""
    return int.from_bytes(token[:6], "big") * 1_000


def decide_store(state: State, command: StorePart, now: int) -> Outcome | Rejected:
    known = get(state, command.token)
    answer = _job_is_over(state, command.decider) or _stored_before(state, known, command, now)
    if answer is not None:
        return answer
    batches = _located(state, command.batches)
    if isinstance(batches, Rejected):
        return batches
    refused = branches.refused(state, command.token, command.decider) or actions.check(state, command.actions)
    if refused is not None:
        return refused
    offsets = _at_once(state, command, batches) if command.commit else None
    event = PartStored(
        command.token, command.part, batches, command.sealed, command.digest, command.epoch, command.decider,
        command.service, command.actions, now + command.check_after if command.check_after else 0, offsets,
        command.participants, command.commit,
    )  # fmt: skip
    attachment = b"".join(batch.data for batch in command.batches)
    return Outcome((event,), GroupReceipt(_state_after(event), 0, offsets or ()), attachment)


def _job_is_over(state: State, decider: tuple[Any, ...]) -> Outcome | None:
    """A job that was decided takes no more groups: they would never be sent."""
    if decider[:1] == ("job",) and state.tables[t.JOBS].get(decider[1]) is not None:
        return Outcome(reply=GroupReceipt(GroupState.ROLLED_BACK, 0))
    return None


def _stored_before(state: State, known: Transaction | None, command: StorePart, now: int) -> Outcome | Rejected | None:
    """The answer to a part that came before or comes out of turn; None = store it."""
    if known is None:
        return _answered_as_first(state, command, now)
    if known.ticket and known.digest != command.digest and command.sealed:  # what was never complete has no digest
        return Rejected(DigestMismatch, "the token was used for other contents", "a token is never reused")
    if known.state is not GroupState.OPEN or command.part < known.parts:
        return Outcome(reply=GroupReceipt(known.state, known.ticket, known.offsets))
    if command.part > known.parts:
        return Rejected(SequenceGap, f"part {command.part} after {known.parts} parts", "send the missing parts first")
    return None


def _answered_as_first(state: State, command: StorePart, now: int) -> Outcome | Rejected | None:
    if command.part:
        missing = f"part {command.part} of a group whose part 0 is missing"
        return Rejected(SequenceGap, missing, "send all parts again")
    if marks.passed(state, command.actions):
        return Outcome(reply=GroupReceipt(GroupState.PUBLISHED, 0))
    if token_time(command.token) < now - KEPT:
        return Rejected(UnknownTransaction, "the token is older than the outcomes that are kept", "use a new token")
    if command.commit and not command.sealed:
        return Rejected(BadRequest, "what is decided as it is stored comes in one part")
    return None


def _located(state: State, batches: tuple[GroupBatch, ...]) -> tuple[StoredBatch, ...] | Rejected:
    located, start = [], 0
    for batch in batches:
        topic = find(state, batch.topic, batch.partition, batch.epoch)
        if isinstance(topic, Rejected):
            return topic
        hashes = distinct(key_hashes(batch.data))
        header = batch.header
        located.append(
            StoredBatch(
                topic.topic_id, batch.partition, start, len(batch.data), header.count, header.tag_filter, hashes
            )
        )
        start += len(batch.data)
    return tuple(located)


def _held(batches: tuple[StoredBatch, ...], attachment: int) -> tuple[HeldBatch, ...]:
    return tuple(
        HeldBatch(topic_id, partition, attachment + start, length, count, tag_filter, hashes)
        for topic_id, partition, start, length, count, tag_filter, hashes in batches
    )


def _at_once(state: State, command: StorePart, batches: tuple[StoredBatch, ...]) -> tuple[int, ...] | None:
    """The offsets of a local transaction that meets no held key; None = it has to wait behind one."""
    held = _held(batches, 0)
    if holds.meets_a_hold(state, held):
        return None
    release = Release(state, lambda _ticket, _token: None)
    release.publish_now(Waiting(0, command.token, held))
    return release.released[0].offsets


def _state_after(event: PartStored) -> GroupState:
    if event.offsets is not None:
        return GroupState.PUBLISHED
    if not event.sealed:
        return GroupState.OPEN
    at_once = event.commit or event.decider[:1] == ("local",)  # later parts name no decider
    return GroupState.COMMITTED if at_once else GroupState.UNDECIDED


def apply_stored(state: State, event: PartStored, place: Place) -> None:
    known = get(state, event.token)
    batches = _held(event.batches, place.attachment)
    if known is not None:
        row = known._replace(batches=known.batches + batches)
    else:
        row = Transaction(
            GroupState.OPEN, event.epoch, event.decider, event.service, 0, 0, b"", place.stored_at, batches,
            event.actions, event.check_at, participants=event.participants,
        )  # fmt: skip
    ticket = place.position if event.sealed else 0
    row = row._replace(state=_state_after(event), parts=event.part + 1, ticket=ticket, digest=event.digest)
    if known is not None and event.sealed:
        listed.leave(state, listed.Kind.OPEN, event.token)
    elif known is None and not event.sealed:
        listed.enter(state, listed.Kind.OPEN, event.token)
    if event.part == 0:
        actions.pin(state, event.token, event.actions)
        branches.remember(state, event.token, event.decider)
    if row.state is GroupState.PUBLISHED:
        row = row._replace(offsets=event.offsets or (), decided_at=place.stored_at, by="producer")
        holds.publish(state, row.waiting(event.token), row.offsets, place)
        actions.settle(state, event.token, row.actions, place, committed=True)
    elif event.sealed:
        _seal(state, event.token, row)
        if row.state is GroupState.COMMITTED:
            listed.enter(state, listed.Kind.WAITING, event.token)
            actions.settle(state, event.token, row.actions, place, committed=True)
    state.transactions.put(event.token, row)


def _seal(state: State, token: bytes, row: Transaction) -> None:
    """The group is complete: it holds its keys from now on, where its kind does, and is listed as undecided."""
    if makes_holds(row.decider) or row.state is GroupState.COMMITTED:
        holds.take(state, row.ticket, token, row.batches)
    if row.decider[0] == "job":
        state.tables[t.JOB_PARTS].put(t.JOB_PART_KEY.pack(row.decider[1], token), ())
    if row.state is GroupState.UNDECIDED:
        state.tables[t.UNDECIDED].put(t.TICKET_KEY.pack(row.ticket), (token,))
        state.undecided += 1
        branches.put(state, token, row.decider)
        if row.check_at:
            state.tables[t.DUE].put(t.DUE_KEY.pack(row.check_at, t.DUE_CHECK, row.ticket), (token,))


DECIDERS = {StorePart: decide_store}
APPLIERS = {PartStored: apply_stored}
