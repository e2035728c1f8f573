"""Adoption of consumers' local stores, whose owners are gone.

The messages of an adopted store become retries that are due, in steps, the oldest
failures first, and the store is fenced. Order per key is kept, because a store has only
the head of a key.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from txmq.core.consumers import store_reports
from txmq.core.consumers.commands import AdoptStore
from txmq.core.events.consumers import StoreAdopted, StoreMessagesAdopted
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.state import failed_changes, local_stores
from txmq.core.state.failed_rows import FailedKind

if TYPE_CHECKING:
    from txmq.core.events.base import RecordContext
    from txmq.core.state.state import State

MAX_FENCES = 1_000  # of stores without messages in one group; the oldest is forgotten first


class AdoptReply(NamedTuple):
    """The number of messages in the store; they become retries in steps."""

    messages: int


def decide_adopt(state: State, command: AdoptStore, _now: int) -> Outcome:
    group, store = store_reports.find_store(state, command.group, command.store)
    reply = AdoptReply(store.messages)
    if store.adopted:
        return Outcome(reply=reply)
    if not command.force:
        store_reports.refuse_while_owned(group, store)
    event = StoreAdopted(group.group_id, command.store, group.next_lease, command.by)
    return Outcome((event,), reply)


def apply_adopted(state: State, event: StoreAdopted, _context: RecordContext) -> None:
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
    store, left = group.stores[event.store], event.most
    found = list(islice(local_stores.by_age(state, group, event.store), left))
    for _since, *place in found:
        ref = (place[0], place[1], place[2])
        row = failed_changes.drop(state, group, ref)
        assert row is not None, "the index has it"
        failed_changes.put(
            state, group, ref, row._replace(kind=FailedKind.RETRY, due=at, store=b"")
        )
    # The rows of a step are deleted, and cost a look each until the index is written.
    store.begin = max((store.begin, *found))
    left -= len(found)
    left -= local_stores.drop_orders(state, group, event.store, left)
    if left:
        store.adopted = False
    if not any(store.adopted for store in group.stores.values()):
        state.groups.adopting.discard(group.group_id)
    state.groups.dirty_groups.add(group.group_id)


DECIDERS: Deciders = {AdoptStore: decide_adopt}
APPLIERS: Appliers = {
    StoreAdopted: apply_adopted,
    StoreMessagesAdopted: apply_messages_adopted,
}
