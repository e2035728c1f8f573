"""Transactions as the lists of operators and recoverers show them, and how much of a
list goes into one reply.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from txmq.core.transactions.model import Transaction

PAGE_BYTES = 1 << 20  # of a list with texts of users, more or less; one entry may be larger
ENTRY_BYTES = 256  # of names and numbers


def as_fit(entries: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """As many entries as fit into a reply, one at least: the rest is for the next
    page.
    """
    size = 0
    for entry in entries:
        weight = ENTRY_BYTES + sum(len(str(value)) for value in entry.values())
        if size and size + weight > PAGE_BYTES:
            return
        size += weight
        yield entry


def told(token: bytes, row: Transaction) -> dict[str, Any]:
    """A transaction in a list."""
    return {
        "token": token.hex(),
        "state": row.state.name,
        "decider": plain(row.decider),
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


def plain(fields: tuple[object, ...]) -> list[object]:
    """A tuple of the log's as JSON can hold it: bytes in hexadecimal."""
    return [field.hex() if isinstance(field, bytes) else field for field in fields]
