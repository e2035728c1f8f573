"""Kombu's own integration tests, on txmq: `suites` copies this module to them."""

from __future__ import annotations

import os

import kombu
import pytest
from t.integration.common import (
    BaseEventLoop,
    BaseExchangeTypes,
    BaseFailover,
    BaseMessage,
    BasePriority,
    BaseTimeToLive,
    BasicFunctionality,
)

URL = os.environ["TEST_BROKER"]
NOWHERE = "txmq://127.0.0.1:1"


@pytest.fixture
def connection() -> kombu.Connection:
    return kombu.Connection(URL)


@pytest.fixture
def invalid_connection() -> kombu.Connection:
    return kombu.Connection(NOWHERE, connect_timeout=1)


@pytest.fixture
def failover_connection() -> kombu.Connection:
    return kombu.Connection(f"{NOWHERE};{URL}", connect_timeout=1)


class TestBasicFunctionality(BasicFunctionality):  # type: ignore[misc]  # without types
    """As Kombu has them."""


class TestExchangeTypes(BaseExchangeTypes):  # type: ignore[misc]  # without types
    """As Kombu has them."""


class TestTimeToLive(BaseTimeToLive):  # type: ignore[misc]  # without types
    """As Kombu has them."""


class TestPriority(BasePriority):  # type: ignore[misc]  # without types
    """As Kombu has them."""


class TestMessage(BaseMessage):  # type: ignore[misc]  # without types
    """As Kombu has them."""


class TestEventLoop(BaseEventLoop):  # type: ignore[misc]  # without types
    """As Kombu has them."""


class TestFailover(BaseFailover):  # type: ignore[misc]  # without types
    """As Kombu has them."""
