"""A small ballast, for many stores one after the other."""

from __future__ import annotations

import pytest

from txmq.recover.local import store


@pytest.fixture(autouse=True)
def _small_ballast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "BALLAST", 4096)
