"""Concurrent calls all end before an error is raised, and work in a forked child."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial

import pytest

from txmq.client.blocking.concurrently import run_concurrently
from txmq.testing.wait import PATIENCE_S


def test_calls_run_at_the_same_time_and_return_in_their_order() -> None:
    barrier = threading.Barrier(4)

    def meet(number: int) -> tuple[int, bool]:
        barrier.wait(PATIENCE_S)
        return number, threading.current_thread() is threading.main_thread()

    assert run_concurrently([partial(meet, number) for number in range(4)]) == [
        (0, True),
        (1, False),
        (2, False),
        (3, False),
    ]
    assert run_concurrently([]) == []


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_is_raised_when_all_calls_are_over(failing: int) -> None:
    over, failed = [], threading.Event()

    def call(number: int) -> None:
        if number == failing:
            failed.set()
            raise LookupError
        assert failed.wait(PATIENCE_S)
        over.append(number)

    with pytest.raises(LookupError):
        run_concurrently([partial(call, number) for number in range(3)])
    assert sorted(over) == sorted({0, 1, 2} - {failing})


def test_calls_that_wait_for_others_never_lack_a_thread() -> None:
    door = threading.Event()
    waiting = [
        threading.Thread(target=run_concurrently, args=([door.wait, door.wait],)) for _ in range(40)
    ]
    for thread in waiting:
        thread.start()
    run_concurrently([door.is_set, door.set])
    for thread in waiting:
        thread.join()
    assert not any(thread.is_alive() for thread in waiting)


FORK = """
import os
from txmq.client.blocking.concurrently import run_concurrently
def works(): return run_concurrently([os.getpid, os.getpid]) == [os.getpid()] * 2
assert works()
if pid := os.fork():
    assert os.waitpid(pid, 0)[1] == 0
assert works()
"""


def test_a_fork_has_threads_of_its_own() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], check=True, timeout=PATIENCE_S)
