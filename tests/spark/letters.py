"""Dead letters for plans."""

from __future__ import annotations

from typing import Any

from txmq_spark.plan import Letter


def letter(offset: int, key: str | None = None, **fields: object) -> Letter:
    """Return a safe letter of topic orders, partition 0."""
    given: dict[str, Any] = {
        "topic": "orders",
        "partition": 0,
        "offset": offset,
        "message_id": f"{'0' * 32}-{offset}",
        "key": key,
        "stored_at": offset,
        "dead_at": 1_000 + offset,
        "attempts": 3,
    }
    return Letter(**(given | fields))
