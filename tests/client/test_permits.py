"""Places for prepared branches: as many as a server has, all of a transaction's at
once.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from txmq.client.blocking.transaction.permits import Permits, Wanted
from txmq.errors import TwoPhaseFull

NOW = 0.0


def soon() -> float:
    return time.monotonic() + 60


def test_places_come_back_however_the_block_ends() -> None:
    permits, two = Permits(), {1: Wanted(2, 3)}
    with permits.held(two, soon()):
        with pytest.raises(TwoPhaseFull), permits.held(two, NOW):
            pass
        with permits.held({1: Wanted(1, 3), 2: Wanted(5, 5)}, NOW):
            pass
    with pytest.raises(ZeroDivisionError), permits.held(two, NOW):
        _ = 1 / 0
    with permits.held(two, NOW):
        pass


def test_more_than_a_server_has_is_refused_at_once() -> None:
    with (
        pytest.raises(TwoPhaseFull, match=r"4 branches .* room for 3") as refused,
        Permits().held({1: Wanted(4, 3)}, soon()),
    ):
        pass
    assert refused.value.retriable
    assert "max_prepared_transactions" in refused.value.hint


def test_who_waits_goes_on_when_there_is_room() -> None:
    permits, all_of_it, inside = Permits(), {1: Wanted(3, 3)}, Event()

    def wait() -> None:
        with permits.held(all_of_it, soon()):
            inside.set()

    with ThreadPoolExecutor(1) as threads:
        with permits.held(all_of_it, soon()):
            waiting = threads.submit(wait)
            assert not inside.is_set()
        waiting.result(60)
    assert inside.is_set()
