"""Fixtures that the tests of the broker share."""

from __future__ import annotations

import pytest

from tests.broker.support import BrokerInMemory


@pytest.fixture
def broker() -> BrokerInMemory:
    """A broker whose timers run."""
    broker = BrokerInMemory()
    broker.start()
    return broker
