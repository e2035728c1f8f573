"""The rules of topics, schemas, plain sends, delayed messages and restored logs."""

from __future__ import annotations

from txmq.core.topics import delay_rules, restored_log, schemas, sends, topics

RULES = (topics, schemas, sends, delay_rules, restored_log)
