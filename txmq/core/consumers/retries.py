"""Changes of messages that are retried, by operators: now, bury and skip.

A message that is retried waits at the broker or in a consumer's store. What waits at
the broker changes at once. A store learns of it with the reply to its next report
(docs/PROTOCOL.md 9.5): it is ordered to retry a message at once, or to forget one that
is dead or closed. What a member has in hand is left to it.

Order per key is kept, because only the head of a key is retried: a buried message stays
the head, as any dead letter, and behind a skipped one its key goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.core.consumers import failures, key_fences
from txmq.core.consumers.authorization import find_group
from txmq.core.consumers.commands import ChangeRetries, RetryChange
from txmq.core.consumers.key_fences import FailureChanges
from txmq.core.events.consumers import RetriesChanged
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.state import failed_messages, failed_rows, local_stores
from txmq.core.state.failed_rows import FailedKind
from txmq.core.state.local_stores import StoreOrder
from txmq.errors import BadRequest

if TYPE_CHECKING:
    from txmq.core.consumers.commands import TopicOffset
    from txmq.core.events.base import RecordContext
    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.failed_rows import FailedMessage
    from txmq.core.state.state import State

MAX_MESSAGES = failures.MAX_LETTERS  # of one command


class RetriesReply(NamedTuple):
    """The messages that were changed, and those refused with the reason."""

    done: tuple[TopicOffset, ...]
    refused: tuple[tuple[str, int, int, str], ...]


def waiting_refusal(
    state: State, group: ConsumerGroup, ref: MessageRef, row: FailedMessage | None
) -> str:
    """Return why a message does not wait for its next attempt; "" = it does."""
    if row is None:
        return "not retried: it has not failed, or is processed"
    match row.kind:
        case FailedKind.LETTER | FailedKind.ABANDONED:
            return "not retried: it is a dead letter"
        case FailedKind.PARKED:
            return _parked_reason(state, group, ref, row)
        case FailedKind.LOCAL:
            return "its store is being adopted" if group.stores[row.store].adopted else ""
    if row.token:
        return "an undecided transaction acks it"
    return f"{row.consumer} has it in hand" if ref in group.leased_rows else ""


def _parked_reason(state: State, group: ConsumerGroup, ref: MessageRef, row: FailedMessage) -> str:
    fence = group.fence(ref[0], row.key_hash)
    if fence is None:
        return "waits behind another message of its key"
    return f"waits behind {state.topics_by_id[ref[0]].name}/{fence.partition}/{fence.offset}"


def decide_change(state: State, command: ChangeRetries, now: int) -> Outcome:
    group = find_group(state, command.group)
    if len(command.messages) > MAX_MESSAGES:
        message = f"{len(command.messages)} messages in one call are too many"
        raise BadRequest(message, hint=f"send at most {MAX_MESSAGES} in each call")
    if command.change is not RetryChange.NOW and not command.reason:
        raise BadRequest(
            "messages cannot be buried or skipped without a reason",
            hint="name a reason: it is stored with each message",
        )
    made = _Made(state, group, command, now)
    found: list[tuple[MessageRef, FailedMessage]] = []
    done: list[TopicOffset] = []
    refused: list[tuple[str, int, int, str]] = []
    for place in dict.fromkeys(command.messages):
        ref, row = failures.find_message(state, group, *place)
        reason = "the group does not read it" if ref is None else made.refusal(ref, row)
        if ref is None or row is None or reason:
            refused.append((*place, reason))
        else:
            found.append((ref, row))
            done.append(place)
    for ref, row in sorted(found, key=lambda item: (item[1].visible_at, item[0])):
        made.change(ref, row)
    return Outcome(made.events(), RetriesReply(tuple(done), tuple(refused)))


class _Made:
    """Builder of the event of one command."""

    def __init__(
        self, state: State, group: ConsumerGroup, command: ChangeRetries, now: int
    ) -> None:
        self._state, self._group, self._command, self._now = state, group, command, now
        self._changes = FailureChanges(state, group, now)
        self._ordered: list[MessageRef] = []
        self._reason = failures.cut_reason(command.reason)

    def refusal(self, ref: MessageRef, row: FailedMessage | None) -> str:
        """Return why a message is left as it is; "" = it is changed."""
        reason = waiting_refusal(self._state, self._group, ref, row)
        if reason or row is None or row.kind != FailedKind.LOCAL:
            return reason
        store = self._group.stores[row.store]
        if self._command.change is RetryChange.NOW and not self._group.has_owner(store):
            return f"its store has no owner: {store.member or 'a consumer'} is gone"
        return ""

    def change(self, ref: MessageRef, row: FailedMessage) -> None:
        """Add a message to the event."""
        match self._command.change:
            case RetryChange.BURY:
                self._changes.dead_letter(ref, row._replace(reason=self._reason))
            case RetryChange.SKIP:
                self._changes.drop(ref, row, self._reason)
            case RetryChange.NOW if row.kind == FailedKind.LOCAL:
                if local_stores.order_of(self._state, self._group, row.store, ref) is None:
                    self._ordered.append(ref)
            case RetryChange.NOW if row.due > self._now:
                self._changes.retry(ref, row, self._now)

    def events(self) -> tuple[RetriesChanged, ...]:
        """Return the event, if anything changes."""
        if not (self._changes or self._ordered):
            return ()
        fields, by = self._changes.fields(), self._command.by
        return (RetriesChanged(self._group.group_id, *fields, tuple(self._ordered), by),)


def apply_changed(state: State, event: RetriesChanged, context: RecordContext) -> None:
    group = state.groups.by_id[event.group_id]
    for ref in event.ordered:
        row = failed_messages.get(state, group, ref)
        assert row is not None, "the decision has found it"
        local_stores.put_order(state, group, row.store, ref, StoreOrder.RETRY)
    moves = [failed_rows.decode_move(move) for move in event.moves]
    before = [failed_messages.get(state, group, move[:3]) for move in moves]
    key_fences.apply_changes(state, group, event.moves, event.fences, context.stored_at)
    left = {
        move[:3]: row.store
        for move, row in zip(moves, before, strict=True)
        if row is not None and row.kind == FailedKind.LOCAL
    }
    for ref, store in left.items():
        _leave_store(state, group, ref, store)
    for store in dict.fromkeys(left.values()):
        local_stores.forget_if_idle(state, group, store)


def _leave_store(state: State, group: ConsumerGroup, ref: MessageRef, store: bytes) -> None:
    """Apply: a message has left its store. A store that comes back forgets what is
    closed anyway: it tells all that it has.
    """
    row = failed_messages.get(state, group, ref)
    closed = row is not None and row.kind == FailedKind.ABANDONED
    if closed and not group.has_owner(group.stores[store]):
        local_stores.drop_order(state, group, store, ref)
    else:
        local_stores.take_back(state, group, ref, store)


DECIDERS: Deciders = {ChangeRetries: decide_change}
APPLIERS: Appliers = {RetriesChanged: apply_changed}
