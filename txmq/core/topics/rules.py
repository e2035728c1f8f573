"""The rules of topics, schemas, plain sends and their producers, delayed messages and
restored logs.
"""

from __future__ import annotations

from txmq.core.topics import (
    delay_rules,
    producer_owners,
    restored_log,
    schemas,
    sends,
    topics,
)

RULES = (topics, schemas, sends, producer_owners, delay_rules, restored_log)
