"""The rules of retention and expiry."""

from __future__ import annotations

from txmq.core.retention import letter_retention, outcome_expiry, relocation, topic_retention

RULES = (outcome_expiry, topic_retention, relocation, letter_retention)
