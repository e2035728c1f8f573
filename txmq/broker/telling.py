"""Transactions as the lists of operators and recoverers show them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from txmq.broker.core.transactions import Transaction


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
