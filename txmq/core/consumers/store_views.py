"""Views of consumers' local stores: answers for operators, in JSON values."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.consumers.store_reports import find_store
from txmq.core.state import failed_messages, local_stores, restores
from txmq.model.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.state.consumer_groups import ConsumerGroup, ConsumerStore, MessageRef
    from txmq.core.state.state import State

MAX_COUNTED = 1_000  # messages of a partition, in views of groups


class StoredView(NamedTuple):
    """A message of a store: the location of its batch, and its other fields."""

    position: int
    length: int
    row: int
    fields: dict[str, Any]


def describe_store(
    state: State, group: ConsumerGroup, store_id: bytes, seen_at: int = 0
) -> dict[str, Any]:
    """Describe a store. `seen_at` is the last report, if the caller knows a later one
    than the state.
    """
    store = group.stores[store_id]
    return {
        "group": group.name,
        "store": store_id.hex(),
        "state": _state(group, store),
        "member": store.member,
        "host": store.host,
        "messages": store.messages,
        "attempts": store.attempts,
        "orders": store.orders,
        "oldest": local_stores.oldest(state, group, store_id),
        "seen_at": max(store.seen_at, seen_at),
        "lost_at": store.lost_at or None,
    }


def _state(group: ConsumerGroup, store: ConsumerStore) -> str:
    if store.adopted:
        return "being adopted"
    if store.fence and not store.messages:
        return "adopted"
    return "owned" if group.has_owner(store) else "no owner"


def list_stores(
    state: State, group: ConsumerGroup, *, adopted: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield the stores of a group that have messages, by id. `adopted`: also those that
    are only fenced, or still have orders.
    """
    for store_id, store in sorted(group.stores.items()):
        if store.messages or adopted:
            yield describe_store(state, group, store_id)


def list_messages(
    state: State, group_name: str, store_id: bytes, after: MessageRef | None, limit: int
) -> tuple[list[StoredView], MessageRef | None]:
    """Return a page of the messages of a store by place, and the `after` of the next
    page; None = this is the last.
    """
    group, _store = find_store(state, group_name, store_id)
    start = (0, 0, 0) if after is None else (*after[:2], after[2] + 1)
    refs = list(islice(local_stores.messages(state, group, store_id, start), limit))
    following = refs[-1] if len(refs) == limit else None
    return [_message(state, group, store_id, ref) for ref in refs], following


def _message(state: State, group: ConsumerGroup, store_id: bytes, ref: MessageRef) -> StoredView:
    row = failed_messages.get(state, group, ref)
    assert row is not None, "in the index, so it is there"
    topic_id, partition, offset = ref
    fence = group.fence(topic_id, row.key_hash)
    order = local_stores.order_of(state, group, store_id, ref)
    fields = {
        "group": group.name,
        "store": store_id.hex(),
        "topic": state.topics_by_id[topic_id].name,
        "topic_id": topic_id,
        "partition": partition,
        "offset": offset,
        "epoch": restores.epoch_at(state, group, TopicPartition(topic_id, partition), offset),
        "attempts": row.attempt,
        "due": row.due,
        "error_type": row.error_type,
        "error_text": row.error_text,
        "fingerprint": row.fingerprint,
        "consumer": row.consumer,
        "first_failed_at": row.first_failed_at,
        "stored_at": row.stored_at,
        "key_hash": row.key_hash,
        "parked_behind": 0 if fence is None or fence.offset != offset else fence.parked,
        "order": None if order is None else order.name.lower(),
    }
    return StoredView(row.position, row.length, row.row, fields)


def at_consumers(
    state: State, group: ConsumerGroup, topic_id: int, partition: int
) -> dict[bytes, int]:
    """Return the number of messages of a partition in each store that has some, up to
    `MAX_COUNTED`.
    """
    counts = {
        store_id: sum(
            1
            for _ref in islice(
                local_stores.messages_of_partition(state, group, store_id, topic_id, partition),
                MAX_COUNTED,
            )
        )
        for store_id, _store in local_stores.with_messages(group)
    }
    return {store_id: count for store_id, count in counts.items() if count}
