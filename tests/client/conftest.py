"""A scripted broker for each test of the client, and clients that are closed at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import txmq
from tests.client.fake import FakeBroker
from txmq.client.blocking import Client


@pytest.fixture
def fake() -> Iterator[FakeBroker]:
    with FakeBroker() as broker:
        yield broker


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    """`txmq.connect` for the length of the test."""
    with ExitStack() as stack:

        def connected(url: str, **options: Any) -> Client:
            return stack.enter_context(txmq.connect(url, **{"service": "orders", **options}))

        yield connected
