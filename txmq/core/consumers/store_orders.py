"""Orders of operators about consumers' local stores: retry, drop and adopt.

A retry is an order to the store, which gets it with the reply to its next report. A
drop closes the message at once; the store hears of it in the same way. An adoption is
for a store whose owner is gone: its messages become retries that are due, in steps, and
the store is fenced. Order per key is kept, because a store has only the head of a key.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from txmq.core.consumers import failures, key_fences, store_reports
from txmq.core.consumers.commands import AdoptStore, DropStored, RetryStored
from txmq.core.consumers.key_fences import FailureChanges
from txmq.core.events.consumers import (
    StoreAdopted,
    StoreMessagesAdopted,
    StoreMessagesDropped,
    StoreRetriesOrdered,
)
from txmq.core.events.outcome import Appliers, Deciders, Outcome, Rejected
from txmq.core.state import failed_changes, failed_rows, local_stores
from txmq.core.state.failed_rows import FailedKind
from txmq.core.state.local_stores import StoreOrder
from txmq.errors import BadRequest, Conflict

if TYPE_CHECKING:
    from txmq.core.consumers.commands import TopicOffset
    from txmq.core.events.base import RecordContext
    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.failed_rows import FailedMessage
    from txmq.core.state.state import State

MAX_MESSAGES = failures.MAX_LETTERS  # of one command
MAX_FENCES = 1_000  # of stores without messages in one group; the oldest is forgotten first


class OrdersReply(NamedTuple):
    """The messages that were ordered or dropped, and those refused with the reason."""

    done: tuple[TopicOffset, ...]
    refused: tuple[tuple[str, int, int, str], ...]


class AdoptReply(NamedTuple):
    """The number of messages in the store; they become retries in steps."""

    messages: int


class _Chosen(NamedTuple):
    group: ConsumerGroup
    found: list[tuple[MessageRef, FailedMessage]]
    reply: OrdersReply


def _choose(state: State, command: RetryStored | DropStored) -> _Chosen | Rejected:
    found = store_reports.find_store(state, command.group, command.store)
    if isinstance(found, Rejected):
        return found
    group, store = found
    if len(command.messages) > MAX_MESSAGES:
        message = f"{len(command.messages)} messages in one call are too many"
        return Rejected(BadRequest, message, f"send at most {MAX_MESSAGES} in each call")
    if store.adopted:
        message = f"store {command.store.hex()} is being adopted"
        return Rejected(Conflict, message, "its messages go to members: txmq group show")
    chosen: list[tuple[MessageRef, FailedMessage]] = []
    done: list[TopicOffset] = []
    refused: list[tuple[str, int, int, str]] = []
    for place in dict.fromkeys(command.messages):
        ref, row = failures.find_message(state, group, *place)
        if ref is None or row is None or row.kind != FailedKind.LOCAL:
            refused.append((*place, "at no consumer"))
        elif row.store != command.store:
            refused.append((*place, f"in another store: {row.store.hex()}"))
        else:
            chosen.append((ref, row))
            done.append(place)
    return _Chosen(group, chosen, OrdersReply(tuple(done), tuple(refused)))


def decide_retry(state: State, command: RetryStored, now: int) -> Outcome | Rejected:
    del now
    chosen = _choose(state, command)
    if isinstance(chosen, Rejected):
        return chosen
    group = chosen.group
    store = group.stores[command.store]
    if not group.has_owner(store):
        message = f"nobody has store {command.store.hex()}: {store.member or 'its owner'!r} is gone"
        return Rejected(
            Conflict, message, "let other members have its messages: txmq recover adopt"
        )
    refs = tuple(
        ref
        for ref, _row in chosen.found
        if local_stores.order_of(state, group, command.store, ref) is None
    )
    event = StoreRetriesOrdered(group.group_id, command.store, refs, command.by)
    return Outcome((event,) if refs else (), chosen.reply)


def decide_drop(state: State, command: DropStored, now: int) -> Outcome | Rejected:
    if not command.reason:
        return Rejected(
            BadRequest,
            "messages of a store cannot be dropped without a reason",
            "name a reason: it is stored with each message",
        )
    chosen = _choose(state, command)
    if isinstance(chosen, Rejected):
        return chosen
    changes = FailureChanges(state, chosen.group, now)
    reason = failures.cut_reason(command.reason)
    for ref, row in sorted(chosen.found, key=lambda item: (item[1].visible_at, item[0])):
        changes.drop(ref, row, reason)
    event = StoreMessagesDropped(
        chosen.group.group_id, command.store, *changes.fields(), command.by
    )
    return Outcome((event,) if changes else (), chosen.reply)


def decide_adopt(state: State, command: AdoptStore, now: int) -> Outcome | Rejected:
    del now
    found = store_reports.find_store(state, command.group, command.store)
    if isinstance(found, Rejected):
        return found
    group, store = found
    reply = AdoptReply(store.messages)
    if store.adopted:
        return Outcome(reply=reply)
    refused = None if command.force else store_reports.refusal_while_owned(group, store)
    if refused is not None:
        return refused
    event = StoreAdopted(group.group_id, command.store, group.next_lease, command.by)
    return Outcome((event,), reply)


def apply_ordered(state: State, event: StoreRetriesOrdered, context: RecordContext) -> None:
    del context
    group = state.groups.by_id[event.group_id]
    for ref in event.rows:
        local_stores.put_order(state, group, event.store, ref, StoreOrder.RETRY)


def apply_dropped(state: State, event: StoreMessagesDropped, context: RecordContext) -> None:
    group = state.groups.by_id[event.group_id]
    key_fences.apply_changes(state, group, event.moves, event.fences, context.stored_at)
    # A store that comes back tells all that it has, and forgets what is closed.
    owned = group.has_owner(group.stores[event.store])
    for move in event.moves:
        topic_id, partition, offset, row = failed_rows.decode_move(move)
        ref = (topic_id, partition, offset)
        if row.kind == FailedKind.ABANDONED and owned:
            local_stores.put_order(state, group, event.store, ref, StoreOrder.DROP)
        elif row.kind == FailedKind.ABANDONED:
            local_stores.drop_order(state, group, event.store, ref)
    local_stores.forget_if_idle(state, group, event.store)


def apply_adopted(state: State, event: StoreAdopted, context: RecordContext) -> None:
    del context
    group = state.groups.by_id[event.group_id]
    store = group.stores.pop(event.store)
    group.stores[event.store] = store  # behind those that were fenced before
    store.fence, store.adopted = event.first_lease, True
    fenced = [
        store_id
        for store_id, other in group.stores.items()
        if other.fence and not (other.messages or other.orders)
    ]
    for store_id in fenced[: max(0, len(fenced) - MAX_FENCES)]:
        del group.stores[store_id]
    state.groups.adopting.add(group.group_id)
    state.groups.dirty_groups.add(group.group_id)


def apply_messages_adopted(
    state: State, event: StoreMessagesAdopted, context: RecordContext
) -> None:
    group, at = state.groups.by_id[event.group_id], context.stored_at
    left = event.most
    for ref in list(islice(local_stores.messages(state, group, event.store), left)):
        row = failed_changes.drop(state, group, ref)
        assert row is not None, "the index has it"
        failed_changes.put(
            state, group, ref, row._replace(kind=FailedKind.RETRY, due=at, store=b"")
        )
        left -= 1
    left -= local_stores.drop_orders(state, group, event.store, left)
    if left:
        group.stores[event.store].adopted = False
    if not any(store.adopted for store in group.stores.values()):
        state.groups.adopting.discard(group.group_id)
    state.groups.dirty_groups.add(group.group_id)


DECIDERS: Deciders = {
    RetryStored: decide_retry,
    DropStored: decide_drop,
    AdoptStore: decide_adopt,
}
APPLIERS: Appliers = {
    StoreRetriesOrdered: apply_ordered,
    StoreMessagesDropped: apply_dropped,
    StoreAdopted: apply_adopted,
    StoreMessagesAdopted: apply_messages_adopted,
}
