"""Many small groups stored at once, and many decisions made at once: what came in one
request, in one record.

Each group stays a transaction of its own: it is judged as if it had come alone, in its
turn, and what is refused or was known before is left out of the record, and no
hindrance to its neighbours. Only what cannot change how its neighbours are judged goes
together (`shares_store`, `shares_decision`); whoever asks sees to the rest one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.events.base import BatchesStored, BatchStored, Place
from txmq.core.events.transactions import (
    Decided,
    GroupsDecided,
    GroupsStored,
    PartStored,
    StoredBatch,
)
from txmq.core.state.state import Outcome, Rejected, State
from txmq.core.topics import sends
from txmq.core.topics.key_order import Release
from txmq.core.transactions import decisions, half_storage
from txmq.core.transactions.decisions import DecideReceipt
from txmq.core.transactions.model import get
from txmq.model.bundle import GroupState, makes_holds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.events.base import Event
    from txmq.core.topics.key_order import Waiting

MEMBERS = {
    GroupsStored: PartStored,
    GroupsDecided: Decided,
    BatchesStored: BatchStored,
}  # what these are made of
LENGTH = StoredBatch._fields.index("length")  # what comes from the log is a plain tuple


class StoreTogether(NamedTuple):
    """Store these groups, of different tokens, each of which `shares_store`. The reply
    is a list, in their order.
    """

    groups: tuple[half_storage.StorePart, ...]


class DecideTogether(NamedTuple):
    """Make these decisions, of different tokens, each of which `shares_decision`. The
    reply is a list, as above.
    """

    decisions: tuple[decisions.Decide, ...]


def shares_store(part: half_storage.StorePart) -> bool:
    """Whether a group may be stored with others: whole, to be decided later, and
    nothing of it is anybody else's.
    """
    return (
        not part.part
        and part.sealed
        and not part.commit
        and not part.actions
        and makes_holds(part.decider)
    )


def shares_decision(state: State, token: bytes) -> bool:
    """Whether a group may be decided with others: it has its place in the order of its
    keys already.
    """
    row = get(state, token)
    return row is None or makes_holds(row.decider)


def decide_store(state: State, command: StoreTogether, now: int) -> Outcome:
    replies: list[object] = []
    stored: list[Any] = []
    attachments: list[bytes] = []
    for part in command.groups:
        made = half_storage.decide_store(state, part, now)
        if isinstance(made, Rejected):
            replies.append(made)
            continue
        replies.append(made.reply)
        if made.events:
            stored += made.events
            attachments.append(made.attachment)
    if len(stored) > 1:
        stored = [GroupsStored(tuple(stored))]
    return Outcome(tuple(stored), replies, b"".join(attachments))


def decide_together(state: State, command: DecideTogether, now: int) -> Outcome:
    made = _Made(state)
    for verdict in command.decisions:
        judged = decisions.judge(state, verdict, now)
        if isinstance(judged, Outcome):
            made.others += judged.events
            made.replies.append(judged.reply)
        elif isinstance(judged, Rejected):
            made.replies.append(judged)
        else:
            made.decide(verdict, judged)
    decided = tuple(made.decided)
    return Outcome(
        ((GroupsDecided(decided),) if len(decided) > 1 else decided) + tuple(made.others),
        made.replies,
    )


class _Made:
    """The decisions so far, each on the state that those before it leave behind."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._waiting: dict[
            bytes | None, tuple[int, Waiting]
        ] = {}  # committed here, with the place of the reply
        self._release = Release(state, self._committed)
        self.replies: list[object] = []
        self.decided: list[Decided] = []
        self.others: list[Event] = []

    def _committed(self, ticket: int, token: bytes | None) -> Waiting | None:
        mine = self._waiting.get(token)
        return decisions.committed(self._state, ticket, token) if mine is None else mine[1]

    def decide(self, verdict: decisions.Decide, row: Any) -> None:  # a Transaction
        token, outcome, by, reason = verdict
        waiting = row.waiting(token)
        after = decisions.settle_into(self._state, self._release, row, waiting, outcome)
        released, later = self._release.taken()
        self.decided.append(Decided(token, int(outcome), by, reason, released, later))
        if after is GroupState.COMMITTED:
            self._waiting[token] = len(self.replies), waiting
        self.replies.append(DecideReceipt(after, repeated=False))
        if self._waiting:
            for one in released:
                if one.token in self._waiting:
                    place, _waiting = self._waiting.pop(one.token)
                    self.replies[place] = DecideReceipt(GroupState.PUBLISHED, repeated=False)


def members(event: Event, place: Place) -> Iterator[tuple[Event, Place]]:
    """The events that are in one record, each with its place; for any other event,
    itself.
    """
    if isinstance(event, GroupsStored):
        return _groups(event, place)
    if isinstance(event, GroupsDecided):
        return _decisions(event, place)
    if isinstance(event, BatchesStored):
        return ((one, place._replace(attachment=at)) for one, at in sends.batches(event, place))
    return iter(((event, place),))


def _groups(event: GroupsStored, place: Place) -> Iterator[tuple[PartStored, Place]]:
    """A record of several groups has more bytes than groups, so positions inside it
    serve as tickets.
    """
    position, end, at, stored_at, boot_epoch = place
    for ticket, fields in enumerate(event.groups, position):
        one = fields if type(fields) is PartStored else PartStored(*fields)
        yield one, Place(ticket, end, at, stored_at, boot_epoch)
        batches: Any = one.batches
        at += sum([batch[LENGTH] for batch in batches])


def _decisions(event: GroupsDecided, place: Place) -> Iterator[tuple[Decided, Place]]:
    for fields in event.decisions:
        yield fields if type(fields) is Decided else Decided(*fields), place


def apply_stored(state: State, event: GroupsStored, place: Place) -> None:
    for one, its_place in _groups(event, place):
        half_storage.apply_stored(state, one, its_place)


def apply_decided(state: State, event: GroupsDecided, place: Place) -> None:
    for one, its_place in _decisions(event, place):
        decisions.apply_decided(state, one, its_place)


DECIDERS: dict[type, Any] = {StoreTogether: decide_store, DecideTogether: decide_together}
APPLIERS: dict[type, Any] = {GroupsStored: apply_stored, GroupsDecided: apply_decided}
