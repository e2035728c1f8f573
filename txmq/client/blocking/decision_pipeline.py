"""Decisions that are sent without waiting, on an idle connection of the pool.

Later replies on that connection bring the answers along. Passing each decision to the
sender's thread would cost more than the rest of a transaction in the client. A thread
looks after decisions that stay unanswered, and sleeps while there are none. It reads
what has arrived. If the connection is lost or silent, the sender repeats the decision
until it is answered.
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
from txmq.client.blocking.connections.pool import ConnectionPool, ProducerSession
from txmq.client.log import get_logger
from txmq.client.protocol.conversation import reply_payload
from txmq.errors import (
    ClientClosed,
    ConnectionLost,
    ProtocolError,
    RequestTimeout,
    TxmqError,
    UnknownTransaction,
)
from txmq.model.message import Decision
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import Frame

CHECK_EVERY_S = 0.25
Submit = Callable[[bytes], Future[bytes]]
log = get_logger()


class PendingDecision:
    """One decision, and its answer once it was read. For any number of threads."""

    # The pool's session that it went out on and the connection of that session then;
    # unset if the sender sends it.
    session: ProducerSession
    connection: Connection
    correlation: int
    sent_at: float

    def __init__(
        self, pipeline: DecisionPipeline, token: UUID, outcome: Decision, payload: bytes
    ) -> None:
        self.token, self.outcome = token, outcome
        self._pipeline, self._payload = pipeline, payload
        self._reply: Frame | None = None
        self._resent: Future[bytes] | None = None

    def send(self, session: ProducerSession) -> bool:
        """Send it on an idle session; return whether it went out."""
        self.session, self.connection, self.sent_at = session, session.connection, time.monotonic()
        correlation = session.connection.write_with_callback(
            Opcode.DECIDE, self._payload, self._receive
        )
        self.correlation = correlation or 0
        return correlation is not None

    def result(self, timeout: float) -> bytes:
        """Wait for the receipt. Raises the broker's refusal, TimeoutError,
        ClientClosed.
        """
        deadline = time.monotonic() + timeout
        if self._reply is None and self._resent is None:
            self._pipeline.fetch_answer(self, deadline)
        if self._reply is not None:
            return reply_payload(self._reply)
        assert self._resent is not None, "an unanswered decision was sent again"
        return self._resent.result(max(0.0, deadline - time.monotonic()))

    @property
    def answered(self) -> bool:
        """Return whether the answer has been read."""
        return self._reply is not None

    def resend(self, submit: Submit) -> None:
        """Let the sender repeat it until it is answered. Raises ClientClosed."""
        self._resent = submit(self._payload)
        self._resent.add_done_callback(lambda answer: self._log_failure(answer.exception()))

    def _receive(self, reply: Frame) -> None:
        self._reply = reply
        self._pipeline.remove(self)
        try:
            reply_payload(reply)
        except TxmqError as error:
            self._log_failure(error)

    def _log_failure(self, error: BaseException | None) -> None:
        """Log a lost decision: the block is over, and a check-back decides the same."""
        if error is not None and not isinstance(error, UnknownTransaction):
            log_undelivered(self.token, self.outcome, error)


class DecisionPipeline:
    """A client's unanswered decisions. For any number of threads."""

    def __init__(self, pool: ConnectionPool, submit: Submit, *, patience: float) -> None:
        """`patience`: seconds after which a decision on a silent connection is
        repeated.
        """
        self._pool, self._submit, self._patience = pool, submit, patience
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._unanswered: dict[PendingDecision, None] = {}
        self._lock = Lock()
        self._wake, self._ended = Event(), Event()
        self._thread: Thread | None = None

    def send(self, token: UUID, outcome: Decision, payload: bytes) -> PendingDecision:
        """Send a decision. Raises ClientClosed."""
        if self._pid != os.getpid():  # after a fork: thread and decisions are the parent's
            self._reset()
        decision = PendingDecision(self, token, outcome, payload)
        session = self._pool.acquire_warm()
        if session is None:
            decision.resend(self._submit)
            return decision
        # Before it goes out: another thread may read the answer at once.
        self._unanswered[decision] = None
        try:
            sent = decision.send(session)
        finally:
            self._pool.release(session)
        if sent:
            self._start_watching()
        else:
            self._resend(decision)
        return decision

    def remove(self, decision: PendingDecision) -> None:
        """Drop a decision that is answered."""
        self._unanswered.pop(decision, None)

    def fetch_answer(self, decision: PendingDecision, deadline: float) -> None:
        """Read the answer; repeat the decision if its connection is in use or lost."""
        session = decision.session
        if self._pool.acquire_if_idle(session):
            try:
                if session.connection is decision.connection:
                    session.connection.wait_for_callback(decision.correlation, deadline)
            except (ConnectionLost, RequestTimeout, ProtocolError, ClientClosed):
                pass
            finally:
                self._pool.release(session)
        if not decision.answered:
            self._resend(decision)

    def flush(self, timeout: float) -> None:
        """Read the answers of all decisions, or let the sender repeat them."""
        deadline = time.monotonic() + timeout
        if self._pid == os.getpid():
            for decision in list(self._unanswered):
                if not decision.answered:
                    with suppress(ClientClosed):
                        self.fetch_answer(
                            decision, min(deadline, time.monotonic() + self._patience)
                        )

    def close(self, timeout: float) -> None:
        """Read the answers as `flush` does, and end the thread."""
        self.flush(timeout)
        self._ended.set()
        self._wake.set()

    def _resend(self, decision: PendingDecision) -> None:
        self.remove(decision)
        decision.resend(self._submit)

    def _start_watching(self) -> None:
        if not self._wake.is_set():
            self._wake.set()
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = Thread(target=self._run, name="txmq-decisions", daemon=True)
                    self._thread.start()

    def _run(self) -> None:
        while self._wake.wait() and not self._ended.wait(CHECK_EVERY_S):
            self._check_answers()
            if not self._unanswered:
                self._wake.clear()
                if self._unanswered:  # added meanwhile, by a thread that saw the flag set
                    self._wake.set()

    def _check_answers(self) -> None:
        now = time.monotonic()
        late = [
            decision
            for decision in list(self._unanswered)
            if decision.sent_at < now - CHECK_EVERY_S or decision.connection.closed
        ]
        if late:
            self._pool.read_available()
        for decision in late:
            if not decision.answered and (
                decision.connection.closed or decision.sent_at < now - self._patience
            ):
                try:
                    self._resend(decision)
                except ClientClosed as closed:
                    log_undelivered(decision.token, decision.outcome, closed)


def log_undelivered(token: UUID, outcome: Decision, error: BaseException) -> None:
    """Log that a decision did not arrive; the broker learns it by other ways."""
    log.warning("transaction.not_told", token=str(token), outcome=outcome.name, error=str(error))
