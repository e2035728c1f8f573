"""The rules of topics, plain sends, delayed messages and restored logs."""

from __future__ import annotations

from txmq.core.topics import delay_rules, restored_log, sends, topics

RULES = (topics, sends, delay_rules, restored_log)
