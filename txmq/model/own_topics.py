"""The broker's own topics: their names begin with `_txmq.`, and nobody else makes,
changes or writes them. Everybody may read them.
"""

from __future__ import annotations

PREFIX = "_txmq."
AUDIT = "_txmq.audit"  # what operators did


def is_own(name: str) -> bool:
    """Return whether a topic's name is reserved for the broker."""
    return name.startswith(PREFIX)
