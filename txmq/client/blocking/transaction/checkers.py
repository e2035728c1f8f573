"""Check-backs: the broker asks whether an undecided transaction's local work was done.

The broker may ask any process of the service that has registered the checker. One
thread with a connection of its own waits for questions. An answer is COMMIT, ROLLBACK
or UNKNOWN. Exceptions and other values of a checker become UNKNOWN with a reason, which
operators can see, and the broker asks again later.
"""

from __future__ import annotations

import os
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any, NamedTuple
from uuid import UUID

from txmq.batch import BatchView
from txmq.client.blocking.connections.connection import Connection
from txmq.client.blocking.core import BlockingCore
from txmq.client.log import get_logger
from txmq.client.protocol.transaction.half_message import no_service
from txmq.client.protocol.transaction.open_work import REASON, is_open
from txmq.crashpoints import crashpoint
from txmq.errors import (
    ClientClosed,
    LocalProtocolError,
    RemoteProtocolError,
    RequestRejected,
    TxmqError,
)
from txmq.model.message import UNKNOWN, Decision, check_name

WAIT_MS = 20_000  # of a long poll
MAX_QUESTIONS = 16  # of one poll; they are answered one after the other
ANSWER_S = 5.0
REASON_LIMIT = 400  # characters
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # after an error
log = get_logger()


class CheckedMessage(NamedTuple):
    """A message of an undecided transaction, as a checker sees it."""

    topic: str
    message_id: str
    key: str | None
    tag: str | None
    headers: Mapping[str, str]
    body: bytes


class CheckAnswer(NamedTuple):
    """An answer to the broker; an UNKNOWN has a `reason`."""

    decision: Decision
    reason: str = ""
    open: bool = False  # the block of the local work is open in this process


class Half(NamedTuple):
    """The question to a checker, if the local work of a transaction has been done.

    `token` is that of `client.transaction(checker=...)`, `service` the one that stored
    it. `tries` counts the earlier questions. `stored_at` is in microseconds since the
    epoch, by the broker's clock.
    """

    token: UUID
    checker: str
    service: str
    tries: int
    stored_at: int
    messages: tuple[CheckedMessage, ...]


Checker = Callable[[Half], Decision]


class Checkers:
    """The checkers registered in this process, and their thread."""

    def __init__(self, core: BlockingCore) -> None:
        self._core = core
        self._lock = Lock()
        self._functions: dict[str, Checker] = {}
        self._thread: Thread | None = None
        self._pid = os.getpid()
        self._stopped = Event()
        self._connection: Connection | None = None
        self._polling = False  # the thread only waits for questions

    def register(self, name: str, function: Checker) -> None:
        """Answer questions of that checker from now on.

        Raises ConfigError if the client has no service, or LocalProtocolError.
        """
        if not self._core.settings.service:
            raise no_service()
        if not callable(function):
            raise LocalProtocolError(
                f"Checker {name!r} is of type {type(function).__name__}",
                hint="give a function that takes a Half and returns a Decision",
            )
        with self._lock:
            new = name not in self._functions
            self._functions[check_name(name, "checker")] = function
            if new and self._polling and self._connection is not None:
                self._connection.abort()  # the running poll names the other checkers only
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
        with self._lock:
            checkers, self._polling = sorted(self._functions), True
        try:
            args = {
                "service": self._core.settings.service,
                "checkers": checkers,
                "max": MAX_QUESTIONS,
                "wait_ms": WAIT_MS,
            }
            reply = connection.call("checks.wait", args, timeout=WAIT_MS / 1_000 + ANSWER_S)
        finally:
            with self._lock:
                self._polling = False
        # Those that are answered at once do not wait for a checker.
        for half in sorted(_halves(reply), key=lambda half: not is_open(half.token)):
            answer = self._run_checker(half)
            if answer is not None:
                entry = {
                    "token": half.token.hex,
                    "answer": answer.decision.name,
                    "reason": answer.reason,
                    **({"open": True} if answer.open else {}),
                }
                crashpoint("checker.before_answer")
                try:
                    connection.call("checks.answer", entry, timeout=ANSWER_S)
                    crashpoint("checker.after_answer")
                except RequestRejected as refused:
                    # The transaction was decided meanwhile; the broker records a
                    # conflict.
                    log.warning(
                        "checkers.answer_refused", token=str(half.token), error=refused.message
                    )

    def _run_checker(self, half: Half) -> CheckAnswer | None:
        """Return the checker's answer; None = another process has registered it."""
        if is_open(half.token):
            return CheckAnswer(UNKNOWN, REASON, open=True)
        function = self._functions.get(half.checker)
        if function is None:
            return None
        try:
            decision = function(half)
        except Exception as error:  # noqa: BLE001  # the user's code may raise anything
            log.warning(
                "checkers.failed",
                checker=half.checker,
                token=str(half.token),
                error=type(error).__name__,
            )
            return _unknown(f"checker {half.checker} raised {type(error).__name__}: {error}")
        if not isinstance(decision, Decision):
            given = type(decision).__name__
            log.warning(
                "checkers.no_answer", checker=half.checker, token=str(half.token), answer=given
            )
            return _unknown(
                f"checker {half.checker} returned a value of type {given}, not a Decision"
            )
        return (
            _unknown(f"checker {half.checker} returned UNKNOWN")
            if decision is UNKNOWN
            else CheckAnswer(decision)
        )


def _unknown(reason: str) -> CheckAnswer:
    return CheckAnswer(UNKNOWN, reason.encode(errors="replace").decode()[:REASON_LIMIT])


def _halves(reply: dict[str, Any]) -> Iterator[Half]:
    try:
        for check in reply["checks"]:
            messages = tuple(message for batch in check["batches"] for message in _messages(batch))
            token, numbers = UUID(check["token"]), (int(check["tries"]), int(check["stored_at"]))
            yield Half(token, str(check["checker"]), str(check["service"]), *numbers, messages)
    except (KeyError, TypeError, ValueError) as error:
        raise RemoteProtocolError(f"The broker sent an invalid question: {error!r:.200}") from error


def _messages(batch: dict[str, Any]) -> Iterator[CheckedMessage]:
    view = BatchView(b64decode(batch["batch"]))
    columns = (view.message_ids, view.keys, view.tags, view.headers, view.bodies)
    for fields in zip(*columns, strict=True):
        yield CheckedMessage(str(batch["topic"]), *fields)
