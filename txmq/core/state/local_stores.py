"""Local stores of consumers: the messages in them, and the orders of operators to them.

Table `local` has two rows for each message that a store has, by place and by age, and
one for each order that the store has not answered yet. A store without messages, orders
and fence is forgotten.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.state.consumer_groups import ConsumerGroup, ConsumerStore, MessageRef
    from txmq.core.state.state import State

MESSAGE, ORDER, BY_AGE = range(3)  # kinds of rows
MAX_ID = (1 << 32) - 1  # of topics and partitions
FIRST: MessageRef = (0, 0, 0)


class StoredMessage(NamedTuple):
    """A message as its store's rows know it: its failed attempts, and the first one's
    time.
    """

    store: bytes
    attempts: int
    first_failed_at: int


class StoreOrder(IntEnum):
    """An order to a store about one message; the numbers are on disk."""

    RETRY = 1  # do not wait until it is due
    DROP = 2  # forget it: the broker has it again, or an operator has closed it


def add_message(
    state: State, group: ConsumerGroup, ref: MessageRef, message: StoredMessage
) -> None:
    """Apply: a store has the message."""
    store = group.stores[message.store]
    for key in _keys(group, ref, message):
        state.tables[t.LOCAL].put(key, ())
    store.messages += 1
    store.attempts += message.attempts
    store.begin = min(store.begin, (message.first_failed_at, *ref))
    state.groups.dirty_groups.add(group.group_id)


def remove_message(
    state: State, group: ConsumerGroup, ref: MessageRef, message: StoredMessage
) -> None:
    """Apply: its store does not have the message any more.

    `forget_if_idle` follows, unless the store gets the message back at once.
    """
    store = group.stores[message.store]
    for key in _keys(group, ref, message):
        state.tables[t.LOCAL].delete(key)
    store.messages -= 1
    store.attempts -= message.attempts
    state.groups.dirty_groups.add(group.group_id)


def _keys(group: ConsumerGroup, ref: MessageRef, message: StoredMessage) -> tuple[bytes, bytes]:
    number, store, since = group.group_id, message.store, message.first_failed_at
    return (
        t.LOCAL_KEY.pack(number, MESSAGE, store, *ref),
        t.LOCAL_TIME_KEY.pack(number, BY_AGE, store, since, *ref),
    )


def messages(
    state: State, group: ConsumerGroup, store: bytes, start: MessageRef = FIRST
) -> Iterator[MessageRef]:
    """Yield the messages of a store in the order of their places, from `start` on."""
    for ref, _row in _rows(state, group, MESSAGE, store, start, (MAX_ID, MAX_ID)):
        yield ref


def messages_of_partition(
    state: State, group: ConsumerGroup, store: bytes, topic_id: int, partition: int
) -> Iterator[MessageRef]:
    """Yield the messages of a store in one partition."""
    place = (topic_id, partition)
    for ref, _row in _rows(state, group, MESSAGE, store, (*place, 0), place):
        yield ref


def by_age(state: State, group: ConsumerGroup, store: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Yield first failure and place of the messages of a store, beginning with the one
    that has been failing for the longest time.
    """
    low = t.LOCAL_TIME_KEY.pack(group.group_id, BY_AGE, store, *group.stores[store].begin)
    high = t.LOCAL_TIME_KEY.pack(group.group_id, BY_AGE, store, t.SIGN, *FIRST)
    for key, _row in state.tables[t.LOCAL].range(low, high):
        yield t.LOCAL_TIME_KEY.unpack(key)[3:]


def oldest(state: State, group: ConsumerGroup, store: bytes) -> int | None:
    """Return the first failure of the message that has been failing for the longest
    time.
    """
    return next((since for since, *_place in by_age(state, group, store)), None)


def orders(
    state: State, group: ConsumerGroup, store: bytes
) -> Iterator[tuple[MessageRef, StoreOrder]]:
    """Yield the orders that a store has not answered yet."""
    for ref, (order,) in _rows(state, group, ORDER, store, FIRST, (MAX_ID, MAX_ID)):
        yield ref, StoreOrder(order)


def order_of(
    state: State, group: ConsumerGroup, store: bytes, ref: MessageRef
) -> StoreOrder | None:
    """Return the order about a message that a store has not answered yet."""
    row: Any = state.tables[t.LOCAL].get(t.LOCAL_KEY.pack(group.group_id, ORDER, store, *ref))
    return None if row is None else StoreOrder(row[0])


def put_order(
    state: State, group: ConsumerGroup, store: bytes, ref: MessageRef, order: StoreOrder
) -> None:
    """Apply: give a store an order about a message."""
    key = t.LOCAL_KEY.pack(group.group_id, ORDER, store, *ref)
    group.stores[store].orders += state.tables[t.LOCAL].get(key) is None
    state.tables[t.LOCAL].put(key, (int(order),))
    state.groups.dirty_groups.add(group.group_id)


def drop_order(state: State, group: ConsumerGroup, store: bytes, ref: MessageRef) -> None:
    """Apply: an order about a message is answered, or has lost its meaning."""
    key = t.LOCAL_KEY.pack(group.group_id, ORDER, store, *ref)
    if state.tables[t.LOCAL].get(key) is not None:
        state.tables[t.LOCAL].delete(key)
        group.stores[store].orders -= 1
        state.groups.dirty_groups.add(group.group_id)


def drop_orders(state: State, group: ConsumerGroup, store: bytes, most: int) -> int:
    """Apply: remove at most so many orders of a store; return their number."""
    found = [ref for ref, _order in islice(orders(state, group, store), most)]
    for ref in found:
        drop_order(state, group, store, ref)
    return len(found)


def take_back(state: State, group: ConsumerGroup, ref: MessageRef, store_id: bytes) -> None:
    """Apply: the broker has a message again, by an operator's word. The store that had
    it shall forget it.
    """
    if group.stores[store_id].adopted:
        drop_order(state, group, store_id, ref)
    else:
        put_order(state, group, store_id, ref, StoreOrder.DROP)


def forget_if_idle(state: State, group: ConsumerGroup, store_id: bytes) -> None:
    """Apply: forget a store of which nothing is left to know."""
    store = group.stores.get(store_id)
    if store is not None and not (store.messages or store.orders or store.fence):
        del group.stores[store_id]
        state.groups.dirty_groups.add(group.group_id)


def note_losses(state: State, group: ConsumerGroup, at: int) -> None:
    """Apply: members have come or gone; note which stores have no owner any more."""
    for store in group.stores.values():
        if group.has_owner(store):
            store.lost_at = 0
        elif not store.lost_at:
            store.lost_at = at
    if group.stores:
        state.groups.dirty_groups.add(group.group_id)


def with_messages(group: ConsumerGroup) -> list[tuple[bytes, ConsumerStore]]:
    """Return the stores of a group that have messages."""
    return [item for item in group.stores.items() if item[1].messages]


def _rows(
    state: State,
    group: ConsumerGroup,
    kind: int,
    store: bytes,
    start: MessageRef,
    last: tuple[int, int],
) -> Iterator[tuple[MessageRef, Any]]:
    low = t.LOCAL_KEY.pack(group.group_id, kind, store, *start)
    high = t.LOCAL_KEY.pack(group.group_id, kind, store, *last, t.SIGN)
    for key, row in state.tables[t.LOCAL].range(low, high):
        yield t.LOCAL_KEY.unpack(key)[3:], row
