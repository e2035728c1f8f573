"""Questions about transactions: what stands before one and behind it, and who
contradicted its decision.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.topics import key_order
from txmq.core.transactions.model import every_batch, takes_early
from txmq.model.bundle import GroupState, makes_holds
from txmq.model.message import Decision
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.state.state import State
    from txmq.core.transactions.model import Transaction

LOOKED_AT = 5_000  # rows that one question may touch, so that none takes long
KEYS = (
    GroupState.UNDECIDED,
    GroupState.COMMITTED,
)  # states in which a transaction's keys matter to others


class Neighbour(NamedTuple):
    """Who holds keys of a transaction, too: another one, or a plain batch, which has no
    token.
    """

    ticket: int
    token: bytes | None
    keys: int  # of those that were looked at


class Around(NamedTuple):
    """Who is before a transaction in the order of its keys, and who behind it; each by
    ticket.
    """

    before: list[Neighbour]
    behind: list[Neighbour]


class Contradiction(NamedTuple):
    """Somebody asked for the other outcome of a decided transaction."""

    token: bytes
    asked: Decision
    by: str
    reason: str
    at: int


def around(state: State, token: bytes, row: Transaction) -> Around:
    """Of a transaction with very many keys or neighbours: those of its first ones."""
    if row.state not in KEYS:
        return Around([], [])
    held = row.large is not None and takes_early(row.decider)
    holds_keys = held or makes_holds(row.decider) or row.state is GroupState.COMMITTED
    own = (
        row.ticket if holds_keys else key_order.LAST_TICKET
    )  # else it would take its place only when it is committed
    found: dict[int, Neighbour] = {}
    for ticket, holder in islice(_holders(state, token, row), LOOKED_AT):
        known = found.get(ticket)
        found[ticket] = Neighbour(ticket, holder, 1 if known is None else known.keys + 1)
    found.pop(own, None)
    ordered = [found[ticket] for ticket in sorted(found)]
    return Around([n for n in ordered if n.ticket < own], [n for n in ordered if n.ticket > own])


def _holders(state: State, token: bytes, row: Transaction) -> Iterator[tuple[int, bytes | None]]:
    for batch, _at in every_batch(state, token, row):
        for key in key_order.keys_of((batch,)):
            yield from key_order.tickets(state, key)


def contradictions(state: State, token: bytes | None = None) -> Iterator[Contradiction]:
    """The newest of all or, of the newest `LOOKED_AT`, those of one transaction; the
    newest first.
    """
    rows: Any = state.tables[t.CONFLICTS].range(b"", reverse=True)
    for _key, (of, outcome, by, at, *reason) in islice(rows, LOOKED_AT):
        if token in (None, of):
            yield Contradiction(of, Decision(outcome), by, "".join(reason), at)
