"""A host name with several addresses, of which the first is a black hole.

The Twisted client's endpoint does the same by itself.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import txmq
import txmq.aio
from tests.client.aio.running import run
from tests.client.scripted_broker import FakeBroker
from txmq.errors import BrokerUnavailable

NAME, DEAD = "broker.test", "127.0.0.2"
TIMEOUT_S = 12.0  # the black hole has a part of it


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    with FakeBroker() as broker:
        yield broker


@pytest.fixture
def black_hole(broker: FakeBroker) -> Iterator[str]:
    """An address with the broker's port that answers nobody: its queue is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((DEAD, broker.port))
        listener.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex((DEAD, broker.port))
        yield DEAD


@pytest.fixture
def url(broker: FakeBroker, black_hole: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The broker by a name, whose first address is the black hole."""
    real = socket.getaddrinfo

    def found(host: str, port: int, *args: Any, **options: Any) -> list[Any]:
        hosts = (black_hole, "127.0.0.1") if host == NAME else (host,)
        return [entry for one in hosts for entry in real(one, port, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    return f"txmq://{NAME}:{broker.port}"


def test_a_blocking_client_goes_on_to_the_next_address(url: str) -> None:
    with txmq.connect(url, timeout=TIMEOUT_S) as client:
        assert client.send("orders", b"1").offset == 0


def test_a_client_of_asyncio_goes_on_to_the_next_address(url: str) -> None:
    async def work() -> None:
        async with txmq.aio.connect(url, timeout=TIMEOUT_S) as client:
            assert (await client.send("orders", b"1")).offset == 0

    run(work())


def test_black_holes_only_are_an_unavailable_broker(url: str, broker: FakeBroker) -> None:
    broker.close()
    with (
        txmq.connect(url, timeout=1.0) as client,
        pytest.raises(BrokerUnavailable, match="no broker answered within"),
    ):
        client.send("orders", b"1")
