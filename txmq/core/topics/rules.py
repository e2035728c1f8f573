"""The rules of topics, plain sends and delayed messages."""

from __future__ import annotations

from txmq.core.topics import delay_rules, sends, topics

RULES = (topics, sends, delay_rules)
