"""Blocks of few letters, so that few letters make several."""

from __future__ import annotations

import pytest

from txmq.core.state import plan_blocks


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_blocks, "LETTERS", 2)
