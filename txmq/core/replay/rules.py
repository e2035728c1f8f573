"""The rules of replay plans and policies."""

from __future__ import annotations

from txmq.core.replay import abandoning, building, cleanup, orders, policies, putting_back

RULES = (orders, building, putting_back, abandoning, cleanup, policies)
