"""Calls at once: all of them end before anybody hears of one that failed, and a fork
has threads of its own.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial

import pytest

from txmq.client.blocking.concurrently import together

WAIT_S = 60


def test_calls_run_at_the_same_time_and_answer_in_their_order() -> None:
    barrier = threading.Barrier(4)

    def meet(number: int) -> tuple[int, bool]:
        barrier.wait(WAIT_S)
        return number, threading.current_thread() is threading.main_thread()

    assert together([partial(meet, number) for number in range(4)]) == [
        (0, True),
        (1, False),
        (2, False),
        (3, False),
    ]
    assert together([]) == []


@pytest.mark.parametrize("failing", [0, 1])
def test_a_call_that_raises_is_heard_of_when_all_are_over(failing: int) -> None:
    over, failed = [], threading.Event()

    def call(number: int) -> None:
        if number == failing:
            failed.set()
            raise LookupError
        assert failed.wait(WAIT_S)
        over.append(number)

    with pytest.raises(LookupError):
        together([partial(call, number) for number in range(3)])
    assert sorted(over) == sorted({0, 1, 2} - {failing})


def test_calls_that_wait_for_others_never_find_all_threads_taken() -> None:
    door = threading.Event()
    waiting = [threading.Thread(target=together, args=([door.wait, door.wait],)) for _ in range(40)]
    for thread in waiting:
        thread.start()
    together([door.is_set, door.set])
    for thread in waiting:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in waiting)


FORK = """
import os
from txmq.client.blocking.concurrently import together
def works(): return together([os.getpid, os.getpid]) == [os.getpid()] * 2
assert works()
if pid := os.fork():
    assert os.waitpid(pid, 0)[1] == 0
assert works()
"""


def test_a_fork_has_threads_of_its_own() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], check=True, timeout=60)
