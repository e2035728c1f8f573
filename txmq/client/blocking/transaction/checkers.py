"""Check-backs in threads: one with a connection of its own waits for questions, another
one runs the checkers.

`txmq.client.protocol.awaited.checkers` has the steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from threading import Event, Thread
from time import monotonic
from typing import Any

from txmq.client.blocking.at_once import CoreAtOnce
from txmq.client.blocking.connections.connection import Connection
from txmq.client.blocking.core import BlockingCore
from txmq.client.log import get_logger
from txmq.client.protocol.awaited.checkers import CheckerSteps
from txmq.client.protocol.transaction.checks import (
    ANSWER_S,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    SLOW_S,
    Half,
)
from txmq.errors import ClientClosed, TxmqError
from txmq.faces import run
from txmq.model.message import Decision

log = get_logger()

Checker = Callable[[Half], Decision]


class Checkers(CheckerSteps[Checker]):
    """The checkers registered in this process, and their thread."""

    def __init__(self, core: BlockingCore) -> None:
        super().__init__(CoreAtOnce(core))
        self._core = core
        self._thread: Thread | None = None
        self._working = Thread()  # runs the checkers
        self._pid = os.getpid()
        self._stopped = Event()
        self._connection: Connection | None = None

    def start(self) -> None:
        """Answer questions about the half messages of this process from now on."""
        if self._thread is not None and self._pid == os.getpid():
            return
        with self._lock:
            if self._thread is None or self._pid != os.getpid():
                self._pid = os.getpid()
                self._thread = Thread(target=self._run, name="txmq-checkers", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop waiting for questions, and finish the answer that is being given."""
        self._stopping = True
        self._stopped.set()
        with self._lock:
            thread, connection = self._thread, self._connection
        if thread is not None and self._pid == os.getpid():
            if connection is not None:
                connection.abort()
            thread.join(ANSWER_S)
            if self._working.ident is not None:
                self._working.join(ANSWER_S)

    def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while not self._stopped.is_set():
            try:
                connection = self._connect()
                try:
                    while not self._stopped.is_set():
                        run(self._poll())
                        pause = FIRST_PAUSE_S
                finally:
                    connection.close()
            except ClientClosed:
                if self._core.closed:
                    return
            except TxmqError as error:
                log.warning("checkers.disconnected", error=error.message)
                self._stopped.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)

    def _connect(self) -> Connection:
        connection = self._core.open_connection(monotonic() + self._core.settings.timeout)
        with self._lock:
            self._connection = connection
        return connection

    @property
    def _busy(self) -> bool:
        return self._working.is_alive()

    async def _wait(self, args: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert self._connection is not None, "_connect sets it"
        return self._connection.call("checks.wait", args, timeout=seconds)

    def _end_wait(self) -> None:
        if self._connection is not None:
            self._connection.abort()

    async def _begin_checkers(self, halves: Sequence[Half]) -> None:
        self._working = Thread(
            target=lambda: run(self._run_checkers(halves)), name="txmq-checker", daemon=True
        )
        self._working.start()
        self._working.join(SLOW_S)
