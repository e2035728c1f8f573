"""Processes that end when the one that started them does, however that ends: killed,
too.

Each tells its number to a keeper before it begins. The keeper is a process of its own
whose standard input is a pipe that ends with the process that started it; then it ends
what is left. A process that has ended by itself is forgotten within a second, long
before its number can belong to another.
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

LOOK_S: Final = 1.0
TELL: Final = 'echo "$0 $$" >&0; exec "$@" </dev/null'
NEVER: Final = 0  # in place of a signal's number


@cache
def leash() -> int:
    """The pipe to this process's keeper: the standard input of what `leashed` makes."""
    reading, writing = os.pipe()
    silent = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)]
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", __file__],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0), *silent],
        setpgroup=0,  # an interrupt at the terminal is not meant for it
    )
    os.close(reading)
    return writing


def leashed(
    command: Sequence[str | Path], number: signal.Signals = signal.SIGKILL
) -> list[str | Path]:
    """The command to start instead, with `leash()` for its input and in a session of
    its own; its input is empty.

    The signal is what it and its children get when the present process is gone and it
    is not.
    """
    return ["/bin/sh", "-c", TELL, str(int(number)), *command]


def let_go(pid: int) -> None:
    """Lets a process that was started so outlive this one."""
    os.write(leash(), b"%d %d\n" % (NEVER, pid))


def _keep() -> None:
    for ignored in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)  # its end comes with that of its pipe
    held: dict[int, int] = {}  # process: signal
    begun, open_ = b"", True
    while open_:
        if select.select([0], [], [], LOOK_S if held else None)[0]:
            told = os.read(0, select.PIPE_BUF)
            open_ = bool(told)
            *lines, begun = (begun + told).split(b"\n")
            held |= {int(pid): int(number) for number, pid in map(bytes.split, lines)}
        held = {pid: number for pid, number in held.items() if number and _send(pid, 0)}
    for pid, number in held.items():
        _send(pid, number)


def _send(pid: int, number: int) -> bool:
    with suppress(OSError):
        os.killpg(pid, number)
        return True
    return False


if __name__ == "__main__":
    _keep()
