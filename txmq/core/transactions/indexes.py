"""Indexes of transactions: undecided ones, operators' lists, and the backlog.

- Table `undecided`: undecided transactions by ticket, counted by the spans of time of
  their tokens; table `due`: their next check-backs; table `xa`: those of XA managers.
- Table `listed`: transactions that may need an operator, so that finding and counting
  them takes no search.
- Table `backlog`: committed bundles and queued batches that may be free, and large
  bundles with pieces to process. A decision publishes what it sets free in its own
  record, within limits. The rest is worked on step by step (`large_publication`).
"""

from __future__ import annotations

from enum import IntEnum
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from txmq.model.bundle import DECIDED, BundleState
from txmq.model.decider import BY_XA_MANAGER, ByPostgres, DatabaseId, read_decider
from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from txmq.core.state.state import State
    from txmq.core.transactions.model import Transaction
    from txmq.model.decider import Decider

SPAN_BYTES: Final = 4  # of a token: 65 s
MAX_ROWS_SCANNED: Final = 1_000  # rows of one span that one search may touch
DECIDER: Final = 2  # index of the decider in a row of table `transactions`
NO_DATABASE: Final = (0, 0)  # in rows of table `undecided`: no database decides it


class ListKind(IntEnum):
    """The lists of table `listed`; the numbers are in its keys."""

    OPEN = 1  # parts are missing
    IN_DOUBT = 2  # undecided after many check-backs
    WAITING = 3  # committed, behind earlier tickets on its keys
    HEURISTIC = 4  # decided by hand or found mixed, and not cleared yet
    LATE = 5  # ended after outcome expiry had passed its token
    UNVERIFIED = 6  # decided by hand while its database could not be asked


def add_undecided(state: State, token: bytes, ticket: int, check_at: int, decider: Decider) -> None:
    """Apply: the first part of a bundle is stored, and nothing is decided."""
    database = _database_of(decider)
    state.tables[t.UNDECIDED].put(t.TICKET_KEY.pack(ticket), (token, *(database or NO_DATABASE)))
    _count_undecided(state, token, database)
    if check_at:
        state.tables[t.DUE].put(t.DUE_KEY.pack(check_at, t.DUE_CHECK, ticket), (token,))


def _database_of(decider: Decider) -> DatabaseId | None:
    return decider.database if isinstance(decider, ByPostgres) else None


def count_all_undecided(state: State) -> None:
    """Count the rows of table `undecided` at the start."""
    rows: Any = state.tables[t.UNDECIDED].range(b"")
    for _key, (token, *database) in rows:
        found = None if tuple(database) == NO_DATABASE else DatabaseId(*database)
        _count_undecided(state, token, found)


def _count_undecided(state: State, token: bytes, database: DatabaseId | None) -> None:
    span, spans = token[:SPAN_BYTES], state.undecided_spans.setdefault(database, {})
    state.undecided += 1
    spans[span] = spans.get(span, 0) + 1


def add_prepared(state: State, token: bytes) -> None:
    """Apply: a bundle of an XA manager is sealed and undecided."""
    state.tables[t.XA].put(token, state.tables[t.XA].get(token) or ())


def move_check(state: State, token: bytes, row: Transaction, check_at: int) -> None:
    """Apply: the next check-back of an undecided transaction is at `check_at`, 0 =
    never.
    """
    due = state.tables[t.DUE]
    if row.check_at:
        due.delete(t.DUE_KEY.pack(row.check_at, t.DUE_CHECK, row.ticket))
    if check_at:
        due.put(t.DUE_KEY.pack(check_at, t.DUE_CHECK, row.ticket), (token,))


def remove_undecided(state: State, token: bytes, row: Transaction) -> None:
    """Apply: the transaction is decided. `row` is its row before the decision."""
    if row.state is BundleState.OPEN:
        remove_from_list(state, ListKind.OPEN, token)
    if row.state in DECIDED:
        return
    if row.in_doubt:
        remove_from_list(state, ListKind.IN_DOUBT, token)
    state.tables[t.UNDECIDED].delete(t.TICKET_KEY.pack(row.ticket))
    database, span = _database_of(row.decider), token[:SPAN_BYTES]
    spans = state.undecided_spans[database]
    state.undecided -= 1
    spans[span] -= 1
    if not spans[span]:
        del spans[span]
    if not spans:
        del state.undecided_spans[database]
    if isinstance(row.decider, BY_XA_MANAGER) and not state.tables[t.XA].get(token):
        state.tables[t.XA].delete(token)
    if row.check_at:
        state.tables[t.DUE].delete(t.DUE_KEY.pack(row.check_at, t.DUE_CHECK, row.ticket))


def undecided_tokens(state: State) -> Iterator[bytes]:
    """Yield the tokens of undecided transactions in the order of their tickets."""
    rows: Any = state.tables[t.UNDECIDED].range(b"")
    for _key, (token, *_database) in rows:
        yield token


def undecided_by_databases(state: State, after: int, most: int) -> tuple[list[bytes], int | None]:
    """Return tokens that databases decide, among `most` undecided ones whose tickets
    are behind `after`, and the last of these tickets. None = there are no more.
    """
    if not any(state.undecided_spans.keys() - {None}):
        return [], None
    rows: Any = state.tables[t.UNDECIDED].range(t.TICKET_KEY.pack(after + 1))
    scanned = list(islice(rows, most))
    found = [token for _key, (token, *database) in scanned if tuple(database) != NO_DATABASE]
    end = t.TICKET_KEY.unpack(scanned[-1][0])[0] if len(scanned) == most else None
    return found, end


def oldest_undecided(state: State) -> bytes | None:
    """Return a token at or before the oldest undecided one; None = all are decided."""
    firsts = [min(spans) for spans in state.undecided_spans.values()]
    return _first_undecided(state, min(firsts), lambda _row: True) if firsts else None


def oldest_by_database(state: State) -> dict[DatabaseId, bytes]:
    """Return, for each database, a token at or before the oldest one that it is to
    decide, or to confirm. Databases that have nothing to do are left out.
    """
    found = {
        database: _first_undecided(state, min(spans), partial(_is_decided_by, database))
        for database, spans in state.undecided_spans.items()
        if database is not None
    }
    for token in islice(listed_tokens(state, ListKind.UNVERIFIED), MAX_ROWS_SCANNED):
        row: Any = state.transactions.get(token)
        database = _database_of(read_decider(row[DECIDER]))
        if database is not None:
            found[database] = min(found.get(database, token), token)
    return found


def _is_decided_by(database: DatabaseId, row: Any) -> bool:  # noqa: ANN401  # rows are untyped
    return _database_of(read_decider(row[DECIDER])) == database


def _first_undecided(state: State, span: bytes, wanted: Callable[[Any], bool]) -> bytes:
    """Return a token at or before the first undecided one that is wanted, in `span`.

    Databases that keep token rows for undecided transactions ask for it regularly, so
    it must cost nothing with a million of them. Where very many others come before the
    wanted one in its span of time, an older token stands for it.
    """
    bound = span.ljust(16, b"\0")
    rows: Any = state.transactions.range(bound)
    for token, row in islice(rows, MAX_ROWS_SCANNED):
        bound = token
        if BundleState(row[0]) not in DECIDED and wanted(row):
            break
    return bound


def add_to_list(state: State, kind: ListKind, token: bytes) -> None:
    """Apply: add a transaction to a list that does not have it yet."""
    state.tables[t.LISTED].put(t.LISTED_KEY.pack(kind, token), ())
    state.listed[kind] += 1


def remove_from_list(state: State, kind: ListKind, token: bytes) -> None:
    """Apply: remove a transaction from a list, if it is on it."""
    key = t.LISTED_KEY.pack(kind, token)
    if state.listed[kind] and state.tables[t.LISTED].get(key) is not None:
        state.tables[t.LISTED].delete(key)
        state.listed[kind] -= 1


def is_listed(state: State, kind: ListKind, token: bytes) -> bool:
    """Return whether a transaction is on a list."""
    listed = state.listed[kind] > 0
    return listed and state.tables[t.LISTED].get(t.LISTED_KEY.pack(kind, token)) is not None


def note_ended(state: State, token: bytes) -> None:
    """Apply: the transaction has ended. If outcome expiry has passed it, list it."""
    if (
        token < state.expired_to
        and state.tables[t.LISTED].get(t.LISTED_KEY.pack(ListKind.LATE, token)) is None
    ):
        add_to_list(state, ListKind.LATE, token)


def listed_tokens(state: State, kind: ListKind, start: bytes = b"") -> Iterator[bytes]:
    """Yield the tokens on a list from `start` on, the oldest first."""
    for key, _row in state.tables[t.LISTED].range(bytes((kind,)) + start, bytes((kind + 1,))):
        yield key[1:]


def add_to_backlog(state: State, ticket: int, token: bytes | None) -> None:
    """Apply: a bundle, or a queued batch (no token), is to be processed."""
    key = t.TICKET_KEY.pack(ticket)
    if state.tables[t.BACKLOG].get(key) is None:
        state.backlog += 1
    state.tables[t.BACKLOG].put(key, (token,))


def add_all_to_backlog(state: State, later: Iterable[tuple[int, bytes | None]]) -> None:
    """Apply: all these are to be processed."""
    for ticket, token in later:
        add_to_backlog(state, ticket, token)


def remove_from_backlog(state: State, ticket: int) -> None:
    """Apply: remove a row from the backlog, if it is there."""
    key = t.TICKET_KEY.pack(ticket)
    if state.tables[t.BACKLOG].get(key) is not None:
        state.tables[t.BACKLOG].delete(key)
        state.backlog -= 1


def backlog_rows(state: State) -> Iterator[tuple[int, bytes | None]]:
    """Yield (ticket, token) of the backlog, the earliest first."""
    for key, (token,) in state.tables[t.BACKLOG].range(b""):
        yield t.TICKET_KEY.unpack(key)[0], token
