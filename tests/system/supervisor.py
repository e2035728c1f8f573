"""A supervisor process that forks workers, and replaces each one that is killed.

Workers are forked, because a start of Python with all imports takes longer than the
work between two deaths. Each worker still has connections of its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Self

from txmq.crashpoints import VARIABLE
from txmq.testing.processes import whole_lines

MOST_PASSES = 3  # of a crash point; a worker dies at one of them


class WorkerSpec(NamedTuple):
    """A worker that is replaced whenever it dies, at `point` or by a kill.

    `point` is a crash point, or one with a count and an end (`txmq.crashpoints`). After
    so many `deaths` the worker is not replaced any more; 0 means no limit. `arguments`
    are for the program.
    """

    name: str
    point: str = ""
    deaths: int = 0
    arguments: tuple[str, ...] = ()


class SupervisorConfig(NamedTuple):
    """The program of all workers, and its surroundings.

    `program` is a module of this package, whose `run_worker` gets the configuration,
    the worker, and a function that tells it to keep running. Workers write journals
    into `directory`. Its file `deaths` gets a line for each kill; a file `stop` ends
    all workers.
    """

    program: str
    url: str
    dsn: str
    topic: str
    directory: str
    workers: tuple[WorkerSpec, ...]

    @property
    def stop(self) -> Path:
        return Path(self.directory) / "stop"

    @property
    def deaths(self) -> Path:
        return Path(self.directory) / "deaths"

    def dead_pids(self) -> Mapping[str, list[int]]:
        """Return the pids of the dead so far, by worker name."""
        found: dict[str, list[int]] = {worker.name: [] for worker in self.workers}
        for line in whole_lines(self.deaths):
            worker, pid = line.split()
            found[worker].append(int(pid))
        return found

    def encode(self) -> str:
        """Return the argument of `run_supervisor`."""
        return json.dumps(self._asdict())

    @classmethod
    def parse(cls, text: str) -> Self:
        fields = json.loads(text)
        workers = (
            WorkerSpec(name, point, deaths, tuple(rest))
            for name, point, deaths, rest in fields.pop("workers")
        )
        return cls(**fields, workers=tuple(workers))


Program = Callable[[SupervisorConfig, WorkerSpec, Callable[[], bool]], None]


class Supervisor:
    """The parent process of all workers."""

    def __init__(self, config: SupervisorConfig, program: Program) -> None:
        self._config, self._program = config, program
        self._deaths = dict.fromkeys(config.workers, 0)
        self._workers: dict[int, WorkerSpec] = {}

    def run(self) -> None:
        """Run until all workers have ended. Exits with an error if a worker fails by
        itself.
        """
        for worker in self._config.workers:
            self._start(worker)
        try:
            while self._workers:
                self._reap(*os.wait())
        finally:
            for pid in self._workers:
                os.kill(pid, signal.SIGKILL)

    def _start(self, worker: WorkerSpec) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            self._workers[pid] = worker
            return
        status = 1
        try:
            if worker.point:
                exact = ":" in worker.point
                os.environ[VARIABLE] = (
                    worker.point if exact else f"{worker.point}:{Random().randint(1, MOST_PASSES)}"
                )
            self._program(
                self._config,
                worker,
                lambda: os.getppid() == parent and not self._config.stop.exists(),
            )
            status = 0
        except BaseException:  # noqa: BLE001  # the child must not unwind the stack of its parent
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _reap(self, pid: int, status: int) -> None:
        worker = self._workers.pop(pid)
        if os.WIFEXITED(status):
            if os.WEXITSTATUS(status):
                sys.exit(f"a worker of {worker.name} failed")
            return
        assert os.WTERMSIG(status) == signal.SIGKILL, (
            f"a worker of {worker.name} ended with {status}"
        )
        with self._config.deaths.open("a") as file:
            file.write(f"{worker.name} {pid}\n")
        self._deaths[worker] += 1
        if self._deaths[worker] != worker.deaths and not self._config.stop.exists():
            self._start(worker)


def run_supervisor(text: str) -> None:
    """Run the supervisor of an encoded configuration."""
    config = SupervisorConfig.parse(text)
    module: Any = import_module(f"tests.system.{config.program}")
    Supervisor(config, module.run_worker).run()
