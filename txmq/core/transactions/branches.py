"""Branches of XA transactions: which transactions are decided by a home broker or a
foreign manager, the Xids of the latter, and what somebody decided over their heads.

Table `xa` lists by token what a recovering manager asks about: what is stored and
undecided, and what has heuristics that nobody has dealt with; its rows are those
heuristics. What was dealt with moves to table `dealt`, as long as the transaction is
known: a recoverer that finds it once more is told so. Table `xids` leads from a foreign
Xid to its token.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.state.state import Rejected, State
from txmq.core.transactions import listed as listing
from txmq.errors import DuplicateXid
from txmq.model.bundle import GroupState
from txmq.store import tables as t
from txmq.tx.xid import Xid

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = frozenset({"home", "foreign"})
XID_HEAD = Struct(">IB")  # format id, length of the gtrid; then gtrid and bqual


class Heuristic(NamedTuple):
    """Somebody decided a branch without its manager, or found it otherwise than
    decided. `branch` "" = the broker's own.
    """

    branch: str
    decided: int  # a `Decision`'s number
    found: str
    operator: str
    reason: str
    at: int


def _key(xid: Xid) -> bytes:
    return XID_HEAD.pack(xid.format, len(xid.gtrid)) + xid.gtrid + xid.bqual


def xid_of(decider: tuple[Any, ...]) -> Xid | None:
    """The Xid of a foreign branch."""
    return Xid(*decider[1:]) if decider[:1] == ("foreign",) else None


def find(state: State, xid: Xid) -> bytes | None:
    """The token of a foreign branch."""
    row: Any = state.tables[t.XIDS].get(_key(xid))
    return None if row is None else row[0]


def refused(state: State, token: bytes, decider: tuple[object, ...]) -> Rejected | None:
    """Whether the group's Xid is another group's."""
    xid = xid_of(decider)
    known = None if xid is None else find(state, xid)
    if known is None or known == token:
        return None
    message = f"XAER_DUPID: the Xid is that of transaction {known.hex()}"
    return Rejected(
        DuplicateXid, message, "a manager never uses an Xid twice", {"token": known.hex()}
    )


def remember(state: State, token: bytes, decider: tuple[object, ...]) -> None:
    """Apply: the group is stored, whatever becomes of it."""
    xid = xid_of(decider)
    if xid is not None:
        state.tables[t.XIDS].put(_key(xid), (token,))


def forget(state: State, token: bytes, decider: tuple[object, ...]) -> None:
    """Apply: the group is forgotten."""
    xid = xid_of(decider)
    if xid is not None and find(state, xid) == token:
        state.tables[t.XIDS].delete(_key(xid))
    state.tables[t.DEALT].delete(token)


def put(state: State, token: bytes, decider: tuple[object, ...]) -> None:
    """Apply: the group is complete and undecided."""
    if decider[0] in KINDS:
        state.tables[t.XA].put(token, heuristics(state, token))


def drop(state: State, token: bytes, decider: tuple[object, ...]) -> None:
    """Apply: the group is decided."""
    if decider[0] in KINDS and not heuristics(state, token):
        state.tables[t.XA].delete(token)


def heuristics(state: State, token: bytes) -> tuple[Heuristic, ...]:
    """What is to be dealt with at this transaction, the oldest first."""
    rows = state.tables[t.XA].get(token) or ()
    return tuple(Heuristic._make(row) for row in rows)


def has_heuristics(state: State, token: bytes) -> bool:
    """Whether somebody has yet to deal with this transaction: it is not to be forgotten
    before.
    """
    return bool(state.tables[t.XA].get(token))


def was_dealt_with(state: State, token: bytes, branch: str, decided: int, found: str) -> bool:
    """Whether somebody has dealt with just this before."""
    known: Any = state.tables[t.DEALT].get(token) or ()
    return any(tuple(entry[:3]) == (branch, decided, found) for entry in known)


def by_hand(state: State, token: bytes) -> bool:
    """Whether the broker's own branch was decided by somebody else than its manager."""
    return any(not entry.branch for entry in heuristics(state, token))


def add(state: State, token: bytes, seen: Heuristic) -> None:
    """Apply: one thing more to be dealt with."""
    known = heuristics(state, token)
    if not known:
        listing.enter(state, listing.Kind.HEURISTIC, token)
    state.tables[t.XA].put(token, (*known, seen))


def dealt_with(state: State, token: bytes, after: GroupState) -> None:
    """Apply: nothing is left to be dealt with at the transaction, which is in the state
    `after`.
    """
    before: Any = state.tables[t.DEALT].get(token) or ()
    state.tables[t.DEALT].put(token, (*before, *heuristics(state, token)))
    listing.leave(state, listing.Kind.HEURISTIC, token)
    if after is GroupState.UNDECIDED:
        state.tables[t.XA].put(token, ())
    else:
        state.tables[t.XA].delete(token)
        listing.ended(state, token)


def listed(state: State, after: bytes, *, heuristic: bool) -> Iterator[bytes]:
    """Tokens after `after`, the oldest transaction first; `heuristic`: only those with
    something to be dealt with.
    """
    if heuristic:  # not by looking through what is prepared, which may be much
        return (token for token in listing.tokens(state, listing.Kind.HEURISTIC) if token > after)
    return (token for token, _row in state.tables[t.XA].range(after + b"\0" if after else b""))
