"""What is told of a transaction: in one line, in full, and the messages that it holds,
page by page.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.broker.calls import views
from txmq.broker.search.search import message, view_of
from txmq.core.transactions.model import every_batch, get
from txmq.core.transactions.queries import Neighbour, around, contradictions
from txmq.errors import CorruptRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.broker.checkback.checkback_service import LastCheck
    from txmq.core.state.state import State
    from txmq.core.transactions.model import Transaction
    from txmq.store.log import Log

MOST = 100  # neighbours or contradictions told of one transaction
MOST_BATCHES = 1_000


class Page(NamedTuple):
    """Messages of a transaction, and the number behind which the next page goes on;
    None = that was all.
    """

    rows: list[dict[str, Any]]
    next: int | None


class Wanted(NamedTuple):
    """Which messages: behind so many of them, at most `limit`, with or without their
    bodies.
    """

    after: int
    limit: int
    bodies: bool


def line(token: bytes, row: Transaction, last: LastCheck | None) -> dict[str, Any]:
    """What a list tells of a transaction. `last` is what the last check found, where
    that was no decision.
    """
    checked = ("checked_at", "checked_by", "check_reason")
    keys = {"keys": sum(len(batch.hashes) for batch in row.batches) if row.large is None else None}
    return views.told(token, row) | keys | dict(zip(checked, last or (0, "", ""), strict=True))


def contents(state: State, token: bytes, row: Transaction) -> dict[str, Any]:
    """The batches of a transaction, the acks and replays that go with it, and who takes
    part.
    """
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
        for b, at in islice(every, MOST_BATCHES)
    ]
    left_out = sum(1 for _ in every)
    return {
        "batches": batches,
        "batches_left_out": left_out,
        "actions": [views.plain(action) for action in row.actions],
        "participants": [views.plain(one) for one in row.participants],
    }


def order(state: State, token: bytes, row: Transaction) -> dict[str, Any]:
    """Whom a transaction waits for and whom it holds up, and who contradicted its
    decision.
    """
    before, behind = around(state, token, row)
    return {
        "waits_for": [_neighbour(state, one) for one in before[:MOST]],
        "holds_up": [_neighbour(state, one) for one in behind[:MOST]],
        "conflicts": [
            {"asked": found.asked.name, "by": found.by, "reason": found.reason, "at": found.at}
            for found in islice(contradictions(state, token), MOST)
        ],
    }


def _neighbour(state: State, one: Neighbour) -> dict[str, Any]:
    row = None if one.token is None else get(state, one.token)
    told = {
        "token": one.token and one.token.hex(),
        "state": "QUEUED" if row is None else row.state.name,
    }
    described = (
        {"service": "", "stored_at": 0}
        if row is None
        else {"service": row.service, "stored_at": row.stored_at}
    )
    return told | described | {"keys": one.keys}


def page(store: Log, state: State, token: bytes, row: Transaction, wanted: Wanted) -> Page:
    """The messages that a transaction holds, in their order in the group.

    A page ends early where it gets too large, and before what is not on disk yet.
    Raises CorruptRecord.
    """
    rows = list(views.as_fit(islice(_rows(store, state, token, row, wanted), wanted.limit)))
    seen = wanted.after + len(rows)
    return Page(rows, seen if seen < row.messages else None)


def _rows(
    store: Log, state: State, token: bytes, row: Transaction, wanted: Wanted
) -> Iterator[dict[str, Any]]:
    """The messages from the one wanted first on."""
    first, served = 0, False
    for batch, base in every_batch(state, token, row):
        if batch.position + batch.length > store.durable:
            return
        if (
            first + batch.count > wanted.after and batch.position >= store.first
        ):  # else retention took it
            try:
                view = view_of(store, batch.position, batch.length)
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
                yield place | offset | message(view, number, bodies=wanted.bodies)
        first += batch.count


def conflict_lines(state: State) -> Iterator[dict[str, Any]]:
    """The journal of contradictions, the newest first."""
    for found in contradictions(state):
        told = {
            "token": found.token.hex(),
            "asked": found.asked.name,
            "by": found.by,
            "reason": found.reason,
        }
        yield told | {"at": found.at}
