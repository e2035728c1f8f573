"""Branches of XA transactions: Xids of foreign managers, and heuristic outcomes.

A heuristic is a branch that was decided without its manager, or was found otherwise
than decided. It stands in the row of its transaction in table `xa`, until an operator
clears it. Then it moves to table `handled_heuristics`, and stays there as long as the
transaction is known, so that a recoverer that finds it once more does not report it
again. Table `xa` also lists what is stored and undecided. Table `xids` leads from a
foreign Xid to its token.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.transactions import indexes
from txmq.core.transactions.indexes import ListKind
from txmq.errors import DuplicateXid
from txmq.model.bundle import BundleState
from txmq.model.decider import ByForeign
from txmq.store import tables as t
from txmq.tx.xid import Xid

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.state.state import State
    from txmq.model.decider import Decider

XID_HEAD = Struct(">IB")  # format id, length of the gtrid; then gtrid and bqual


class Heuristic(NamedTuple):
    """An entry of a transaction's heuristics. `branch` is its gid, "" = the broker's
    own.
    """

    branch: str
    decided: int  # a `Decision`'s number
    found: str
    operator: str
    reason: str
    at: int


def xid_of(decider: ByForeign) -> Xid:
    """Return the Xid of a foreign manager's branch."""
    return Xid(decider.format, decider.gtrid, decider.bqual)


def find_token(state: State, xid: Xid) -> bytes | None:
    """Return the token of a foreign manager's branch."""
    row: Any = state.tables[t.XIDS].get(_key(xid))
    return None if row is None else row[0]


def check_xid(state: State, token: bytes, decider: ByForeign) -> None:
    """Refuse an Xid that another transaction has."""
    found = find_token(state, xid_of(decider))
    if found is None or found == token:
        return
    message = f"XAER_DUPID: the Xid is that of transaction {found.hex()}"
    raise DuplicateXid(
        message, hint="a manager never uses an Xid twice", detail={"token": found.hex()}
    )


def put_xid(state: State, token: bytes, decider: ByForeign) -> None:
    """Apply: the first part of a bundle is stored under an Xid."""
    state.tables[t.XIDS].put(_key(xid_of(decider)), (token,))


def forget(state: State, token: bytes, decider: Decider) -> None:
    """Apply: the transaction is forgotten."""
    if isinstance(decider, ByForeign) and find_token(state, xid_of(decider)) == token:
        state.tables[t.XIDS].delete(_key(xid_of(decider)))
    state.tables[t.HANDLED_HEURISTICS].delete(token)


def _key(xid: Xid) -> bytes:
    return XID_HEAD.pack(xid.format, len(xid.gtrid)) + xid.gtrid + xid.bqual


def heuristics(state: State, token: bytes) -> tuple[Heuristic, ...]:
    """Return the heuristics of a transaction that are not cleared, the oldest first."""
    rows = state.tables[t.XA].get(token) or ()
    return tuple(Heuristic._make(row) for row in rows)


def has_heuristics(state: State, token: bytes) -> bool:
    """Return whether a transaction has heuristics to clear, and must not be
    forgotten.
    """
    return bool(state.tables[t.XA].get(token))


def was_cleared(state: State, token: bytes, branch: str, decided: int, found: str) -> bool:
    """Return whether an operator has cleared the same finding before."""
    known: Any = state.tables[t.HANDLED_HEURISTICS].get(token) or ()
    return any(tuple(entry[:3]) == (branch, decided, found) for entry in known)


def was_decided_by_hand(state: State, token: bytes) -> bool:
    """Return whether the broker's own branch was decided without its manager."""
    return any(not entry.branch for entry in heuristics(state, token))


def add_heuristic(state: State, token: bytes, seen: Heuristic) -> None:
    """Apply: a transaction has one heuristic more."""
    known = heuristics(state, token)
    if not known:
        indexes.add_to_list(state, ListKind.HEURISTIC, token)
    state.tables[t.XA].put(token, (*known, seen))


def clear_heuristics(state: State, token: bytes, state_now: BundleState) -> None:
    """Apply: an operator has cleared the heuristics of a transaction in `state_now`."""
    before: Any = state.tables[t.HANDLED_HEURISTICS].get(token) or ()
    state.tables[t.HANDLED_HEURISTICS].put(token, (*before, *heuristics(state, token)))
    indexes.remove_from_list(state, ListKind.HEURISTIC, token)
    if state_now is BundleState.UNDECIDED:
        state.tables[t.XA].put(token, ())
    else:
        state.tables[t.XA].delete(token)
        indexes.note_ended(state, token)


def xa_tokens(state: State, after: bytes, *, heuristic: bool) -> Iterator[bytes]:
    """Yield the tokens of table `xa` after `after`, the oldest transaction first.

    `heuristic`: only of transactions with heuristics to clear.
    """
    if heuristic:  # table `xa` may hold very many prepared transactions
        return (
            token for token in indexes.listed_tokens(state, ListKind.HEURISTIC) if token > after
        )
    return (token for token, _row in state.tables[t.XA].range(after + b"\0" if after else b""))
