"""Check-backs: answering the broker's question what became of a transaction whose
producer did not tell.

Any process of a service that has registered the checker may be asked. One thread with a
connection of its own waits for questions; nothing but COMMIT, ROLLBACK or UNKNOWN is an
answer. Whatever else comes of a checker is told as UNKNOWN with the reason, for the
operator to see, and the broker asks again later.
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
from txmq.client.blocking.core import Core
from txmq.client.log import get_logger
from txmq.crashpoints import crashpoint
from txmq.errors import (
    ClientClosed,
    ConfigError,
    LocalProtocolError,
    RemoteProtocolError,
    RequestRejected,
    TxmqError,
)
from txmq.model.message import UNKNOWN, Decision, check_name

WAIT_MS = 20_000  # of a long poll: the broker answers then at the latest
AT_ONCE = 16  # questions brought by one poll, answered one after the other
ANSWER_S = 5.0
REASON = 400  # characters
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # after an error
log = get_logger()


class HalfMessage(NamedTuple):
    """A message that waits for the decision."""

    topic: str
    message_id: str
    key: str | None
    tag: str | None
    headers: Mapping[str, str]
    body: bytes


class Answer(NamedTuple):
    """What the broker is told; `reason` is of an UNKNOWN."""

    decision: Decision
    reason: str = ""


class Half(NamedTuple):
    """What a checker is asked about: whether the local work of this transaction has
    been done.

    `token` is that of `client.transaction(checker=...)`, `service` the one that stored
    it, `tries` how often it was asked about before, `stored_at` microseconds since the
    epoch by the broker's clock.
    """

    token: UUID
    checker: str
    service: str
    tries: int
    stored_at: int
    messages: tuple[HalfMessage, ...]


Checker = Callable[[Half], Decision]


class Checkers:
    """The checkers registered in this process. `close` ends their thread."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._lock = Lock()
        self._functions: dict[str, Checker] = {}
        self._thread: Thread | None = None
        self._pid = os.getpid()
        self._stopped = Event()
        self._connection: Connection | None = None
        self._polling = False  # whether the thread only waits for questions now

    def register(self, name: str, function: Checker) -> None:
        """Answers for transactions of that checker from now on. Raises ConfigError
        where the client has no service.
        """
        if not self._core.settings.service:
            hint = "give the client one: txmq.connect(url, service=...)"
            raise ConfigError("service", "check-backs go to a service", hint=hint)
        if not callable(function):
            raise LocalProtocolError(
                f"checker {name} cannot be called", hint="give a function of the half message"
            )
        with self._lock:
            new = name not in self._functions
            self._functions[check_name(name, "checker")] = function
            if new and self._polling and self._connection is not None:
                self._connection.abort()  # the broker was told of the others only
            if self._thread is None or self._pid != os.getpid():
                self._pid = os.getpid()
                self._thread = Thread(target=self._run, name="txmq-checkers", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Ends the wait for questions; an answer under way is finished."""
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
        connection = self._core.dial(monotonic() + self._core.settings.timeout)
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
                "max": AT_ONCE,
                "wait_ms": WAIT_MS,
            }
            reply = connection.call("checks.wait", args, timeout=WAIT_MS / 1_000 + ANSWER_S)
        finally:
            with self._lock:
                self._polling = False
        for half in _halves(reply):
            answer = self._ask(half)
            if answer is not None:
                told = {
                    "token": half.token.hex,
                    "answer": answer.decision.name,
                    "reason": answer.reason,
                }
                crashpoint("checker.before_answer")
                try:
                    connection.call("checks.answer", told, timeout=ANSWER_S)
                    crashpoint("checker.after_answer")
                except (
                    RequestRejected
                ) as refused:  # decided meanwhile, perhaps otherwise: the broker has recorded it
                    log.warning(
                        "checkers.answer_refused", token=str(half.token), error=refused.message
                    )

    def _ask(self, half: Half) -> Answer | None:
        """The checker's answer, None where it is not of this process."""
        function = self._functions.get(half.checker)
        if function is None:  # another process of the service has it
            return None
        try:
            decision = function(half)
        except Exception as error:  # the user's code: whatever it raises, it is no answer
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
                f"checker {half.checker} gave a value of type {given}, which is no answer"
            )
        return (
            _unknown(f"checker {half.checker} says UNKNOWN")
            if decision is UNKNOWN
            else Answer(decision)
        )


def _unknown(reason: str) -> Answer:
    return Answer(UNKNOWN, reason.encode(errors="replace").decode()[:REASON])


def _halves(reply: dict[str, Any]) -> Iterator[Half]:
    try:
        for check in reply["checks"]:
            messages = tuple(message for batch in check["batches"] for message in _messages(batch))
            token, numbers = UUID(check["token"]), (int(check["tries"]), int(check["stored_at"]))
            yield Half(token, str(check["checker"]), str(check["service"]), *numbers, messages)
    except (KeyError, TypeError, ValueError) as error:
        raise RemoteProtocolError(f"a question that is none: {error!r:.200}") from error


def _messages(batch: dict[str, Any]) -> Iterator[HalfMessage]:
    view = BatchView(b64decode(batch["batch"]))
    columns = (view.message_ids, view.keys, view.tags, view.headers, view.bodies)
    for fields in zip(*columns, strict=True):
        yield HalfMessage(str(batch["topic"]), *fields)
