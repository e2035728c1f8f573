"""Kombu's own integration tests, on txmq: `suites` copies this module to them."""

from __future__ import annotations

import os
from typing import Any

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

from txmq.testing.wait import PATIENCE_S

URL = os.environ["TEST_BROKER"]
LONGER = float(os.environ["TEST_LONGER"])
NOWHERE = "txmq://127.0.0.1:1"


class PatientConnection(kombu.Connection):  # type: ignore[misc]  # without types
    """A connection for a busy machine. Their tests wait for a second: here it is
    `LONGER`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._be_patient()

    def switch(self, conn_str: str) -> None:
        super().switch(conn_str)
        self._be_patient()

    def drain_events(self, timeout: float | None = None, **options: Any) -> Any:
        longer = None if timeout is None else timeout * LONGER
        return super().drain_events(timeout=longer, **options)

    def _be_patient(self) -> None:
        """Have no patience with the address where nobody answers."""
        self.connect_timeout = 1 if self.port == 1 else PATIENCE_S


@pytest.fixture
def connection() -> kombu.Connection:
    return PatientConnection(URL)


@pytest.fixture
def invalid_connection() -> kombu.Connection:
    return PatientConnection(NOWHERE)


@pytest.fixture
def failover_connection() -> kombu.Connection:
    return PatientConnection(f"{NOWHERE};{URL}")


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
