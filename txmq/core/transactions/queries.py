"""Queries about transactions: their neighbours in the order of their keys, and
recorded conflicts.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.topics import key_order
from txmq.core.transactions.model import every_batch
from txmq.model.bundle import BundleState
from txmq.model.decider import HOLDING_PART_BY_PART, ORDERED_WHEN_STORED
from txmq.model.message import Decision
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.state.state import State
    from txmq.core.transactions.model import Transaction

MAX_ROWS_SCANNED = 5_000  # rows that one query may touch, so that none takes long
ORDERED_STATES = (BundleState.UNDECIDED, BundleState.COMMITTED)  # others may have to wait


class OrderNeighbour(NamedTuple):
    """Another holder of keys of a transaction. A plain batch has no token."""

    ticket: int
    token: bytes | None
    keys: int  # of those that were examined


class OrderNeighbours(NamedTuple):
    """The holders before and behind a transaction in the order of its keys, by
    ticket.
    """

    before: list[OrderNeighbour]
    behind: list[OrderNeighbour]


class RecordedConflict(NamedTuple):
    """A refused decision that contradicts the outcome of a transaction."""

    token: bytes
    asked: Decision
    by: str
    reason: str
    at: int


def order_neighbours(state: State, token: bytes, row: Transaction) -> OrderNeighbours:
    """Return the neighbours of a transaction.

    With very many keys or neighbours, only those of its first keys are examined.
    """
    if row.state not in ORDERED_STATES:
        return OrderNeighbours([], [])
    holding = HOLDING_PART_BY_PART if row.large is not None else ORDERED_WHEN_STORED
    holds_keys = isinstance(row.decider, holding) or row.state is BundleState.COMMITTED
    # else it would take its place only when it is committed
    own = row.ticket if holds_keys else key_order.MAX_TICKET
    found: dict[int, OrderNeighbour] = {}
    for ticket, holder in islice(_holders(state, token, row), MAX_ROWS_SCANNED):
        known = found.get(ticket)
        found[ticket] = OrderNeighbour(ticket, holder, 1 if known is None else known.keys + 1)
    found.pop(own, None)
    ordered = [found[ticket] for ticket in sorted(found)]
    return OrderNeighbours(
        [n for n in ordered if n.ticket < own], [n for n in ordered if n.ticket > own]
    )


def _holders(state: State, token: bytes, row: Transaction) -> Iterator[tuple[int, bytes | None]]:
    for batch, _at in every_batch(state, token, row):
        for key in key_order.keys_of((batch,)):
            yield from key_order.holders(state, key)


def recorded_conflicts(state: State, token: bytes | None = None) -> Iterator[RecordedConflict]:
    """Yield recorded conflicts, the newest first, at most `MAX_ROWS_SCANNED`.

    `token`: only those of one transaction among them.
    """
    rows: Any = state.tables[t.CONFLICTS].range(b"", reverse=True)
    for _key, (of, outcome, by, at, *reason) in islice(rows, MAX_ROWS_SCANNED):
        if token in (None, of):
            yield RecordedConflict(of, Decision(outcome), by, "".join(reason), at)
