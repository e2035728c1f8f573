"""What is undecided: in the order of its tickets, and the oldest by the times that
tokens tell.

Who keeps evidence for undecided transactions, such as a database's token rows, asks for
the oldest token. So that a million of them cost nothing at each such look, they are
counted by spans of their tokens' times.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from txmq.model.bundle import GroupState, decided
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.state.state import State

SPAN: Final = 4  # bytes of a token: 65 s
LOOKED_AT: Final = 1_000  # rows of one span that one look may touch


def enter(state: State, ticket: int, token: bytes) -> None:
    """Apply: a group is stored, in part at least, and not decided."""
    state.tables[t.UNDECIDED].put(t.TICKET_KEY.pack(ticket), (token,))
    count(state, token)


def count(state: State, token: bytes) -> None:
    """One more, as it is found in the table at the start."""
    span = token[:SPAN]
    state.undecided += 1
    state.undecided_spans[span] = state.undecided_spans.get(span, 0) + 1


def leave(state: State, ticket: int, token: bytes) -> None:
    """Apply: it is decided."""
    state.tables[t.UNDECIDED].delete(t.TICKET_KEY.pack(ticket))
    span = token[:SPAN]
    state.undecided -= 1
    state.undecided_spans[span] -= 1
    if not state.undecided_spans[span]:
        del state.undecided_spans[span]


def tokens(state: State) -> Iterator[bytes]:
    """All of them, the first stored first."""
    rows: Any = state.tables[t.UNDECIDED].range(b"")
    for _key, (token,) in rows:
        yield token


def oldest(state: State) -> bytes | None:
    """The oldest token that is undecided; None = all are decided.

    Where very many that are decided come before it in its span of time, an older token
    stands for it.
    """
    if not state.undecided_spans:
        return None
    bound: bytes = state.undecided_spans.peekitem(0)[0].ljust(16, b"\0")
    rows: Any = state.transactions.range(bound)
    for token, row in islice(rows, LOOKED_AT):
        bound = token
        if not decided(GroupState(row[0])):
            break
    return bound
