"""Processes that end when the process that started them ends, even by SIGKILL.

Each process registers its id with a reaper before it runs. The reaper is a process that
reads registrations from a pipe. The pipe closes when the starting process ends, and the
reaper then signals the registered processes that are left. A process that has ended by
itself is dropped within a second, long before its id can be used again.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

POLL_S: Final = 1.0
REGISTER: Final = 'echo "$0 $$" >&0; exec "$@" </dev/null'
RELEASED: Final = 0  # instead of the number of a signal


@cache
def reaper_pipe() -> int:
    """Return the pipe to this process's reaper, the standard input for a `reaped`
    command.
    """
    reading, writing = os.pipe()
    silent = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)]
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", __file__],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0), *silent],
        setpgroup=0,  # an interrupt at the terminal must not end it
    )
    os.close(reading)
    return writing


def reaped(
    command: Sequence[str | Path], number: signal.Signals = signal.SIGKILL
) -> list[str | Path]:
    """Return the command to start instead, with `reaper_pipe()` as its standard input.

    It needs a session of its own. The program then has an empty standard input. When
    the present process has ended, the reaper sends `number` to the program and its
    children.
    """
    return ["/bin/sh", "-c", REGISTER, str(int(number)), *command]


def release(pid: int) -> None:
    """Keep a registered process running after this one."""
    os.write(reaper_pipe(), b"%d %d\n" % (RELEASED, pid))


def _reap() -> None:
    for ignored in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)  # the reaper ends when its pipe closes
    registered: dict[int, int] = {}  # process id: signal
    partial, open_ = b"", True
    while open_:
        if select.select([0], [], [], POLL_S if registered else None)[0]:
            data = os.read(0, select.PIPE_BUF)
            open_ = bool(data)
            *lines, partial = (partial + data).split(b"\n")
            registered |= {int(pid): int(number) for number, pid in map(bytes.split, lines)}
        registered = {pid: number for pid, number in registered.items() if number and _send(pid, 0)}
    for pid, number in registered.items():
        _send(pid, number)


def _send(pid: int, number: int) -> bool:
    with suppress(OSError):
        os.killpg(pid, number)
        return True
    return False


if __name__ == "__main__":
    _reap()
