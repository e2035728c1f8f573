"""The operating system's processes of a run: started, killed, started again, and ended
whatever happens.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from txmq.crashpoints import VARIABLE
from txmq.errors import TxmqError
from txmq.testing.leash import leash, leashed
from txmq.testing.wait import wait_until

ROOT: Final = Path(__file__).parents[2]
START_LIMIT_S: Final = 60.0
STOP_LIMIT_S: Final = 30.0
LOG_TAIL: Final = 2_000


class ProcessEnded(TxmqError):
    """A process ended that should not have."""


@dataclass(slots=True)
class Process:
    """One process and, after a death, its successors: `deaths` names the crash point of
    each life but the last.
    """

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str]
    deaths: Sequence[str] = ()
    killed: int = 0
    stopping: bool = False
    _running: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def pid(self) -> int:
        """Of the present one; 0 if there is none."""
        return self._running.pid if self._running else 0

    def start(self) -> None:
        """Starts the next life; what the one before said goes into the log."""
        environment = dict(self.environment)
        if self.killed < len(self.deaths):
            environment[VARIABLE] = self.deaths[self.killed]
        with self._out.open("a+b") as out, self.log.open("ab") as errors:
            out.seek(0)
            shutil.copyfileobj(out, errors)
            errors.flush()
            out.truncate(0)
            self._running = subprocess.Popen(
                leashed([sys.executable, *self.command]),
                stdin=leash(),
                stdout=out,
                stderr=errors,
                env=environment,
                start_new_session=True,  # an interrupt at the terminal is ours to pass on
            )

    def kill(self) -> None:
        """SIGKILL."""
        assert self._running is not None, "it was started"
        self._running.kill()
        self._running.wait()
        self.killed += 1

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for what does not end then."""
        self.stopping = True
        if self._running is None or self._running.poll() is not None:
            return
        self._running.terminate()
        try:
            self._running.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._running.kill()
            self._running.wait()

    def ended(self) -> int | None:
        """Its exit status, None while it runs."""
        return self._running.poll() if self._running else None

    def died_as_planned(self) -> str:
        """The crash point at which the present life ended, "" if it did not end at
        one.
        """
        planned = self.ended() == -signal.SIGKILL and self.killed < len(self.deaths)
        return self.deaths[self.killed] if planned else ""

    def output(self) -> str:
        """What it has said on standard output."""
        return self._out.read_text("utf-8")

    @property
    def _out(self) -> Path:
        return self.log.with_suffix(".out")

    def first_line(self) -> str:
        """What it says on standard output, once there is a whole line of it."""

        def line() -> str:
            if self.ended() is not None:
                raise self.failure()
            first, newline, _rest = self.output().partition("\n")
            return first if newline else ""

        wait_until(line, START_LIMIT_S, what=f"{self.name} is ready")
        return line()

    def failure(self) -> ProcessEnded:
        """Why it should not have ended, as far as its log tells."""
        tail = self.log.read_text("utf-8", "replace")[-LOG_TAIL:]
        return ProcessEnded(
            f"{self.name} ended with status {self.ended()}:\n{tail}", hint=f"its log is {self.log}"
        )


@dataclass(slots=True)
class Fleet:
    """All processes of a run. `environment` is what they find in theirs beside our
    own.
    """

    logs: Path
    environment: dict[str, str] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)

    def start(self, name: str, command: Sequence[str], deaths: Sequence[str] = ()) -> Process:
        """Starts a process under a new name."""
        known = {name: value for name, value in os.environ.items() if name != VARIABLE}
        path = os.pathsep.join(filter(None, (str(ROOT), known.get("PYTHONPATH"))))
        environment = known | {"PYTHONPATH": path} | self.environment
        process = self.processes[name] = Process(
            name, command, self.logs / f"{name}.log", environment, deaths
        )
        process.start()
        return process

    def tend(self) -> Iterator[tuple[str, str]]:
        """Starts again what died at a crash point; yields its name and the point.
        Raises ProcessEnded for all else.
        """
        for process in self.processes.values():
            status = process.ended()
            if status is None or process.stopping:
                continue
            if point := process.died_as_planned():
                process.killed += 1
                process.start()
                yield process.name, point
            elif status != 0:
                raise process.failure()

    def named(self, prefix: str) -> list[Process]:
        return [process for name, process in self.processes.items() if name.startswith(prefix)]

    def stop(self, *prefixes: str) -> None:
        """Ends those processes, the last started first."""
        chosen = [process for prefix in prefixes for process in self.named(prefix)]
        for process in reversed(chosen):
            process.stop()

    def killed(self) -> Mapping[str, int]:
        """How often each was killed."""
        return {name: process.killed for name, process in self.processes.items() if process.killed}
