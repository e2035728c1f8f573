"""Processes forked from a server that has imported their modules.

Starting Python takes longer than most tests. A forked process still has its own files,
connections and end. Tests of the command line also start commands from scratch.
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
    "txmq.cli.xa_thread",
    "txmq.broker.process",
    "txmq.broker.reactor.epoll_reactor",
    "txmq.admin.edge",
]
CLIENTS: Final = [
    "psycopg2",
    "txmq.client",
    "txmq.client.blocking.transaction.xa",
    "txmq.client.blocking.transaction.postgres",
    "txmq.client.blocking.consumer.consumer",
]
IMPORTED: Final = [*BROKERS, *CLIENTS, "txmq.cli.preloaded"]
_fork_server: Final = get_context("forkserver")
_fork_server.set_forkserver_preload(IMPORTED)
# multiprocessing reads an exit status once, and polls all processes at each start.
_lock: Final = Lock()


class Forked:
    """A process that runs `main(*arguments)`, with the interface of Popen.

    Its output is appended to files.
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
        # A daemon ends when this process exits; `_die_with_parent` ends it when this
        # process is killed.
        child = (main, tuple(arguments), str(out), str(err), dict(environment))
        self._process = _fork_server.Process(target=_run_child, args=child, daemon=True)
        with _lock:
            self._process.start()
        assert self._process.pid is not None
        self.pid: Final = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, as `poll` returns it."""
        return self.poll()

    def poll(self) -> int | None:
        """Return the exit status, None while the process runs.

        A signal that ended it is a negative number.
        """
        with _lock:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status when the process has ended.

        Raises subprocess.TimeoutExpired after `timeout` seconds.
        """
        connection.wait([self._process.sentinel], timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(repr(self._process), timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to the process."""
        self.send_signal(signal.SIGKILL)


def txmq_command(*arguments: str) -> None:
    """Run the `txmq` command."""
    sys.argv[1:] = arguments
    run_module("txmq", run_name="__main__", alter_sys=True)


def run_source(text: str, *arguments: str) -> None:
    """Run the source of a program, as `python -c` does."""
    sys.argv[:] = ["-c", *arguments]
    exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})


def _run_child(
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
    # A shell ignores SIGINT for what it runs in the background; children inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    Thread(target=_die_with_parent, daemon=True).start()
    main(*arguments)


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "multiprocessing has forked this process"
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
