"""Brokers that tests of this folder share."""

from __future__ import annotations

import pytest

from tests.broker.support import Broker


@pytest.fixture
def broker() -> Broker:
    """One whose timers run."""
    broker = Broker()
    broker.start()
    return broker
