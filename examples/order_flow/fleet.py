"""The processes of a run: started, killed, started again, and always ended."""

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
from txmq.testing.processes import ProcessEnded
from txmq.testing.reaper import reaped, reaper_pipe
from txmq.testing.wait import wait_until

ROOT: Final = Path(__file__).parents[2]
START_LIMIT_S: Final = 300.0  # Spark on a busy machine
STOP_LIMIT_S: Final = 30.0
LOG_TAIL: Final = 2_000


@dataclass(slots=True)
class Process:
    """A process that is started again after a crash.

    `crash_points` has the crash point of each start except the last.
    """

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str]
    crash_points: Sequence[str] = ()
    killed: int = 0
    stopping: bool = False
    _running: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def pid(self) -> int:
        """The id of the present process, 0 without one."""
        return self._running.pid if self._running else 0

    def start(self) -> None:
        """Start the process; the output of the one before is added to the log."""
        environment = dict(self.environment)
        if self.killed < len(self.crash_points):
            environment[VARIABLE] = self.crash_points[self.killed]
        with self._out.open("a+b") as out, self.log.open("ab") as errors:
            out.seek(0)
            shutil.copyfileobj(out, errors)
            errors.flush()
            out.truncate(0)
            self._running = subprocess.Popen(
                reaped([sys.executable, *self.command]),
                stdin=reaper_pipe(),
                stdout=out,
                stderr=errors,
                env=environment,
                start_new_session=True,  # this process passes interrupts on
            )

    def kill(self) -> None:
        """Send SIGKILL to the process."""
        assert self._running is not None, "the process was started"
        self._running.kill()
        self._running.wait()
        self.killed += 1

    def stop(self) -> None:
        """Send SIGTERM, then SIGKILL after a time limit."""
        self.stopping = True
        if self._running is None or self._running.poll() is not None:
            return
        self._running.terminate()
        try:
            self._running.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._running.kill()
            self._running.wait()

    def exit_status(self) -> int | None:
        """Return the exit status, None while the process runs."""
        return self._running.poll() if self._running else None

    def planned_crash(self) -> str:
        """Return the crash point that ended the process; "" without one."""
        planned = self.exit_status() == -signal.SIGKILL and self.killed < len(self.crash_points)
        return self.crash_points[self.killed] if planned else ""

    def output(self) -> str:
        """Return the standard output."""
        return self._out.read_text("utf-8")

    @property
    def _out(self) -> Path:
        return self.log.with_suffix(".out")

    def first_line(self) -> str:
        """Wait for the first line on standard output and return it."""

        def line() -> str:
            if self.exit_status() is not None:
                raise self.failure()
            first, newline, _rest = self.output().partition("\n")
            return first if newline else ""

        wait_until(line, START_LIMIT_S, what=f"{self.name} is ready")
        return line()

    def failure(self) -> ProcessEnded:
        """Return the error for an unexpected end, with the last part of the log."""
        tail = self.log.read_text("utf-8", "replace")[-LOG_TAIL:]
        return ProcessEnded(
            f"{self.name} ended with status {self.exit_status()}:\n{tail}",
            hint=f"its log is {self.log}",
        )


@dataclass(slots=True)
class Fleet:
    """All processes of a run.

    `environment` has variables for them in addition to those of this process.
    """

    logs: Path
    environment: dict[str, str] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)

    def start(self, name: str, command: Sequence[str], crash_points: Sequence[str] = ()) -> Process:
        """Start a process under a new name."""
        known = {name: value for name, value in os.environ.items() if name != VARIABLE}
        path = os.pathsep.join(filter(None, (str(ROOT), known.get("PYTHONPATH"))))
        environment = known | {"PYTHONPATH": path} | self.environment
        process = self.processes[name] = Process(
            name, command, self.logs / f"{name}.log", environment, crash_points
        )
        process.start()
        return process

    def restart_crashed(self) -> Iterator[tuple[str, str]]:
        """Start processes again that ended at a crash point; yield name and point.

        Raises ProcessEnded for any other failure.
        """
        for process in self.processes.values():
            status = process.exit_status()
            if status is None or process.stopping:
                continue
            if point := process.planned_crash():
                process.killed += 1
                process.start()
                yield process.name, point
            elif status != 0:
                raise process.failure()

    def named(self, prefix: str) -> list[Process]:
        return [process for name, process in self.processes.items() if name.startswith(prefix)]

    def stop(self, *prefixes: str) -> None:
        """Stop the processes with these prefixes, the last started first."""
        chosen = [process for prefix in prefixes for process in self.named(prefix)]
        for process in reversed(chosen):
            process.stop()

    def killed(self) -> Mapping[str, int]:
        """Return the number of kills by process."""
        return {name: process.killed for name, process in self.processes.items() if process.killed}
