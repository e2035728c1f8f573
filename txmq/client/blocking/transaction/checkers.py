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
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from txmq.wire.batched import OWN_CHECKS

WAIT_MS = 20_000  # of a long poll
MAX_QUESTIONS = 16  # of one poll; they are answered one after the other
ANSWER_S = 5.0
REASON_LIMIT = 400  # characters
SLOW_S = 0.5  # of a checker's work, before the thread waits for questions again
# After an error. The broker does not wait long for a process with an open block.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
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
    passed: bool = False  # it is over here, and other processes have the checker


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
        self._working = Thread()  # runs the checkers
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
        own, busy = self._core.has_feature(OWN_CHECKS), self._working.is_alive()
        with self._lock:
            checkers = [] if busy else sorted(self._functions)
            self._polling = not busy
        if not (own or checkers):  # to an older broker no checkers mean all
            self._stopped.wait(SLOW_S)
            return
        wait_ms = int(SLOW_S * 1_000) if busy else WAIT_MS
        args = {
            "service": self._core.settings.service,
            "checkers": checkers,
            "max": MAX_QUESTIONS,
            "wait_ms": wait_ms,
            **({"own": True} if own else {}),
        }
        try:
            reply = connection.call("checks.wait", args, timeout=wait_ms / 1_000 + ANSWER_S)
        finally:
            with self._lock:
                self._polling = False
        for_checkers: list[Half] = []
        for half in _halves(reply):
            if is_open(half.token):
                self._answer(half, CheckAnswer(UNKNOWN, REASON, open=True))
            elif half.checker in checkers:
                for_checkers.append(half)
            elif own:
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
        flags = {"open": answer.open, "passed": answer.passed}
        entry = {
            "token": half.token.hex,
            "answer": answer.decision.name,
            "reason": answer.reason,
            **{name: True for name, is_set in flags.items() if is_set},
        }
        crashpoint("checker.before_answer")
        try:
            self._core.call("checks.answer", entry, timeout=ANSWER_S)
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
