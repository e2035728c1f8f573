"""Decisions that nobody waits for: they go out on a connection at hand, and later
replies on it bring their answers.

To hand each to the pipeline's thread, and to wake that once more for the answer, would
cost more than all else that a client does for a transaction. What has no answer after a
while is looked after by a thread that sleeps when there is nothing of the kind: it
reads what has come, and where the connection is lost or silent, the pipeline makes the
decision again until it is answered.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Event, Lock, Thread
from uuid import UUID

from txmq.client.blocking.connections.connection import Connection
from txmq.client.blocking.connections.pool import Pool, Session
from txmq.client.log import get_logger
from txmq.client.protocol.conversation import result
from txmq.errors import (
    ClientClosed,
    ConnectionLost,
    ProtocolError,
    RequestTimeout,
    TxmqError,
    UnknownTransaction,
)
from txmq.model.message import Decision
from txmq.wire.frames import Frame
from txmq.wire.headers import Opcode

LOOK_EVERY_S = 0.25
Submit = Callable[[bytes], Future[bytes]]
log = get_logger()


class Told:
    """One decision, and its answer once somebody has read it. For any number of
    threads.
    """

    # that it went out on, and the connection that this had then; unset where the
    # pipeline sends it
    session: Session
    connection: Connection
    correlation: int
    at: float

    def __init__(self, teller: Teller, token: UUID, outcome: Decision, payload: bytes) -> None:
        self.token, self.outcome = token, outcome
        self._teller, self._payload = teller, payload
        self._reply: Frame | None = None
        self._again: Future[bytes] | None = None

    def sent(self, session: Session) -> bool:
        """Sends it on an idle session; whether it went out."""
        self.session, self.connection, self.at = session, session.connection, time.monotonic()
        correlation = session.connection.write_aside(Opcode.DECIDE, self._payload, self._heard)
        self.correlation = correlation or 0
        return correlation is not None

    def result(self, timeout: float) -> bytes:
        """The payload of the answer. Raises what the broker refused it with,
        TimeoutError, ClientClosed.
        """
        deadline = time.monotonic() + timeout
        if self._reply is None and self._again is None:
            self._teller.fetch(self, deadline)
        if self._reply is not None:
            return result(self._reply)
        assert self._again is not None, "what has no answer was told again"
        return self._again.result(max(0.0, deadline - time.monotonic()))

    @property
    def answered(self) -> bool:
        """Whether the answer is there."""
        return self._reply is not None

    def tell_again(self, submit: Submit) -> None:
        """Lets the pipeline send it, for as long as that takes. Raises ClientClosed."""
        self._again = submit(self._payload)
        self._again.add_done_callback(lambda told: self._note(told.exception()))

    def _heard(self, reply: Frame) -> None:
        self._reply = reply
        self._teller.forget(self)
        try:
            result(reply)
        except TxmqError as error:
            self._note(error)

    def _note(self, error: BaseException | None) -> None:
        """The block is over, so a decision that did not arrive is only worth a line:
        the resolver decides the same.
        """
        if error is not None and not isinstance(error, UnknownTransaction):
            not_told(self.token, self.outcome, error)


class Teller:
    """A client's decisions without an answer. For any number of threads."""

    def __init__(self, pool: Pool, submit: Submit, *, patience: float) -> None:
        """A connection that is silent for `patience` seconds is not waited for any
        longer.
        """
        self._pool, self._submit, self._patience = pool, submit, patience
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._open: dict[Told, None] = {}
        self._lock = Lock()
        self._watched, self._ended = Event(), Event()
        self._thread: Thread | None = None

    def tell(self, token: UUID, outcome: Decision, payload: bytes) -> Told:
        """Sends a decision. Raises ClientClosed."""
        if self._pid != os.getpid():  # in a child: the thread, and what is open, are the parent's
            self._begin()
        told = Told(self, token, outcome, payload)
        session = self._pool.spare()
        if session is None:
            told.tell_again(self._submit)
            return told
        self._open[told] = None  # before it goes out: another thread may read the answer at once
        try:
            sent = told.sent(session)
        finally:
            self._pool.give(session)
        if sent:
            self._watch()
        else:
            self._again(told)
        return told

    def forget(self, told: Told) -> None:
        """It has its answer."""
        self._open.pop(told, None)

    def fetch(self, told: Told, deadline: float) -> None:
        """Gets the answer, or tells it again: where the connection is in use by others,
        or lost.
        """
        session = told.session
        if self._pool.reclaim(session):
            try:
                if session.connection is told.connection:
                    session.connection.await_aside(told.correlation, deadline)
            except (ConnectionLost, RequestTimeout, ProtocolError, ClientClosed):
                pass
            finally:
                self._pool.give(session)
        if not told.answered:
            self._again(told)

    def settle(self, timeout: float) -> None:
        """Gets the answers of all that were told, or lets the pipeline get them."""
        deadline = time.monotonic() + timeout
        if self._pid == os.getpid():
            for told in list(self._open):
                if not told.answered:
                    with suppress(ClientClosed):
                        self.fetch(told, min(deadline, time.monotonic() + self._patience))

    def close(self, timeout: float) -> None:
        """As `settle`, and ends the thread."""
        self.settle(timeout)
        self._ended.set()
        self._watched.set()

    def _again(self, told: Told) -> None:
        self.forget(told)
        told.tell_again(self._submit)

    def _watch(self) -> None:
        if not self._watched.is_set():
            self._watched.set()
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = Thread(target=self._run, name="txmq-decisions", daemon=True)
                    self._thread.start()

    def _run(self) -> None:
        while self._watched.wait() and not self._ended.wait(LOOK_EVERY_S):
            self._look()
            if not self._open:
                self._watched.clear()
                if self._open:  # since: whoever put it there has seen the flag set
                    self._watched.set()

    def _look(self) -> None:
        now = time.monotonic()
        late = [
            told
            for told in list(self._open)
            if told.at < now - LOOK_EVERY_S or told.connection.closed
        ]
        if late:
            self._pool.catch_up()
        for told in late:
            if not told.answered and (told.connection.closed or told.at < now - self._patience):
                try:
                    self._again(told)
                except ClientClosed as closed:
                    not_told(told.token, told.outcome, closed)


def not_told(token: UUID, outcome: Decision, error: BaseException) -> None:
    """A line in the log: whoever else knows the outcome has to tell the broker."""
    log.warning("transaction.not_told", token=str(token), outcome=outcome.name, error=str(error))
