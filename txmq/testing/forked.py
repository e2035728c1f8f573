"""Processes forked from one that has imported what they need: starting Python costs
more than most tests themselves.

Each is a process of its own all the same, with its own files, connections and end. That
a command starts from nothing, too, is left to tests of the command line.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from runpy import run_module
from threading import Lock, Thread
from typing import Final

BROKERS: Final = [
    "txmq.cli.app",
    "txmq.cli.logs",
    "txmq.cli.commands.xa_thread",
    "txmq.broker.service",
    "txmq.admin.edge",
]
CLIENTS: Final = [
    "psycopg2",
    "txmq.client",
    "txmq.client.blocking.transaction.xa",
    "txmq.client.blocking.transaction.postgres",
    "txmq.client.blocking.consumer.consumer",
]
IMPORTED: Final = [*BROKERS, *CLIENTS]
_fork_server: Final = get_context("forkserver")
_fork_server.set_forkserver_preload(IMPORTED)
_lock: Final = (
    Lock()
)  # multiprocessing reads an exit status once, and looks at all processes whenever one is started


class Forked:
    """Runs `main(*arguments)`; what it prints goes to the end of files. Like a Popen in
    what it can do.
    """

    def __init__(
        self,
        main: Callable[..., object],
        arguments: Sequence[str],
        *,
        out: Path,
        err: Path,
        environment: Mapping[str, str],
    ) -> None:
        # A daemon is ended with this process, should it be forgotten; `_follow` is for
        # a process that is killed.
        inside = (main, tuple(arguments), str(out), str(err), dict(environment))
        self._process = _fork_server.Process(target=_inside, args=inside, daemon=True)
        with _lock:
            self._process.start()
        assert self._process.pid is not None
        self.pid: Final = self._process.pid

    @property
    def returncode(self) -> int | None:
        """As `poll`."""
        return self.poll()

    def poll(self) -> int | None:
        """Its exit status, or the signal that ended it as a negative number; None while
        it runs.
        """
        with _lock:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status once it has ended; subprocess.TimeoutExpired if it does not
        within `timeout` seconds.
        """
        connection.wait([self._process.sentinel], timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(repr(self._process), timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Nothing where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def txmq_command(*arguments: str) -> None:
    """The `txmq` command."""
    sys.argv[1:] = arguments
    run_module("txmq", run_name="__main__", alter_sys=True)


def script(text: str, *arguments: str) -> None:
    """The source of a program, as `python -c` runs it."""
    sys.argv[:] = ["-c", *arguments]
    exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})


def _inside(
    main: Callable[..., object],
    arguments: Sequence[str],
    out: str,
    err: str,
    environment: Mapping[str, str],
) -> None:
    for path, descriptor in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    Thread(target=_follow, daemon=True).start()
    main(*arguments)


def _follow() -> None:
    parent = parent_process()
    assert parent is not None, "it is multiprocessing that forked"
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
