"""Processes end with the process that started them, even after SIGKILL; others do
not.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TextIO

import pytest

from txmq.testing.processes import Running

# A reader of a pipe gets its end when all writers have ended.
HERE = """
import os, signal, sys
out = open(sys.argv[1], "w")
def say(text):
    print(text, file=out, flush=True)
"""
WAITS = "say(f'here {os.getpid()}'); signal.pause()"
ASKED = "signal.signal(signal.SIGQUIT, lambda *_: (say('asked'), sys.exit()));"
DIRECTOR = f"""
import subprocess, sys
from pathlib import Path
from signal import SIGKILL, SIGQUIT, pause
from txmq.testing.forked import run_source
from txmq.testing.reaper import reaped, reaper_pipe, release
from txmq.testing.processes import Running
HERE, WAITS, ASKED = {HERE!r}, {WAITS!r}, {ASKED!r}

def start(path, text=HERE + WAITS, number=SIGKILL):
    command = reaped([sys.executable, "-c", text, path], number)
    return subprocess.Popen(command, stdin=reaper_pipe(), start_new_session=True)

directory = Path(sys.argv[1])
pipes = [str(directory / name) for name in ("first", "second")]
"""


@pytest.fixture
def pipes(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "first", tmp_path / "second"]
    for path in paths:
        os.mkfifo(path)
    return paths


def direct(directory: Path, text: str) -> Running:
    """Start a process from scratch that starts others by the source `text`."""
    command = (sys.executable, "-c", f"{DIRECTOR}\n{text}\npause()")
    return Running(directory, str(directory), command=command)


def number(pipe: TextIO) -> int:
    """Return the id of the next process that reports itself."""
    return int(pipe.readline().removeprefix("here "))


def test_children_of_a_killed_process_end(tmp_path: Path, pipes: list[Path]) -> None:
    director = direct(
        tmp_path,
        "start(pipes[0])\n"
        "start(pipes[0], HERE + ASKED + WAITS, SIGQUIT)\n"
        "Running(directory / 'forked', HERE + WAITS, pipes[0], command=run_source)",
    )
    with pipes[0].open() as pipe:
        assert len({number(pipe) for _ in range(3)}) == 3
        director.terminate(signal.SIGKILL)
        assert pipe.read() == "asked\n"


def test_a_released_process_goes_on(tmp_path: Path, pipes: list[Path]) -> None:
    director = direct(tmp_path, "free = start(pipes[0])\nrelease(free.pid)\nstart(pipes[1])")
    with pipes[0].open() as pipe, pipes[1].open() as held:
        free = number(pipe)
        number(held)
        director.terminate(signal.SIGKILL)
        assert held.read() == ""
        os.kill(free, signal.SIGTERM)  # it still runs
        assert pipe.read() == ""
