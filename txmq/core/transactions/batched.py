"""Batched requests: many bundles stored, or many decisions made, by one record.

Each bundle stays a transaction of its own. It is checked as if it had come alone, in
its turn. What is refused, or was stored or decided before, is left out of the record
and does not affect the others. Only requests that cannot change how the others are
checked may be batched (`is_batchable_store`, `is_batchable_decision`); the caller
submits the rest one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.events.audit import OperatorActed, parts_in
from txmq.core.events.base import RecordContext
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.events.topics import BatchesStored, BatchStored
from txmq.core.events.transactions import (
    Decided,
    GroupsDecided,
    GroupsStored,
    PartStored,
    UnpublishedBatch,
)
from txmq.core.topics import sends
from txmq.core.topics.key_order import ReleasePlan
from txmq.core.transactions import decisions, half_storage
from txmq.core.transactions.model import get
from txmq.errors import RequestRejected
from txmq.model.bundle import BundleState, DecideReceipt
from txmq.model.decider import ORDERED_WHEN_STORED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.events.base import Event
    from txmq.core.state.state import State
    from txmq.core.topics.key_order import Publishable
    from txmq.core.transactions.model import Transaction

# Events of several bundles or batches, with the event that each of these is.
BATCHED_EVENTS = {
    GroupsStored: PartStored,
    GroupsDecided: Decided,
    BatchesStored: BatchStored,
}
LENGTH = UnpublishedBatch._fields.index("length")  # events read from the log hold plain tuples


class StoreBundles(NamedTuple):
    """Store bundles of different tokens, each of them batchable.

    The reply is a list, in their order.
    """

    bundles: tuple[half_storage.StorePart, ...]


class DecideBundles(NamedTuple):
    """Make decisions on different tokens, each of them batchable.

    The reply is a list, in their order.
    """

    decisions: tuple[decisions.DecideTransaction, ...]


def is_batchable_store(part: half_storage.StorePart) -> bool:
    """Return whether a bundle may be stored in a batch.

    It must be whole, to be decided later, and without actions on consumers.
    """
    return (
        not part.part
        and part.sealed
        and not part.commit
        and not part.actions
        and isinstance(part.decider, ORDERED_WHEN_STORED)
    )


def is_batchable_decision(state: State, token: bytes) -> bool:
    """Return whether a bundle may be decided in a batch.

    It must have its place in the order of its keys already.
    """
    row = get(state, token)
    return row is None or isinstance(row.decider, ORDERED_WHEN_STORED)


def store_bundles(state: State, command: StoreBundles, now: int) -> Outcome:
    replies: list[object] = []
    stored: list[Any] = []
    attachments: list[bytes] = []
    for part in command.bundles:
        try:
            made = half_storage.store_part(state, part, now)
        except RequestRejected as refused:
            replies.append(refused)
            continue
        replies.append(made.reply)
        if made.events:
            stored += made.events
            attachments.append(made.attachment)
    if len(stored) > 1:
        stored = [GroupsStored(tuple(stored))]
    return Outcome(tuple(stored), replies, b"".join(attachments))


def decide_bundles(state: State, command: DecideBundles, now: int) -> Outcome:
    made = _BatchedDecisions(state)
    for verdict in command.decisions:
        try:
            judged = decisions.check_decision(state, verdict, now)
        except RequestRejected as refused:
            made.replies.append(refused)
            continue
        if isinstance(judged, Outcome):
            made.others += judged.events
            made.replies.append(judged.reply)
        else:
            made.decide(verdict, judged)
    decided = tuple(made.decided)
    return Outcome(
        ((GroupsDecided(decided),) if len(decided) > 1 else decided) + tuple(made.others),
        made.replies,
    )


class _BatchedDecisions:
    """The decisions of a batch so far; each sees what those before it lead to."""

    def __init__(self, state: State) -> None:
        self._state = state
        # Committed by this batch and not published yet, with the index of the reply.
        self._committed: dict[bytes | None, tuple[int, Publishable]] = {}
        self._plan = ReleasePlan(state, self._find)
        self.replies: list[object] = []
        self.decided: list[Decided] = []
        self.others: list[Event] = []

    def _find(self, ticket: int, token: bytes | None) -> Publishable | None:
        found = self._committed.get(token)
        return decisions.find_publishable(self._state, ticket, token) if found is None else found[1]

    def decide(self, verdict: decisions.DecideTransaction, row: Transaction) -> None:
        token, outcome, by, reason = verdict
        unit = row.publishable(token)
        after = decisions.plan_outcome(self._state, self._plan, row, unit, outcome)
        released, later = self._plan.drain()
        self.decided.append(Decided(token, int(outcome), by, reason, released, later))
        if after is BundleState.COMMITTED:
            self._committed[token] = len(self.replies), unit
        self.replies.append(DecideReceipt(after, repeated=False))
        if self._committed:
            for one in released:
                if one.token in self._committed:
                    index, _unit = self._committed.pop(one.token)
                    self.replies[index] = DecideReceipt(BundleState.PUBLISHED, repeated=False)


def events_in(event: Event, context: RecordContext) -> Iterator[tuple[Event, RecordContext]]:
    """Yield the events of a batched event with their contexts, or the event itself."""
    if isinstance(event, OperatorActed):
        return (inner for one, its in parts_in(event, context) for inner in events_in(one, its))
    if isinstance(event, GroupsStored):
        return _bundles(event, context)
    if isinstance(event, GroupsDecided):
        return _decisions(event, context)
    if isinstance(event, BatchesStored):
        return (
            (one, context._replace(attachment_position=at))
            for one, at in sends.with_positions(event, context)
        )
    return iter(((event, context),))


def _bundles(
    event: GroupsStored, context: RecordContext
) -> Iterator[tuple[PartStored, RecordContext]]:
    # A record has more bytes than bundles, so positions inside it serve as tickets.
    position, end, at, stored_at, boot_epoch = context
    for ticket, fields in enumerate(event.groups, position):
        one = fields if type(fields) is PartStored else PartStored(*fields)
        yield one, RecordContext(ticket, end, at, stored_at, boot_epoch)
        batches: Any = one.batches
        at += sum([batch[LENGTH] for batch in batches])


def _decisions(
    event: GroupsDecided, context: RecordContext
) -> Iterator[tuple[Decided, RecordContext]]:
    for fields in event.decisions:
        yield fields if type(fields) is Decided else Decided(*fields), context


def apply_stored(state: State, event: GroupsStored, context: RecordContext) -> None:
    for one, its_context in _bundles(event, context):
        half_storage.apply_stored(state, one, its_context)


def apply_decided(state: State, event: GroupsDecided, context: RecordContext) -> None:
    for one, its_context in _decisions(event, context):
        decisions.apply_decided(state, one, its_context)


DECIDERS: Deciders = {StoreBundles: store_bundles, DecideBundles: decide_bundles}
APPLIERS: Appliers = {GroupsStored: apply_stored, GroupsDecided: apply_decided}
