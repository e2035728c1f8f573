"""Processes of tests: started, watched, ended and killed; mostly `txmq` commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeAlias

from txmq.errors import TxmqError
from txmq.testing.forked import Forked, run_source, txmq_command
from txmq.testing.reaper import reaped, reaper_pipe
from txmq.testing.wait import PATIENCE_S, wait_until

# a program, or a function to be called in a forked process
Command: TypeAlias = Sequence[str] | Callable[..., object]
SCRIPT_S: Final = 200.0
TXMQ: Final = (sys.executable, "-m", "txmq")
LOG_TAIL: Final = 4_000  # characters
# Variables for the tests, such as crash points and the test server, are not passed to
# the processes that they start.
ENVIRONMENT: Final = {
    name: value for name, value in os.environ.items() if not name.startswith("TXMQ_")
}


def whole_lines(path: Path) -> list[str]:
    """Return the lines of a file that a process may be writing, but for a last one that
    is written in part; none if there is no file.
    """
    if not path.exists():
        return []
    return path.read_bytes().rpartition(b"\n")[0].decode().splitlines()


class ProcessEnded(TxmqError):
    """A process has ended unexpectedly."""


class Running:
    """A process that ends with this one; by default a forked `txmq` command.

    With TXMQ as its command it is started from scratch. Its output goes to the files
    `out` and `err` in `directory`. `err` also has the logs of earlier processes in that
    directory.
    """

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        command: Command = txmq_command,
        environment: Mapping[str, str] = ENVIRONMENT,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.out, self.err = directory / "out", directory / "err"
        self.process: subprocess.Popen[bytes] | Forked
        with self.out.open("wb") as out, self.err.open("ab") as err:
            if callable(command):
                self.process = Forked(
                    command, arguments, out=self.out, err=self.err, environment=environment
                )
            else:
                self.process = subprocess.Popen(
                    reaped([*command, *arguments]),
                    stdin=reaper_pipe(),
                    stdout=out,
                    stderr=err,
                    env=environment,
                    start_new_session=True,
                )

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self.process.poll() is None

    def first_line(self) -> str:
        """Return the first line, which a server prints when it is ready.

        Raises ProcessEnded with the end of the log, or TimeoutError when it has killed
        the process.
        """
        try:
            wait_until(lambda: not self.alive or whole_lines(self.out), what="a first line")
        except TimeoutError:
            self.process.kill()
            self.process.wait()
            raise
        if not self.alive:
            raise self.unexpected_end()
        return whole_lines(self.out)[0]

    def events(self) -> list[dict[str, Any]]:
        """Return the log, which must be JSON lines."""
        return [json.loads(line) for line in whole_lines(self.err)]

    def status(self, limit_s: float = PATIENCE_S) -> int:
        """Wait until the process has ended by itself; return its exit status."""
        return self.process.wait(limit_s)

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End the process with a signal; return its exit status.

        Raises ProcessEnded where it had already ended.
        """
        if not self.alive:
            raise self.unexpected_end()
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def unexpected_end(self) -> ProcessEnded:
        """Return the error for an unexpected end, with the last part of the log."""
        tail = self.err.read_text("utf-8", "replace")[-LOG_TAIL:]
        return ProcessEnded(
            f"ended with status {self.process.returncode}:\n{tail}", hint=f"its log is {self.err}"
        )


@contextmanager
def running(directory: Path, *arguments: str, command: Command = txmq_command) -> Iterator[Running]:
    """Yield a process, which is killed at the end of the block."""
    process = Running(directory, *arguments, command=command)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.wait()


def run_script(text: str, *arguments: str) -> str:
    """Run a program, given its source; return its output.

    Raises ProcessEnded with the log where it fails.
    """
    with (
        TemporaryDirectory(prefix="txmq-script-") as name,
        running(Path(name), text, *arguments, command=run_source) as process,
    ):
        if process.status(SCRIPT_S):
            raise process.unexpected_end()
        return process.out.read_text()
