"""Lists of transactions that an operator may have to look at, so that finding and
counting them takes no search.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.state.state import State


class Kind(IntEnum):
    """Which list; the numbers are in the tables."""

    OPEN = 1  # parts are missing
    IN_DOUBT = 2  # undecided, though asked about so often
    WAITING = 3  # committed, behind earlier tickets of its keys
    HEURISTIC = 4  # decided by hand or found mixed, and nobody has dealt with it
    LATE = 5  # so old that the sweep had passed it when it came to its end


def enter(state: State, kind: Kind, token: bytes) -> None:
    """Apply: put a transaction on a list on which it is not yet."""
    state.tables[t.LISTED].put(t.LISTED_KEY.pack(kind, token), ())
    state.listed[kind] += 1


def leave(state: State, kind: Kind, token: bytes) -> None:
    """Apply: take a transaction off a list; one that is not on it is fine."""
    key = t.LISTED_KEY.pack(kind, token)
    if state.listed[kind] and state.tables[t.LISTED].get(key) is not None:
        state.tables[t.LISTED].delete(key)
        state.listed[kind] -= 1


def ended(state: State, token: bytes) -> None:
    """Apply: the transaction has come to its end, so far as is known here. The sweep
    does not pass it again.
    """
    if (
        token < state.swept
        and state.tables[t.LISTED].get(t.LISTED_KEY.pack(Kind.LATE, token)) is None
    ):
        enter(state, Kind.LATE, token)


def tokens(state: State, kind: Kind, start: bytes = b"") -> Iterator[bytes]:
    """The transactions on a list, the oldest first; from that token on."""
    for key, _row in state.tables[t.LISTED].range(bytes((kind,)) + start, bytes((kind + 1,))):
        yield key[1:]
