"""Forked processes: their arguments, output, environment and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from txmq.testing.forked import Forked, run_source, txmq_command
from txmq.testing.wait import PATIENCE_S, wait_until


def echo(*words: str) -> None:
    """Print the arguments; the exit status is their number."""
    sys.stdout.write(f"{' '.join((*words, str(os.getpid())))}\n")
    sys.stderr.write(f"{sorted(os.environ)}\n")
    sys.exit(len(words))


def hang() -> None:
    """Wait for a signal."""
    sys.stdout.write("hangs\n")
    sys.stdout.flush()
    signal.pause()


def start(directory: Path, main: object, *arguments: str) -> Forked:
    out, err = directory / "out", directory / "err"
    assert callable(main)
    return Forked(main, arguments, out=out, err=err, environment={"NAME": "value"})


def test_arguments_environment_output_and_status_are_its_own(tmp_path: Path) -> None:
    first, second = start(tmp_path, echo, "to", "you"), start(tmp_path, echo)
    assert (first.wait(PATIENCE_S), second.wait(PATIENCE_S)) == (2, 0)
    assert first.pid != second.pid != os.getpid()
    assert sorted((tmp_path / "out").read_text().splitlines()) == sorted(
        (f"to you {first.pid}", str(second.pid))
    )
    assert (tmp_path / "err").read_text() == "['NAME']\n" * 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_runs_until_a_signal_ends_it(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, hang)
    wait_until(lambda: (tmp_path / "out").exists() and (tmp_path / "out").read_text() == "hangs\n")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert process.poll() is process.returncode is None
    process.send_signal(number)
    assert process.wait(PATIENCE_S) == process.poll() == process.returncode == -number
    process.kill()  # kills no other process with that id


def test_a_command_is_run_as_from_a_shell(tmp_path: Path) -> None:
    assert start(tmp_path, txmq_command, "topic", "create").wait(PATIENCE_S) == 2
    assert "Usage: txmq topic create" in (tmp_path / "err").read_text()


def test_a_source_is_run_as_from_a_shell(tmp_path: Path) -> None:
    text = "import sys; print(__name__, sys.argv); sys.exit(3)"
    assert start(tmp_path, run_source, text, "a", "b").wait(PATIENCE_S) == 3
    assert (tmp_path / "out").read_text() == "__main__ ['-c', 'a', 'b']\n"
