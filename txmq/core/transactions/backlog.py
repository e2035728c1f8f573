"""The backlog: committed groups and queued batches that are perhaps free, and large
groups with pieces to be done.

A decision publishes what it sets free in its own record, as far as that takes no long;
the rest has a row here, by ticket, and is worked on step by step (`slices`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from txmq.core.state.state import State


def add(state: State, ticket: int, token: bytes | None) -> None:
    """Apply: to be looked at."""
    key = t.TICKET_KEY.pack(ticket)
    if state.tables[t.BACKLOG].get(key) is None:
        state.backlog += 1
    state.tables[t.BACKLOG].put(key, (token,))


def add_all(state: State, later: Iterable[tuple[int, bytes | None]]) -> None:
    """Apply: all these are to be looked at."""
    for ticket, token in later:
        add(state, ticket, token)


def drop(state: State, ticket: int) -> None:
    """Apply: looked at and done with; what is not there is fine."""
    key = t.TICKET_KEY.pack(ticket)
    if state.tables[t.BACKLOG].get(key) is not None:
        state.tables[t.BACKLOG].delete(key)
        state.backlog -= 1


def rows(state: State) -> Iterator[tuple[int, bytes | None]]:
    """(ticket, token) of all that is there, the earliest first; a queued batch has no
    token.
    """
    for key, (token,) in state.tables[t.BACKLOG].range(b""):
        yield t.TICKET_KEY.unpack(key)[0], token
