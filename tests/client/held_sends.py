"""Sends in flight at a scripted broker, held back by a test and then collected."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import pytest

import txmq
from tests.client.scripted_broker import FakeBroker
from txmq.batch import BatchView
from txmq.client.blocking.client import Client
from txmq.errors import RequestRejected, SequenceGap
from txmq.testing.wait import PATIENCE_S
from txmq.wire.data_requests import unpack_send
from txmq.wire.frames import Frame

Connect = Callable[..., Client]


class Gate:
    """Holds replies to sends back until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.arrived = threading.Event()

    def __call__(self, _frame: object) -> None:
        self.arrived.set()
        assert self._open.wait(PATIENCE_S)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(fake: FakeBroker) -> Iterator[Gate]:
    """Hold the reply to the first send back."""
    gate = Gate()
    fake.script.append(gate)
    yield gate
    gate.open()


def results(futures: list[Future[txmq.Receipt]]) -> list[txmq.Receipt]:
    return [future.result(PATIENCE_S) for future in futures]


def refuse_from_here(fake: FakeBroker, refusal: RequestRejected) -> None:
    """Refuse the next send and all later ones of its session, as a broker does."""
    sessions: list[bytes] = []

    def step(frame: Frame) -> RequestRejected | None:
        sessions.append(BatchView(unpack_send(frame.payload).batch).header.producer_id)
        if len(sessions) == 1:
            return refusal
        return SequenceGap("a send is missing") if sessions[-1] == sessions[0] else None

    fake.script += [step] * 100


@contextmanager
def paused(client: Client) -> Iterator[None]:
    """Keep the sender from draining, as if a write were in progress."""
    in_flight = client._core.sender._in_flight
    in_flight.paused_until = time.monotonic() + 3_600
    yield
    in_flight.paused_until = 0.0


@contextmanager
def eight_in_flight(client: Client, gate: Gate) -> Iterator[list[Future[txmq.Receipt]]]:
    """Send a frame of eight messages, whose receipts come at the end of the block."""
    client._core.topics.get("orders")
    with paused(client):
        futures = [client.send_async("orders", b"first") for _ in range(8)]
    assert gate.arrived.wait(PATIENCE_S)
    yield futures
    gate.open()
