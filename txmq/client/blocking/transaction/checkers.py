"""Check-backs: the broker asks whether an undecided transaction's local work was done.

The broker asks the process first that has stored the half message, whether or not it
has registered the checker: while the block is open there, the answer is UNKNOWN. Else
it asks any process of the service with the checker. One thread with a connection of its
own waits for questions; checkers run in another one, so that a slow one does not keep
the broker from learning what is open. An answer is COMMIT, ROLLBACK or UNKNOWN.
Exceptions and other values of a checker become UNKNOWN with a reason, which operators
can see, and the broker asks again later.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from threading import Event, Lock, Thread
from time import monotonic

from txmq.client.blocking.connections.connection import Connection
from txmq.client.blocking.core import BlockingCore
from txmq.client.log import get_logger
from txmq.client.protocol.transaction.checks import (
    ANSWER_S,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    SLOW_S,
    WAIT_MS,
    CheckAnswer,
    Half,
    answer_args,
    answer_of,
    answer_of_failed,
    checked_name,
    halves_in,
    wait_args,
)
from txmq.client.protocol.transaction.open_work import REASON, is_open
from txmq.crashpoints import crashpoint
from txmq.errors import (
    ClientClosed,
    RequestRejected,
    TxmqError,
)
from txmq.model.message import UNKNOWN, Decision

log = get_logger()

Checker = Callable[[Half], Decision]


class Checkers:
    """The checkers registered in this process, and their thread."""

    def __init__(self, core: BlockingCore) -> None:
        self._core = core
        self._lock = Lock()
        self._functions: dict[str, Checker] = {}
        self._thread: Thread | None = None
        self._working = Thread()  # runs the checkers
        self._pid = os.getpid()
        self._stopped = Event()
        self._connection: Connection | None = None
        self._polling = False  # the thread only waits for questions

    def register(self, name: str, function: Checker) -> None:
        """Answer questions of that checker from now on.

        Raises ConfigError if the client has no service, or LocalProtocolError.
        """
        name = checked_name(self._core.settings.service, name, function)
        with self._lock:
            new = name not in self._functions
            self._functions[name] = function
            if new and self._polling and self._connection is not None:
                self._connection.abort()  # the running poll names the other checkers only
        self.start()

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
                        self._poll(connection)
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

    def _poll(self, connection: Connection) -> None:
        busy = self._working.is_alive()
        with self._lock:
            checkers = [] if busy else sorted(self._functions)
            self._polling = not busy
        wait_ms = int(SLOW_S * 1_000) if busy else WAIT_MS
        args = wait_args(self._core.settings.service, checkers, wait_ms)
        try:
            reply = connection.call("checks.wait", args, timeout=wait_ms / 1_000 + ANSWER_S)
        finally:
            with self._lock:
                self._polling = False
        for_checkers: list[Half] = []
        for half in halves_in(reply):
            if is_open(half.token):
                self._answer(half, CheckAnswer(UNKNOWN, REASON, open=True))
            elif half.checker in checkers:
                for_checkers.append(half)
            else:
                self._answer(half, CheckAnswer(UNKNOWN, passed=True))
        if for_checkers:
            self._working = Thread(
                target=self._run_checkers, args=(for_checkers,), name="txmq-checker", daemon=True
            )
            self._working.start()
            self._working.join(SLOW_S)

    def _run_checkers(self, halves: Sequence[Half]) -> None:
        for half in halves:
            if not self._stopped.is_set():
                self._answer(half, self._run_checker(half))

    def _answer(self, half: Half, answer: CheckAnswer) -> None:
        crashpoint("checker.before_answer")
        try:
            self._core.call("checks.answer", answer_args(half, answer), timeout=ANSWER_S)
            crashpoint("checker.after_answer")
        except RequestRejected as refused:
            # The transaction was decided meanwhile; the broker records a conflict.
            log.warning("checkers.answer_refused", token=str(half.token), error=refused.message)
        except TxmqError as error:  # the broker asks again
            log.warning("checkers.not_answered", token=str(half.token), error=error.message)

    def _run_checker(self, half: Half) -> CheckAnswer:
        try:
            decision = self._functions[half.checker](half)
        except Exception as error:  # noqa: BLE001  # the user's code may raise anything
            return answer_of_failed(half, error)
        return answer_of(half, decision)
