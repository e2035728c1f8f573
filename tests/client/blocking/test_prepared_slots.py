"""Slots for prepared branches: within the server's limit, reserved all at once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from txmq.client.protocol.transaction.prepared_slots import PreparedSlots, SlotDemand
from txmq.errors import TwoPhaseFull
from txmq.testing.wait import PATIENCE_S

NOW = 0.0


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def test_slots_are_released_however_the_block_ends() -> None:
    permits, two = PreparedSlots(), {1: SlotDemand(2, 3)}
    with permits.reserve(two, soon()):
        with pytest.raises(TwoPhaseFull), permits.reserve(two, NOW):
            pass
        with permits.reserve({1: SlotDemand(1, 3), 2: SlotDemand(5, 5)}, NOW):
            pass
    with pytest.raises(ZeroDivisionError), permits.reserve(two, NOW):
        _ = 1 / 0
    with permits.reserve(two, NOW):
        pass


def test_more_than_a_server_has_is_refused_at_once() -> None:
    with (
        pytest.raises(TwoPhaseFull, match=r"4 branches .* allows 3") as refused,
        PreparedSlots().reserve({1: SlotDemand(4, 3)}, soon()),
    ):
        pass
    assert refused.value.retriable
    assert "max_prepared_transactions" in refused.value.hint


def test_who_waits_goes_on_when_there_is_room() -> None:
    permits, all_of_it, inside = PreparedSlots(), {1: SlotDemand(3, 3)}, Event()

    def wait() -> None:
        with permits.reserve(all_of_it, soon()):
            inside.set()

    with ThreadPoolExecutor(1) as threads:
        with permits.reserve(all_of_it, soon()):
            waiting = threads.submit(wait)
            assert not inside.is_set()
        waiting.result(PATIENCE_S)
    assert inside.is_set()
