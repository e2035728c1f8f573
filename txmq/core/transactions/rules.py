"""The rules of transactions."""

from __future__ import annotations

from txmq.core.transactions import (
    batched,
    decisions,
    half_storage,
    instances,
    jobs,
    large_publication,
    timers,
    unverified,
    xa,
)

RULES = (
    half_storage,
    decisions,
    batched,
    jobs,
    large_publication,
    xa,
    unverified,
    instances,
    timers,
)
