"""`txmq` as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from txmq.testing.wait import wait_until

START_S = 60.0  # a PostgreSQL server on a loaded machine included
COMMAND = (sys.executable, "-m", "txmq")
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("TXMQ_")}


class Running:
    """A process that prints a line once it serves."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.out, self.err = directory / "out", directory / "err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [*COMMAND, *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=ENVIRONMENT
            )

    def first_line(self) -> str:
        """The line that says that it serves."""
        wait_until(
            lambda: self.process.poll() is not None or "\n" in self.out.read_text(), START_S, what="a first line"
        )
        assert self.process.poll() is None, self.err.read_text()
        return self.out.read_text().splitlines()[0]

    def events(self) -> list[dict[str, Any]]:
        """What it has logged."""
        return [json.loads(line) for line in self.err.read_text().splitlines()]

    def status(self) -> int:
        """Its exit status, once it has ended by itself."""
        return self.process.wait(START_S)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ends it with a signal; returns its exit status."""
        self.process.send_signal(number)
        return self.process.wait(START_S)


@contextmanager
def running(directory: Path, *arguments: str) -> Iterator[Running]:
    """A process for the block; it is killed if the block has not ended it."""
    directory.mkdir(parents=True, exist_ok=True)
    process = Running(directory, *arguments)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.wait()
