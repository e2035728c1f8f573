"""Processes that tests start, watch, kill and end: `txmq` commands above all."""

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
from txmq.testing.forked import Forked, script, txmq_command
from txmq.testing.leash import leash, leashed
from txmq.testing.wait import wait_until

Command: TypeAlias = (
    Sequence[str] | Callable[..., object]
)  # a program, or a function to be called in a forked process
START_S: Final = 60.0  # a PostgreSQL server on a loaded machine included
SCRIPT_S: Final = 200.0
TXMQ: Final = (sys.executable, "-m", "txmq")
LOG_TAIL: Final = 4_000  # characters
# Settings of the tests' own, such as a crash point or the server to test with, are not
# meant for what they start.
ENVIRONMENT: Final = {
    name: value for name, value in os.environ.items() if not name.startswith("TXMQ_")
}


class ProcessEnded(TxmqError):
    """A process ended that should not have."""


class Running:
    """A process, by default a `txmq` command, forked; from nothing with TXMQ for its
    command. It ends with this one.

    What it prints goes to the files `out` and `err` in `directory`.
    `err` also keeps what earlier processes in the same directory have logged.
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
                    leashed([*command, *arguments]),
                    stdin=leash(),
                    stdout=out,
                    stderr=err,
                    env=environment,
                    start_new_session=True,
                )

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None

    def first_line(self) -> str:
        """The line that says that it serves. Raises ProcessEnded with the end of its
        log.
        """
        wait_until(
            lambda: not self.alive or "\n" in self.out.read_text(), START_S, what="a first line"
        )
        if not self.alive:
            raise self.ended()
        return self.out.read_text().splitlines()[0]

    def events(self) -> list[dict[str, Any]]:
        """What it has logged, where that is JSON."""
        return [json.loads(line) for line in self.err.read_text().splitlines()]

    def status(self, limit_s: float = START_S) -> int:
        """Its exit status, once it has ended by itself."""
        return self.process.wait(limit_s)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ends it with a signal; returns its exit status. Raises ProcessEnded where it
        had ended before.
        """
        if not self.alive:
            raise self.ended()
        self.process.send_signal(number)
        return self.process.wait(START_S)

    def ended(self) -> ProcessEnded:
        """The error that tells of its end, with the last of what it logged."""
        tail = self.err.read_text("utf-8", "replace")[-LOG_TAIL:]
        return ProcessEnded(
            f"ended with status {self.process.returncode}:\n{tail}", hint=f"its log is {self.err}"
        )


@contextmanager
def running(directory: Path, *arguments: str, command: Command = txmq_command) -> Iterator[Running]:
    """A process for the block; it is killed if the block has not ended it."""
    process = Running(directory, *arguments, command=command)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.wait()


def run_script(text: str, *arguments: str) -> str:
    """What a program prints, given its source, until it ends. Raises ProcessEnded with
    its log where it fails.
    """
    with (
        TemporaryDirectory(prefix="txmq-script-") as name,
        running(Path(name), text, *arguments, command=script) as process,
    ):
        if process.status(SCRIPT_S):
            raise process.ended()
        return process.out.read_text()
