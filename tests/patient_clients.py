"""Clients that wait as long as a busy machine needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from txmq.client.protocol.settings import ClientSettings
from txmq.testing.wait import PATIENCE_S


@contextmanager
def default_timeout(seconds: float) -> Iterator[None]:
    """Give clients of this process such a time-out, unless they set their own."""
    of = ClientSettings.of

    def timed(service: str | None, **options: Any) -> ClientSettings:
        return of(service, **{"timeout": seconds, "delivery_timeout": seconds} | options)

    with patch.object(ClientSettings, "of", timed):
        yield


@pytest.fixture(autouse=True, scope="session")
def patient_clients() -> Iterator[None]:
    """Let clients and their transactions wait for a broker whose disk stalls.

    The default of transactions, two seconds, spares the row locks of users.
    """
    with (
        default_timeout(PATIENCE_S),
        patch("txmq.client.protocol.transaction.options.STORE_TIMEOUT_S", PATIENCE_S),
    ):
        yield
