"""Services that die: a process (`run_farm`) that forks workers, and a new one in the
place of each that is killed.

Forked, because a start of Python with all imports takes longer than the work between
two deaths; each worker is a process with connections of its own all the same.
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
from typing import Any, NamedTuple

from txmq.crashpoints import VARIABLE

MOST_PASSES = 3  # of a crash point, before the death there


class Lane(NamedTuple):
    """The workers that follow one another in one place. They die at `point`, or when
    somebody kills them.

    `point` is a crash point, or one with how often it is passed, and how it ends
    (`txmq.crashpoints`). `deaths` is how many die before no other follows; 0 = until
    the end. `arguments` are for the work.
    """

    name: str
    point: str = ""
    deaths: int = 0
    arguments: tuple[str, ...] = ()


class Job(NamedTuple):
    """What a farm is for. `work` is a module of this package; its `work` gets job, lane
    and when to go on.

    Workers keep journals in `directory`; `deaths` in it gets a line for each that was
    killed, and `stop` ends the farm.
    """

    work: str
    url: str
    dsn: str
    topic: str
    directory: str
    lanes: tuple[Lane, ...]

    @property
    def stop(self) -> Path:
        return Path(self.directory) / "stop"

    @property
    def deaths(self) -> Path:
        return Path(self.directory) / "deaths"

    def dead(self) -> Mapping[str, list[int]]:
        """The pids of each lane's dead so far."""
        found: dict[str, list[int]] = {lane.name: [] for lane in self.lanes}
        for line in self.deaths.read_text().splitlines() if self.deaths.exists() else ():
            lane, pid = line.split()
            found[lane].append(int(pid))
        return found

    def encode(self) -> str:
        """The argument of `run_farm`."""
        return json.dumps(self._asdict())

    @classmethod
    def parse(cls, text: str) -> Job:
        fields = json.loads(text)
        lanes = (
            Lane(name, point, deaths, tuple(rest))
            for name, point, deaths, rest in fields.pop("lanes")
        )
        return cls(**fields, lanes=tuple(lanes))


Work = Callable[[Job, Lane, Callable[[], bool]], None]


class Farm:
    """The parent of all workers."""

    def __init__(self, job: Job, work: Work) -> None:
        self._job, self._work = job, work
        self._deaths = dict.fromkeys(job.lanes, 0)
        self._workers: dict[int, Lane] = {}

    def run(self) -> None:
        """Returns once all lanes are done. Exits with an error where a worker fails by
        itself.
        """
        for lane in self._job.lanes:
            self._start(lane)
        try:
            while self._workers:
                self._bury(*os.wait())
        finally:
            for pid in self._workers:
                os.kill(pid, signal.SIGKILL)

    def _start(self, lane: Lane) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            self._workers[pid] = lane
            return
        status = 1
        try:
            if lane.point:
                exact = ":" in lane.point
                os.environ[VARIABLE] = (
                    lane.point if exact else f"{lane.point}:{Random().randint(1, MOST_PASSES)}"
                )
            self._work(
                self._job, lane, lambda: os.getppid() == parent and not self._job.stop.exists()
            )
            status = 0
        except BaseException:  # the parent's stack is not this process's to unwind
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _bury(self, pid: int, status: int) -> None:
        lane = self._workers.pop(pid)
        if os.WIFEXITED(status):
            if os.WEXITSTATUS(status):
                sys.exit(f"a worker of {lane.name} failed")
            return
        assert os.WTERMSIG(status) == signal.SIGKILL, f"a worker of {lane.name} ended with {status}"
        with self._job.deaths.open("a") as file:
            file.write(f"{lane.name} {pid}\n")
        self._deaths[lane] += 1
        if self._deaths[lane] != lane.deaths and not self._job.stop.exists():
            self._start(lane)


def run_farm(text: str) -> None:
    """A farm for this job (`Job.encode`)."""
    job = Job.parse(text)
    module: Any = import_module(f"tests.system.{job.work}")
    Farm(job, module.work).run()
