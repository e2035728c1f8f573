"""Processes that stand still for a test."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from txmq.testing.wait import wait_until


def freeze(pid: int) -> None:
    """Stop a process until SIGCONT, and return once it stands still.

    SIGSTOP takes effect when the scheduler gives the process its next turn. Until then
    its other threads go on, on a busy machine for long.
    """
    os.kill(pid, signal.SIGSTOP)
    wait_until_frozen(pid)


def wait_until_frozen(pid: int) -> None:
    """Wait until each thread of a process is stopped."""
    wait_until(lambda: _states(pid) == {"T"}, what=f"process {pid} stands still")


def _states(pid: int) -> set[str]:
    threads = Path(f"/proc/{pid}/task")
    try:
        return {stat.read_text().rpartition(")")[2].split()[0] for stat in threads.glob("*/stat")}
    except (FileNotFoundError, ProcessLookupError):  # a thread has ended meanwhile
        return set()
