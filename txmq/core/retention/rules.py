"""The rules of retention and expiry."""

from __future__ import annotations

from txmq.core.retention import (
    audit_entries,
    broker_time,
    letter_retention,
    outcome_expiry,
    past_failures,
    relocation,
    topic_retention,
)

RULES = (
    audit_entries,
    broker_time,
    outcome_expiry,
    past_failures,
    topic_retention,
    relocation,
    letter_retention,
)
