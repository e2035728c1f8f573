"""Views of a transaction for operators: in one line, in full, and its messages in
pages.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.broker.search.message_view import describe_message, fit_entries, read_view
from txmq.core.transactions.model import every_batch, get
from txmq.core.transactions.queries import OrderNeighbour, order_neighbours, recorded_conflicts
from txmq.errors import CorruptRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.broker.checkback.checkback_service import LastCheck
    from txmq.core.state.state import State
    from txmq.core.transactions.model import Transaction
    from txmq.store.log.log import Log

MAX_NEIGHBOURS = 100  # of one transaction; contradictions as well
MAX_BATCHES = 1_000


class MessagePage(NamedTuple):
    """Messages of a transaction. The next page begins behind number `next`; None = this
    was the last.
    """

    rows: list[dict[str, Any]]
    next: int | None


class MessagePageQuery(NamedTuple):
    """A page of messages: at most `limit`, behind the first `after`, with or without
    bodies.
    """

    after: int
    limit: int
    bodies: bool


def summary(token: bytes, row: Transaction) -> dict[str, Any]:
    """Return the view of a transaction in lists."""
    return {
        "token": token.hex(),
        "state": row.state.name,
        "decider": json_fields(row.decider),
        "service": row.service,
        "stored_at": row.stored_at,
        "messages": row.messages,
        "check_at": row.check_at,
        "tries": row.tries,
        "in_doubt": row.in_doubt,
        "by": row.by,
        "reason": row.reason,
        "decided_at": row.decided_at,
    }


def json_fields(fields: tuple[object, ...]) -> list[object]:
    """Return a tuple's fields for JSON: bytes in hexadecimal."""
    return [field.hex() if isinstance(field, bytes) else field for field in fields]


def list_entry(token: bytes, row: Transaction, last: LastCheck | None) -> dict[str, Any]:
    """Return the summary of a transaction and its last check, if that left it
    undecided.
    """
    checked = ("checked_at", "checked_by", "check_reason")
    keys = {"keys": sum(len(batch.hashes) for batch in row.batches) if row.large is None else None}
    return summary(token, row) | keys | dict(zip(checked, last or (0, "", ""), strict=True))


def contents(state: State, token: bytes, row: Transaction) -> dict[str, Any]:
    """Return a transaction's batches, acks, replays and participants."""
    topics = state.topics_by_id
    every = every_batch(state, token, row)
    batches = [
        {
            "topic": topics[b.topic_id].name,
            "partition": b.partition,
            "messages": b.count,
            "keys": len(b.hashes),
            "offset": at,
        }
        for b, at in islice(every, MAX_BATCHES)
    ]
    left_out = sum(1 for _ in every)
    return {
        "batches": batches,
        "batches_left_out": left_out,
        "actions": [json_fields(action) for action in row.actions],
        "participants": [json_fields(one) for one in row.participants],
    }


def order(state: State, token: bytes, row: Transaction) -> dict[str, Any]:
    """Return the transactions that this one waits for and those that it blocks, and the
    contradictions of its decision.
    """
    before, behind = order_neighbours(state, token, row)
    return {
        "waits_for": [_neighbour(state, one) for one in before[:MAX_NEIGHBOURS]],
        "holds_up": [_neighbour(state, one) for one in behind[:MAX_NEIGHBOURS]],
        "conflicts": [
            {"asked": found.asked.name, "by": found.by, "reason": found.reason, "at": found.at}
            for found in islice(recorded_conflicts(state, token), MAX_NEIGHBOURS)
        ],
    }


def _neighbour(state: State, one: OrderNeighbour) -> dict[str, Any]:
    row = None if one.token is None else get(state, one.token)
    view = {
        "token": one.token and one.token.hex(),
        "state": "QUEUED" if row is None else row.state.name,
    }
    described = (
        {"service": "", "stored_at": 0}
        if row is None
        else {"service": row.service, "stored_at": row.stored_at}
    )
    return view | described | {"keys": one.keys}


def page(
    store: Log, state: State, token: bytes, row: Transaction, wanted: MessagePageQuery
) -> MessagePage:
    """Return a page of a transaction's messages, in their order in the bundle.

    A page ends early where it gets too large, and before messages that are not durable.
    Raises CorruptRecord.
    """
    rows = list(fit_entries(islice(_rows(store, state, token, row, wanted), wanted.limit)))
    seen = wanted.after + len(rows)
    return MessagePage(rows, seen if seen < row.messages else None)


def _rows(
    store: Log, state: State, token: bytes, row: Transaction, wanted: MessagePageQuery
) -> Iterator[dict[str, Any]]:
    first, served = 0, False
    for batch, base in every_batch(state, token, row):
        if batch.position + batch.length > store.durable:
            return
        # else retention has removed it
        if first + batch.count > wanted.after and batch.position >= store.first:
            try:
                view = read_view(store, batch.position, batch.length)
            except CorruptRecord:
                if served:
                    return  # the next page says so
                raise
            served = True
            for number in range(max(wanted.after - first, 0), batch.count):
                place = {
                    "topic": state.topics_by_id[batch.topic_id].name,
                    "partition": batch.partition,
                }
                offset = {"offset": None if base is None else base + number}
                yield place | offset | describe_message(view, number, bodies=wanted.bodies)
        first += batch.count


def conflict_entries(state: State) -> Iterator[dict[str, Any]]:
    """Return the journal of contradictions, the newest first."""
    for found in recorded_conflicts(state):
        view = {
            "token": found.token.hex(),
            "asked": found.asked.name,
            "by": found.by,
            "reason": found.reason,
        }
        yield view | {"at": found.at}
