"""What a process has started ends with it, even if it is killed, and nothing else
does.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TextIO

import pytest

from txmq.testing.processes import Running

# Whoever reads a pipe comes to its end when all that have it open for writing are gone.
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
from txmq.testing.forked import script
from txmq.testing.leash import leash, leashed, let_go
from txmq.testing.processes import Running
HERE, WAITS, ASKED = {HERE!r}, {WAITS!r}, {ASKED!r}

def start(path, text=HERE + WAITS, number=SIGKILL):
    command = leashed([sys.executable, "-c", text, path], number)
    return subprocess.Popen(command, stdin=leash(), start_new_session=True)

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
    """A process of its own, from nothing, that starts others as `text` says."""
    command = (sys.executable, "-c", f"{DIRECTOR}\n{text}\npause()")
    return Running(directory, str(directory), command=command)


def number(pipe: TextIO) -> int:
    """Of the process that says next that it is here."""
    return int(pipe.readline().removeprefix("here "))


def test_what_a_killed_process_has_started_ends(tmp_path: Path, pipes: list[Path]) -> None:
    director = direct(
        tmp_path,
        "start(pipes[0])\n"
        "start(pipes[0], HERE + ASKED + WAITS, SIGQUIT)\n"
        "Running(directory / 'forked', HERE + WAITS, pipes[0], command=script)",
    )
    with pipes[0].open() as pipe:
        assert len({number(pipe) for _ in range(3)}) == 3
        director.end(signal.SIGKILL)
        assert pipe.read() == "asked\n"


def test_what_it_let_go_goes_on(tmp_path: Path, pipes: list[Path]) -> None:
    director = direct(tmp_path, "free = start(pipes[0])\nlet_go(free.pid)\nstart(pipes[1])")
    with pipes[0].open() as pipe, pipes[1].open() as held:
        free = number(pipe)
        number(held)
        director.end(signal.SIGKILL)
        assert held.read() == ""
        os.kill(free, signal.SIGTERM)  # it is there
        assert pipe.read() == ""
